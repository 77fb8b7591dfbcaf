"""Claims for which free memory would do: what they wait for (pure)."""

from __future__ import annotations

from controller.demand.device_search import SearchOutcome
from controller.demand.pending_claims import PendingClaim, Queue
from controller.explain.availability import listed
from controller.explain.reason import ClaimReason, ReasonCode
from controller.explain.situation import DisjointPlan, Situation
from driver.model.offer import Offer

ENOUGH_IS_FREE = "enough is free now; the scheduler has not allocated it yet"


def reason_of_disjoint(pending: PendingClaim, queue: Queue, plan: DisjointPlan) -> ClaimReason | None:
    """The reason of a claim whose devices are not offered yet, or are planned for other claims."""
    offers = plan.offers.get(pending.key)
    if offers is not None:
        awaited = [offer for offer in offers if offer in plan.obstructed]
        if not awaited:
            return None
        seconds = "" if plan.settle_seconds is None else f": about {plan.settle_seconds + 1:.0f} s"
        return ClaimReason(pending, ReasonCode.RESHAPING, _changed(queue, awaited[0]) + seconds)
    if pending.key in queue.held_back or not queue.satisfiable(pending):
        return None
    sentence = f"the free memory that would do is planned for claims before it: {listed(sorted(plan.offers))}"
    return ClaimReason(pending, ReasonCode.BEHIND, sentence)


def _changed(queue: Queue, offer: Offer) -> str:
    gpu, kind = queue.feasibility.fleet.gpus[offer.gpu], offer.spot.kind
    return f"gpu-{gpu.number} of node {gpu.node} is changed to offer {kind}"


def waits(pending: PendingClaim, situation: Situation) -> ClaimReason:
    """Of a claim that nothing is known to keep pending."""
    return ClaimReason(pending, ReasonCode.WAITS, _awaited(pending, situation))


def _awaited(pending: PendingClaim, situation: Situation) -> str:
    outcome, silent = situation.queue.found(pending).outcome, situation.controller_silent
    if outcome is SearchOutcome.NONE:
        nodes = situation.unreported.nodes
        where = f"the GPUs of {listed(nodes)}, whose node plugin has just started" if nodes else "any GPU"
        return f"no GPU that is known satisfies it, and nothing is known yet of {where}"
    enough = "enough is free" if outcome is SearchOutcome.FITS else "enough may be free"
    if silent is not None:
        return (
            f"{enough}, but the controller, which decides what is offered, has sent no heartbeat for {silent:.0f} s: "
            "nodes offer everything that fits 30 to 90 s after the last one (tessera status)"
        )
    if outcome is SearchOutcome.UNKNOWN:
        return "enough may be free, which takes too long to find out; the scheduler has not allocated it yet"
    return ENOUGH_IS_FREE
