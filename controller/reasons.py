"""Why nothing that is free could satisfy a claim that waits: one reason (pure).

What the fleet as it is can never give (``controller.never``) comes before what is held at the moment: who only waits
shall not be told to wait for what waiting doesn't bring, and a reason stays the same while claims come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from controller.claim_queue import Queue
from controller.hearing import EVERYBODY, Heard
from controller.matching import Selector
from controller.never import constraint, never, together
from controller.search import Outcome
from controller.shortage import Shortage, holders, named, shortage
from controller.survey import Nodes
from controller.waiting import Waiting
from controller.why import Code, Why
from controller.wishes import Ask, Refusal, Wish

__all__ = ["Code", "Reason", "reasons_of"]


@dataclass(frozen=True)
class Reason:
    """``claim`` is ``namespace/name``, of the pod if ``of_pod`` (its claim isn't made yet). ``data`` is JSON."""

    claim: str
    code: Code
    sentence: str
    data: Mapping[str, Any]
    of_pod: bool = False


def reasons_of(queue: Queue, heard: Heard = EVERYBODY) -> list[Reason]:
    """One reason for each claim that waits and that nothing free could satisfy.

    None where the bounded search could not tell, none for claims on other drivers' devices alone, and none about what
    the fleet lacks while nodes are about to tell what they have.
    """
    reasoning = Reasoning(queue)
    found = ((waiting, as_heard(reasoning.of(waiting), queue, heard)) for waiting in queue.waiting)
    return [
        Reason(waiting.key, why.code, why.sentence, why.data, waiting.made_up)
        for waiting, why in found
        if why is not None
    ]


def as_heard(why: Why | None, queue: Queue, heard: Heard) -> Why | None:
    """``why`` as far as it can be said by those who have not heard of every node."""
    if why is None or not why.never:
        return why
    if heard.waiting:
        return None
    data = {**why.data, "silent": list(heard.silent)}
    if not queue.survey.fleet.gpus:
        return Why(Code.NO_GPUS, _no_gpus(heard), data, never=True)
    if heard.silent:
        return replace(why, sentence=f"{why.sentence} (nothing is known yet of the GPUs of {heard.names})", data=data)
    return why


def _no_gpus(heard: Heard) -> str:
    if heard.silent:
        return f"no node has told of its GPUs yet: the log of the node plugin says why, on {heard.names}"
    return "no node has told of any GPU: does the node plugin run there? (kubectl get gpunodeplans)"


class Reasoning:
    """Finds reasons; what many claims ask for alike is looked at once."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._survey = queue.survey
        self._shortages: dict[tuple[Selector, Nodes], Shortage] = {}
        self._known: dict[tuple[Wish, Nodes], Why | None] = {}

    def of(self, waiting: Waiting) -> Why | None:
        """Why nothing could satisfy ``waiting``; None where something could, or nobody knows."""
        queue = self._queue
        wishes = queue.wishes(waiting)
        if isinstance(wishes, Refusal):
            return Why(Code(wishes.code.value), wishes.sentence, {})
        if not wishes or queue.found(waiting).outcome is not Outcome.NONE:
            return None
        nodes = queue.nodes(waiting)
        told = [why for wish in wishes if (why := self._of_wish(wish, nodes)) is not None]
        if len(told) < len(wishes):
            return self._of_pod(waiting)
        best = max(told, key=lambda why: why.nearness)
        if not best.never and len(queue.companions(waiting)) > 1 and self._pod_never(waiting):
            return self._of_pod(waiting)
        if len(wishes) == 1:
            return best
        return replace(best, sentence=f"{best.sentence} (none of its {len(wishes)} alternatives is nearer)")

    def _of_wish(self, wish: Wish, nodes: Nodes) -> Why | None:
        """Why a claim can't be met by itself; None if it could."""
        if (wish, nodes) not in self._known:
            impossible = never(self._survey, wish, nodes, self._shortage)
            self._known[wish, nodes] = impossible or self._at_present(wish, nodes)
        return self._known[wish, nodes]

    def _of_pod(self, waiting: Waiting) -> Why:
        """Why a claim that could be met by itself can't be with the other claims of its pod."""
        keys = {key for pod in waiting.pods for each in self._queue.of_pod(pod) if (key := each.key) != waiting.key}
        others, impossible = sorted(keys), self._pod_never(waiting)
        when = "even if nothing were held" if impossible else "at present"
        sentence = f"it could be met, but {when} not on one node with the other claims of its pod: {', '.join(others)}"
        return Why(Code.NOT_TOGETHER, sentence, {"claims": others, "ever": not impossible}, impossible)

    def _pod_never(self, waiting: Waiting) -> bool:
        return self._queue.found(waiting, self._survey.unheld).outcome is Outcome.NONE

    def _at_present(self, wish: Wish, nodes: Nodes) -> Why | None:
        could: Callable[[Wish, Nodes], bool] = self._survey.could
        for ask in wish.asks:
            if not could(Wish((ask,)), nodes):
                return lacking(ask, self._shortage(ask, nodes), self._queue.holders)
        if could(wish, nodes):
            return None
        if wish.rules and could(Wish(wish.asks), nodes):
            return constraint(wish, "the requests could be met, but at present")
        return together(wish, "no node has all of them free at once")

    def _shortage(self, ask: Ask, nodes: Nodes) -> Shortage:
        where = (ask.selector, nodes)
        if where not in self._shortages:
            self._shortages[where] = shortage(self._survey, ask, nodes)
        return self._shortages[where]


def lacking(ask: Ask, found: Shortage, claim_of: Mapping[tuple[str, str], str]) -> Why:
    """GPUs have what is selected, and not enough of it is free."""
    obstacles = {each.value: len(gpus) for each, gpus in found.obstacles.items()}
    data = {
        "request": ask.request,
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
    sentence = f"request {ask.request}: {reason}, {by}{_also(obstacles)}"
    return Why(Code.HELD, sentence, {**data, "claims": len(claims)})


def _fragmented(ask: Ask, found: Shortage, data: Mapping[str, Any]) -> Why:
    most = found.freest[0].state.free
    wanted = f"{found.needed:g} slices" if ask.count == 1 else f"{ask.count} times {found.needed:g} slices on one node"
    sentence = (
        f"request {ask.request}: {found.free:g} memory slices are free on {len(found.usable)} GPUs, at most {most:g} "
        f"on one, but no free placement of {wanted}; most is free on {named(found.freest)}"
    )
    places = [f"{entry.node}/gpu-{entry.number}" for entry in found.freest]
    return Why(Code.FRAGMENTED, sentence + _also(data["obstacles"]), {**data, "mostFree": most, "freest": places})


def _also(obstacles: Mapping[str, int]) -> str:
    kept = sum(obstacles.values())
    return f"; {kept} more can't be used ({', '.join(sorted(obstacles))})" if kept else ""
