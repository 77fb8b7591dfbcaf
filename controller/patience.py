"""Claims that the scheduler goes on refusing though free devices would satisfy them (pure but for a memory).

Demand does not know everything that the scheduler does: taints by DeviceTaintRule, CPU and memory that are used up on
the very nodes with offers, affinity between pods. Whoever waits for ``WAIT_S`` seconds gets everything that matches, on
some nodes after the others. If that does not help either, the obstacle is not what is offered: the next try is later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from controller.claim_queue import Queue
from controller.survey import Nodes
from controller.waiting import Waiting

LOOK_S = 1.0
"""Between two looks at those who wait."""

WAIT_S = 4.0
"""How long the offers that were found for a claim have, while nobody who asks for the same is served."""

LONGEST_S = 10.0
"""How long that at most puts off one who waits: others may be served by what is of no use to it."""

TURN_S = 3.0
"""How long some nodes offer everything: the scheduler needs a moment, and all who wait come to their turn."""

WIDE_S = 30.0
"""For how long at least, before a pause; all nodes have their turn in any case."""

PAUSE_S, LONGEST_PAUSE_S = 60.0, 3600.0
"""The first pause; each is twice as long as the one before."""

NODES_AT_ONCE = 32
"""What is offered widely slows every scheduling, and the writing of it the API server."""

CLAIMS_AT_ONCE = 8
"""That ask for different things; what is alike is served alike."""


@dataclass
class Wait:
    """Of one claim: when it came, since when nobody like it was served (by the clock), and what it asks for."""

    came: float
    since: float
    alike: object


class Patience:
    """Remembers who waits since when; a new leader begins anew."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waits: dict[str, Wait] = {}

    @property
    def next_s(self) -> float | None:
        """After how many seconds time alone may change the answer of ``widened``; None: not while nobody waits."""
        return LOOK_S if self._waits else None

    def widened(self, queue: Queue) -> Mapping[str, Nodes]:
        """The nodes that shall offer everything that would do, by key of the claim they do it for."""
        now = self._clock()
        refused = {each.key: each for each in queue.waiting if is_refused(each) and queue.satisfiable(each)}
        self._remember(queue, refused, now)
        overdue = [each for each in refused.values() if self._age(each, now) >= 0]
        overdue.sort(key=lambda each: self._waits[each.key].since)
        chosen: dict[object, Nodes] = {}
        found: dict[str, Nodes] = {}
        for each in overdue:
            alike = (self._waits[each.key].alike, queue.nodes(each))
            if alike not in chosen and len(chosen) < CLAIMS_AT_ONCE and (nodes := self._turn(queue, each, now)):
                chosen[alike] = nodes
            if alike in chosen:
                found[each.key] = chosen[alike]
        return found

    def _remember(self, queue: Queue, refused: Mapping[str, Waiting], now: float) -> None:
        still = {each.key for each in queue.waiting}
        served = {wait.alike for key, wait in self._waits.items() if key not in still}
        self._waits = {key: wait for key, wait in self._waits.items() if key in refused}
        for key, each in refused.items():
            wait = self._waits.setdefault(key, Wait(now, now, queue.wishes(each)))
            if wait.alike in served and self._age(each, now) < 0 and now - wait.came < LONGEST_S:
                wait.since = now

    def _age(self, waiting: Waiting, now: float) -> float:
        """Seconds since its offers had their time; negative before."""
        return now - self._waits[waiting.key].since - WAIT_S

    def _turn(self, queue: Queue, waiting: Waiting, now: float) -> Nodes:
        """The nodes whose turn it is: those where its pods may run, then the others; none in a pause."""
        at = self._age(waiting, now)
        everywhere = frozenset(queue.survey.fleet.nodes)
        its_own = queue.nodes(waiting) & everywhere
        parts = [*_parts(its_own), *_parts(everywhere - its_own)]
        wide, pause = max(WIDE_S, TURN_S * len(parts)), PAUSE_S
        while at >= wide + pause:
            at, pause = at - wide - pause, min(2 * pause, LONGEST_PAUSE_S)
        return parts[int(at / TURN_S) % len(parts)] if at < wide and parts else frozenset()


def is_refused(waiting: Waiting) -> bool:
    """Whether the scheduler found no devices for one of its pods."""
    return any(condition.lacks_devices for pod in waiting.pods for condition in pod.status.conditions)


def _parts(nodes: Nodes) -> Iterator[Nodes]:
    ordered = sorted(nodes)
    for start in range(0, len(ordered), NODES_AT_ONCE):
        yield frozenset(ordered[start : start + NODES_AT_ONCE])
