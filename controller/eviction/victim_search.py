"""The cheapest pods of one node whose end makes room for a waiting pod (pure).

Pods that can only go together are one unit: those that share a claim, those of a gang. More units gone never make less
room, so of all priorities the lowest is found first that gives room if every unit up to it goes. Among the units up to
it, sets are tried in the order of their costs, on the fewest GPUs that the pod's devices can be on: the first set that
gives room is the cheapest. A unit without which even all others are not enough is in every set.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from math import comb
from typing import NamedTuple

MAX_TRIED = 20_000
"""Sets that are tried for one waiting pod, on all nodes. Beyond, units are left out one by one, the most expensive
first, while the rest is enough: no unit of the result is superfluous, but a cheaper set may exist."""


@dataclass
class Tries:
    """How many more sets may be tried."""

    remaining: int = MAX_TRIED


class EvictionCost(NamedTuple):
    """What a set of victims costs, in the order in which costs are compared; they are added up, but for ``priority``.

    ``priority``: the highest of the pods. ``busy``: pods that are not known to be idle. ``recency``: seconds that idle
    ones lack of being idle for a month. ``gpu_hours``: lost work, as the part of GPUs times the hours since the last
    checkpoint. ``slices``: memory slices that are freed.
    """

    priority: int = -(1 << 31)
    busy: int = 0
    pods: int = 0
    recency: int = 0
    gpu_hours: float = 0.0
    slices: float = 0.0

    def plus(self, other: EvictionCost) -> EvictionCost:
        return EvictionCost(
            max(self.priority, other.priority),
            self.busy + other.busy,
            self.pods + other.pods,
            self.recency + other.recency,
            self.gpu_hours + other.gpu_hours,
            self.slices + other.slices,
        )


@dataclass(frozen=True)
class VictimUnit:
    """Pods that are evicted together or not at all, and their claims; ``gpus``: those of the node that they have."""

    pods: tuple[str, ...]
    claims: frozenset[str]
    gpus: frozenset[str]
    cost: EvictionCost


class VictimSet(NamedTuple):
    """``is_cheapest``: no set of the node that would be enough costs less."""

    units: tuple[VictimUnit, ...]
    cost: EvictionCost
    is_cheapest: bool


Enough = Callable[[Collection[VictimUnit]], bool]
"""Whether the node has room for the waiting pod once these units are gone."""


def cheapest_victims(units: Iterable[VictimUnit], devices: int, enough: Enough, tries: Tries) -> VictimSet | None:
    """The cheapest of ``units`` after whose end there is room; None: even all of them are not enough.

    ``devices``: the number of devices that the pod asks for, 0 if that is not known.
    """
    ordered = sorted(units, key=lambda unit: unit.cost)
    priorities = sorted({unit.cost.priority for unit in ordered})
    if not ordered or not enough(ordered):
        return None
    low, high = 0, len(priorities) - 1
    while low < high:
        middle = (low + high) // 2
        if enough([unit for unit in ordered if unit.cost.priority <= priorities[middle]]):
            high = middle
        else:
            low = middle + 1
    allowed = [unit for unit in ordered if unit.cost.priority <= priorities[low]]
    needed = [unit for unit in allowed if not enough([other for other in allowed if other is not unit])]
    if enough(needed):
        return as_set(needed, is_cheapest=True)
    optional = [unit for unit in allowed if unit not in needed]
    for chosen in islice(_by_cost(optional, needed, devices), tries.remaining):
        tries.remaining -= 1
        if enough(chosen):
            return as_set(chosen, is_cheapest=True)
    remaining = allowed
    for unit in reversed(allowed):
        others = [other for other in remaining if other is not unit]
        remaining = others if enough(others) else remaining
    return as_set(remaining)


def as_set(units: Sequence[VictimUnit], *, is_cheapest: bool = False) -> VictimSet:
    cost = EvictionCost()
    for unit in units:
        cost = cost.plus(unit.cost)
    return VictimSet(tuple(units), cost, is_cheapest)


def _by_cost(
    optional: Sequence[VictimUnit], needed: Sequence[VictimUnit], devices: int
) -> Iterator[tuple[VictimUnit, ...]]:
    """``needed`` with each set of ``optional`` that may be useful, by their costs.

    Without the priority: of all that are enough it is the same.
    """
    gpus = sorted({gpu for unit in optional for gpu in unit.gpus})
    places = [frozenset(gpus)]
    if 0 < devices < len(gpus) and comb(len(gpus), devices) <= MAX_TRIED:
        places = [frozenset(chosen) for chosen in combinations(gpus, devices)]
    sets = (_sets_by_cost([unit for unit in optional if unit.gpus & place]) for place in places)
    before: tuple[VictimUnit, ...] = ()
    for _, chosen in heapq.merge(*sets, key=lambda item: item[0]):
        if chosen != before:  # of several places
            yield (*needed, *chosen)
        before = chosen


class _CandidateSet(NamedTuple):
    """A set of units by their indices, ``others`` before ``last``, with its cost and that of ``others``."""

    cost: EvictionCost
    last: int
    others: tuple[int, ...]
    of_others: EvictionCost


def _sets_by_cost(units: Iterable[VictimUnit]) -> Iterator[tuple[EvictionCost, tuple[VictimUnit, ...]]]:
    """Every set of ``units`` but the empty one, in the order of their costs without the priority."""
    by_cost = sorted(((unit.cost._replace(priority=0), unit) for unit in units), key=lambda item: item[0])
    nothing = EvictionCost(priority=0)
    candidates = [_CandidateSet(cost, 0, (), nothing) for cost, _ in by_cost[:1]]
    while candidates:
        cost, last, others, of_others = heapq.heappop(candidates)
        yield cost, tuple(by_cost[index][1] for index in (*others, last))
        if last + 1 < len(by_cost):
            more = by_cost[last + 1][0]
            heapq.heappush(candidates, _CandidateSet(cost.plus(more), last + 1, (*others, last), cost))
            heapq.heappush(candidates, _CandidateSet(of_others.plus(more), last + 1, others, of_others))
