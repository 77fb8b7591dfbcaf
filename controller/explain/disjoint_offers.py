"""The reason why a pending claim waits although free memory would do, where offers of one GPU are disjoint (pure)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from controller.demand.pending_claims import Queue
from controller.explain.availability import listed
from controller.explain.reason import ClaimReason, ReasonCode
from driver.model.plan import Offer
from driver.placement.state import OfferKind


def reasons_of_waiting(
    queue: Queue, planned: Mapping[str, Collection[Offer]], obstructed: Collection[Offer], settle_s: float
) -> list[ClaimReason]:
    """``planned`` are offers by claim; ``obstructed`` those that other offers of their GPU keep waiting.

    ``settle_s``: the seconds until a fence has reached all API servers, which is most of the time that this takes.
    """
    found = []
    for pending in queue.pending:
        offers = planned.get(pending.key)
        waits_for = [offer for offer in offers or () if offer in obstructed]
        if waits_for:
            sentence = f"{_changed(queue, waits_for[0])}: about {settle_s + 1:.0f} s"
            found.append(ClaimReason(pending, ReasonCode.RESHAPING, sentence))
        elif offers is None and pending.key not in queue.held_back and queue.satisfiable(pending):
            sentence = f"the free memory that would do is planned for claims before it: {listed(sorted(planned))}"
            found.append(ClaimReason(pending, ReasonCode.BEHIND, sentence))
    return found


def _changed(queue: Queue, offer: Offer) -> str:
    entry, kind = queue.feasibility.fleet.gpus[offer.gpu], OfferKind(offer.type, offer.profile)
    return f"gpu-{entry.number} of node {entry.node} is changed to offer {kind}"
