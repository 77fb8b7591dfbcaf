"""Wider offers for claims that stay pending although free devices would satisfy them (pure but for a memory).

Demand ignores some rules of the scheduler: taints by DeviceTaintRule, CPU and memory that are used up on the nodes with
offers, affinity between pods. After ``OVERDUE_AFTER_SECONDS`` a claim gets offers for all matching devices, on one
group of nodes after the other; where offers are disjoint, its devices are planned on one node after the other. If that
doesn't help, offers are not the obstacle, and the next attempt comes later.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from controller.demand.feasibility import Nodes
from controller.demand.pending_claims import PendingClaim, Queue

CHECK_INTERVAL_SECONDS = 1.0
"""Time between two checks of pending claims."""

OVERDUE_AFTER_SECONDS = 4.0
"""Time after which a claim that lacks devices gets wider offers, from when it was first seen, or from the last
allocation of its burst, if that was later: until then the scheduler may not have come to it."""

BURST_SECONDS = 5.0
"""A claim's burst are the claims that were first seen before it, or at most this much later. Later ones that are
allocated have overtaken it, so they do not defer it."""

MAX_DEFERRAL_SECONDS = 30.0
"""Longest time that allocations of its burst defer a pending claim: their devices may be of no use to it."""

TURN_SECONDS = 3.0
"""Time for which one group of nodes offers all matching devices: enough for the scheduler, short for other groups."""

WIDE_SECONDS = 30.0
"""Least duration of wider offers before a pause; all groups of nodes have their turn in any case."""

PAUSE_SECONDS, MAX_PAUSE_SECONDS = 60.0, 3600.0
"""The first and the longest pause; each is twice as long as the one before."""

MAX_NODES = 32
"""Nodes in one group. Wider offers slow down the scheduler, and publishing them the API server."""

MAX_CLAIMS = 8
"""Different claims that get wider offers at the same time; equal claims share them."""


@dataclass
class LackingSince:
    """A claim that lacks devices: since when, the last allocation of its burst after that, and its requirements."""

    since: float
    last_burst_allocation: float
    requirements: object


class OverdueClaims:
    """Remembers since when claims are pending; a new leader starts from zero."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first_seen: dict[str, float] = {}
        """When each pending claim was first seen, by key."""
        self._waits: dict[str, LackingSince] = {}

    @property
    def next_s(self) -> float | None:
        """Seconds after which ``widened`` may change by time alone; None while no claim lacks devices that are free."""
        return CHECK_INTERVAL_SECONDS if self._waits else None

    def widened(self, queue: Queue) -> Mapping[str, Nodes]:
        """The nodes that must offer all matching devices, by key of the claim."""
        return self._turns(queue, lambda pending: _groups(queue, pending))

    def node_in_turn(self, queue: Queue) -> Mapping[str, Nodes]:
        """The node on which to plan disjoint offers for each overdue claim, by its key: few fit at once."""
        return self._turns(queue, lambda pending: [frozenset({node}) for node in _feasible(queue, pending)])

    def _turns(self, queue: Queue, groups_of: Callable[[PendingClaim], Sequence[Nodes]]) -> Mapping[str, Nodes]:
        now = self._clock()
        waiting = (pending for pending in queue.pending if pending.key not in queue.gangs_without_room)
        unsatisfied = {
            pending.key: pending
            for pending in waiting
            if any(pod.lacks_devices for pod in pending.pods) and queue.satisfiable(pending)
        }
        self._remember(queue, unsatisfied, now)
        overdue = [pending for pending in unsatisfied.values() if self._overdue_seconds(pending, now) >= 0]
        overdue.sort(key=lambda pending: self._waits[pending.key].last_burst_allocation)
        chosen: dict[object, Nodes] = {}
        wider: dict[str, Nodes] = {}
        for pending in overdue:
            equal = (self._waits[pending.key].requirements, queue.nodes(pending))
            if (
                equal not in chosen
                and len(chosen) < MAX_CLAIMS
                and (nodes := self._turn(groups_of(pending), pending, now))
            ):
                chosen[equal] = nodes
            if equal in chosen:
                wider[pending.key] = chosen[equal]
        return wider

    def _remember(self, queue: Queue, unsatisfied: Mapping[str, PendingClaim], now: float) -> None:
        before = self._first_seen
        self._first_seen = {pending.key: before.get(pending.key, now) for pending in queue.pending}
        earliest_served = min((before[key] for key in before.keys() - self._first_seen.keys()), default=math.inf)
        self._waits = {key: wait for key, wait in self._waits.items() if key in unsatisfied}
        for key, pending in unsatisfied.items():
            wait = self._waits.setdefault(key, LackingSince(now, now, queue.requirements(pending)))
            may_defer = self._overdue_seconds(pending, now) < 0 and now - wait.since < MAX_DEFERRAL_SECONDS
            if may_defer and earliest_served <= self._first_seen[key] + BURST_SECONDS:
                wait.last_burst_allocation = now

    def _overdue_seconds(self, pending: PendingClaim, now: float) -> float:
        """Seconds since the time for regular offers ended; negative before."""
        return now - self._waits[pending.key].last_burst_allocation - OVERDUE_AFTER_SECONDS

    def _turn(self, groups: Sequence[Nodes], pending: PendingClaim, now: float) -> Nodes:
        """The one of ``groups`` whose turn it is; none in a pause."""
        at = self._overdue_seconds(pending, now)
        wide, pause = max(WIDE_SECONDS, TURN_SECONDS * len(groups)), PAUSE_SECONDS
        while at >= wide + pause:
            at, pause = at - wide - pause, min(2 * pause, MAX_PAUSE_SECONDS)
        return groups[int(at / TURN_SECONDS) % len(groups)] if at < wide and groups else frozenset()


def _groups(queue: Queue, pending: PendingClaim) -> list[Nodes]:
    """Groups of all nodes, first those where its pods may run."""
    everywhere = frozenset(queue.feasibility.fleet.nodes)
    eligible = queue.nodes(pending) & everywhere
    return [*_parts(eligible), *_parts(everywhere - eligible)]


def _feasible(queue: Queue, pending: PendingClaim) -> list[str]:
    """The nodes that have room for it now."""
    requirements = queue.preferred_requirements(pending)
    return sorted(queue.feasibility.nodes_that_may_fit(requirements, queue.nodes(pending))) if requirements else []


def _parts(nodes: Nodes) -> Iterator[Nodes]:
    ordered = sorted(nodes)
    for start in range(0, len(ordered), MAX_NODES):
        yield frozenset(ordered[start : start + MAX_NODES])
