"""How many offers of one key must stand, and on which GPUs (pure)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from controller.board import Board
from controller.floor import Floor, Place
from controller.offers import Demand, Eligible
from driver.placement import Key


@dataclass(frozen=True)
class Need:
    """At least ``count`` offers on the GPUs of ``eligible``."""

    eligible: Eligible
    count: int


def needs_of(
    floor: Floor, key: Key, demands: Sequence[Demand], standing: Collection[Place], at_least: int
) -> list[Need]:
    """The needs that ``demands`` for ``key`` come to, the narrowest first; the last one is for the whole fleet.

    Claims that some GPUs serve come on top of those that only a part of these GPUs serve. ``standing`` are the places
    of offers that are published, ``at_least`` how many offers stand though nobody waits.
    """
    if not demands:
        return [Need(None, at_least)]
    asked = [Need(demand.eligible, demand.count) for demand in demands if not demand.together]
    for demand in demands:
        if demand.together and (group := _group(floor, key, demand, asked, standing)) is not None:
            asked.append(Need(group, demand.count))
    sets = {need.eligible for need in asked if need.eligible is not None}
    needs = [Need(eligible, _within(asked, eligible)) for eligible in sets]
    needs.sort(key=lambda need: (len(need.eligible or ()), sorted(need.eligible or ())))
    return [*needs, Need(None, max(at_least, sum(need.count for need in asked)))]


def _within(asked: Iterable[Need], eligible: frozenset[str]) -> int:
    return sum(need.count for need in asked if need.eligible is not None and need.eligible <= eligible)


def _group(
    floor: Floor, key: Key, demand: Demand, asked: Sequence[Need], standing: Collection[Place]
) -> frozenset[str] | None:
    """The set of GPUs that shall serve a demand for devices together: one that does already, or the cheapest.

    If other offers come to serve it more cheaply by chance, the next choice moves there; prices only fall, so it ends.
    """
    scored = []
    for group in demand.together:
        eligible = group if demand.eligible is None else group & demand.eligible
        price = _price(Board(floor, key), eligible, _within(asked, eligible) + demand.count, standing)
        if price is not None:
            scored.append((price, sorted(eligible), eligible))
    return min(scored)[-1] if scored else None


def _price(
    board: Board, eligible: frozenset[str], count: int, standing: Collection[Place]
) -> tuple[bool, float] | None:
    """Whether offers are missing, and the growth of fragmentation by ``count`` devices; None if they don't fit."""
    stand = sum(1 for place in standing if board.floor.within(place, eligible))
    growth = 0.0
    while board.count(eligible) < count:
        best = board.best(eligible)
        if best is None:
            return None
        growth += best.ranked.terms.growth
        board.seat(best.place)
    return stand < count, round(growth, 6)
