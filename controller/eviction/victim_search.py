"""The cheapest pods of one node whose end makes room for a waiting pod (pure).

Pods that can only go together are one unit: those that share a claim, those of a gang. More units gone never make less
room. A search begins with all units on as many GPUs as the pod asks for devices, if their end is enough. One by one,
the most expensive first, each unit is left out if the rest is enough, and kept if not. Later the search goes on from
each unit that was left out as if it were kept, in the order of the costs of what is kept. These only rise, so it stops
where they reach those of the best set so far.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import reduce
from heapq import heappop, heappush
from itertools import combinations, count
from math import comb
from typing import NamedTuple

MAX_TRIED = 20_000
"""Sets that are tried for one waiting pod, on all nodes. Beyond, no unit of the result is superfluous, but a cheaper
set may exist."""


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


class Preemption(NamedTuple):
    """Victims on ``node``; ``is_cheapest``: no set that would be enough costs less."""

    node: str
    units: tuple[VictimUnit, ...]
    cost: EvictionCost
    is_cheapest: bool = False


Enough = Callable[[Collection[VictimUnit]], bool]
"""Whether the node has room for the waiting pod once these units are gone."""


def cheapest_set(
    node: str, units: Iterable[VictimUnit], devices: int, enough: Enough, tries: Tries, best: Preemption | None
) -> Preemption | None:
    """The cheapest of ``units`` on ``node`` after whose end there is room; ``best`` if none is better.

    ``devices``: the number of devices that the pod asks for, 0 if that is not known.
    """
    ordered = sorted(units, key=lambda unit: unit.cost)
    gpus, places = sorted({gpu for unit in ordered for gpu in unit.gpus}), [ordered]
    if 0 < devices < len(gpus) and comb(len(gpus), devices) * len(ordered) <= tries.remaining:
        chosen = combinations(gpus, devices)
        places = [[unit for unit in ordered if not unit.gpus.isdisjoint(place)] for place in chosen]
    number = count()
    unfinished = [(EvictionCost(), next(number), list[VictimUnit](), place) for place in places if enough(place)]
    while unfinished:
        cost, _, kept, undecided = heappop(unfinished)
        while beats(cost, node, best):
            if not undecided:
                best = Preemption(node, tuple(kept), cost)
                continue
            *undecided, last = undecided
            tries.remaining -= 1
            with_last = (cost.plus(last.cost), next(number), [last, *kept], undecided)
            if not enough([*undecided, *kept]):
                cost, _, kept, _ = with_last
            elif tries.remaining > 0:
                heappush(unfinished, with_last)
        if tries.remaining <= 0:
            break
    return best


def beats(cost: EvictionCost, node: str, best: Preemption | None) -> bool:
    """Whether a set that costs so much is better than ``best``: of equal ones that of the first node by name is."""
    return best is None or (cost, node) < (best.cost, best.node)


def cost_of(units: Iterable[VictimUnit]) -> EvictionCost:
    return reduce(EvictionCost.plus, (unit.cost for unit in units), EvictionCost())
