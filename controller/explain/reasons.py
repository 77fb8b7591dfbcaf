"""The reason why no free device satisfies a pending claim (pure).

Permanent reasons (``controller.explain.permanent``) come before temporary ones: users are not asked to wait in vain,
and the reason stays the same while other claims come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from controller.demand.feasibility import Nodes
from controller.demand.matching import Selector
from controller.demand.node_search import Outcome
from controller.demand.pending_claims import PendingClaim, Queue
from controller.demand.requirements import ClaimRequirements, DeviceRequest, Refusal
from controller.explain.permanent import constraint, permanent_reason, together
from controller.explain.reason_codes import Code, Reason
from controller.explain.shortage import Shortage, holders, named, shortage
from controller.explain.unreported_nodes import ALL_REPORTED, UnreportedNodes

__all__ = ["ClaimReason", "Code", "reasons_of"]


@dataclass(frozen=True)
class ClaimReason:
    """The reason of one pending claim.

    ``claim`` is ``namespace/name``, of the pod if ``of_pod`` (its claim does not exist yet). ``data`` is JSON.
    """

    claim: str
    code: Code
    sentence: str
    data: Mapping[str, Any]
    of_pod: bool = False


def reasons_of(queue: Queue, unreported: UnreportedNodes = ALL_REPORTED) -> list[ClaimReason]:
    """One reason for each pending claim that no free device can satisfy.

    Claims are left out if the bounded search is undecided, if they request only devices of other drivers, and, with
    permanent reasons, while nodes may still report GPUs.
    """
    reasoning = Reasoning(queue)
    found = ((waiting, _qualified(reasoning.of(waiting), queue, unreported)) for waiting in queue.pending)
    return [
        ClaimReason(waiting.key, why.code, why.sentence, why.data, waiting.not_created)
        for waiting, why in found
        if why is not None
    ]


def _qualified(why: Reason | None, queue: Queue, unreported: UnreportedNodes) -> Reason | None:
    """``why``, as far as it holds although GPUs of some nodes are unknown."""
    if why is None or not why.permanent:
        return why
    if unreported.may_report:
        return None
    data = {**why.data, "unreported": list(unreported.nodes)}
    if not queue.feasibility.fleet.gpus:
        return Reason(Code.NO_GPUS, _no_gpus(unreported), data, permanent=True)
    if unreported.nodes:
        sentence = f"{why.sentence} (nothing is known yet of the GPUs of {unreported.names})"
        return replace(why, sentence=sentence, data=data)
    return why


def _no_gpus(unreported: UnreportedNodes) -> str:
    if unreported.nodes:
        return f"no node has reported its GPUs yet: see the log of the node plugin on {unreported.names}"
    return "no node has reported a GPU: does the node plugin run there? (kubectl get gpunodeplans)"


class Reasoning:
    """Finds reasons; equal requirements of several claims are examined once."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._feasibility = queue.feasibility
        self._shortages: dict[tuple[Selector, Nodes], Shortage] = {}
        self._known: dict[tuple[ClaimRequirements, Nodes], Reason | None] = {}

    def of(self, waiting: PendingClaim) -> Reason | None:
        """Why no free device satisfies ``waiting``; None if one does, or if the search is undecided."""
        queue = self._queue
        alternatives = queue.requirements(waiting)
        if isinstance(alternatives, Refusal):
            return Reason(Code(alternatives.code.value), alternatives.sentence, {})
        if not alternatives or queue.found(waiting).outcome is not Outcome.NONE:
            return None
        nodes = queue.nodes(waiting)
        reasons = [why for wish in alternatives if (why := self._of_requirements(wish, nodes)) is not None]
        if len(reasons) < len(alternatives):
            return self._of_pod(waiting)
        best = max(reasons, key=lambda why: why.nearness)
        if not best.permanent and len(queue.companions(waiting)) > 1 and self._pod_is_impossible(waiting):
            return self._of_pod(waiting)
        if len(alternatives) == 1:
            return best
        return replace(best, sentence=f"{best.sentence} (none of its {len(alternatives)} alternatives is nearer)")

    def _of_requirements(self, wish: ClaimRequirements, nodes: Nodes) -> Reason | None:
        """Why a claim cannot be satisfied even alone; None if it can."""
        if (wish, nodes) not in self._known:
            impossible = permanent_reason(self._feasibility, wish, nodes, self._shortage)
            self._known[wish, nodes] = impossible or self._at_present(wish, nodes)
        return self._known[wish, nodes]

    def _of_pod(self, waiting: PendingClaim) -> Reason:
        """The reason of a claim that can be satisfied alone, but not together with the other claims of its pod."""
        keys = {key for pod in waiting.pods for each in self._queue.of_pod(pod) if (key := each.key) != waiting.key}
        others, impossible = sorted(keys), self._pod_is_impossible(waiting)
        when = "even if nothing were held" if impossible else "at present"
        sentence = f"it could be met, but {when} not on one node with the other claims of its pod: {', '.join(others)}"
        return Reason(Code.NOT_TOGETHER, sentence, {"claims": others, "ever": not impossible}, impossible)

    def _pod_is_impossible(self, waiting: PendingClaim) -> bool:
        return self._queue.found(waiting, self._feasibility.unheld).outcome is Outcome.NONE

    def _at_present(self, wish: ClaimRequirements, nodes: Nodes) -> Reason | None:
        could: Callable[[ClaimRequirements, Nodes], bool] = self._feasibility.could
        for ask in wish.requests:
            if not could(ClaimRequirements((ask,)), nodes):
                return lacking(ask, self._shortage(ask, nodes), self._queue.holders)
        if could(wish, nodes):
            return None
        if wish.constraints and could(ClaimRequirements(wish.requests), nodes):
            return constraint(wish, "the requests could be met, but at present")
        return together(wish, "no node has all of them free at once")

    def _shortage(self, ask: DeviceRequest, nodes: Nodes) -> Shortage:
        where = (ask.selector, nodes)
        if where not in self._shortages:
            self._shortages[where] = shortage(self._feasibility, ask, nodes)
        return self._shortages[where]


def lacking(ask: DeviceRequest, found: Shortage, claim_of: Mapping[tuple[str, str], str]) -> Reason:
    """The reason where GPUs have the selected devices, but not enough of them are free."""
    obstacles = {each.value: len(gpus) for each, gpus in found.obstacles.items()}
    data = {
        "request": ask.name,
        "gpus": len(found.gpus),
        "obstacles": obstacles,
        "freeSlices": found.free,
        "neededSlices": found.needed,
    }
    if ask.count is not None and found.freest and found.free >= found.needed * ask.count:
        return _fragmented(ask, found, data)
    claims = holders(found.usable, claim_of)
    if ask.count is None:
        reason = "it asks for all devices of a node, and on every node that has them some are in use"
    else:
        reason = f"of the {len(found.usable)} GPUs that have it none has enough free"
    by = f"devices there are held by {len(claims)} {'claim' if len(claims) == 1 else 'claims'}"
    sentence = f"request {ask.name}: {reason}, {by}{_also(obstacles)}"
    return Reason(Code.HELD, sentence, {**data, "claims": len(claims)})


def _fragmented(ask: DeviceRequest, found: Shortage, data: Mapping[str, Any]) -> Reason:
    most = found.freest[0].state.free
    wanted = f"{found.needed:g} slices" if ask.count == 1 else f"{ask.count} times {found.needed:g} slices on one node"
    sentence = (
        f"request {ask.name}: {found.free:g} memory slices are free on {len(found.usable)} GPUs, at most {most:g} "
        f"on one, but no free placement of {wanted}; most is free on {named(found.freest)}"
    )
    places = [f"{entry.node}/gpu-{entry.number}" for entry in found.freest]
    return Reason(Code.FRAGMENTED, sentence + _also(data["obstacles"]), {**data, "mostFree": most, "freest": places})


def _also(obstacles: Mapping[str, int]) -> str:
    kept = sum(obstacles.values())
    return f"; {kept} more can't be used ({', '.join(sorted(obstacles))})" if kept else ""
