"""The cheapest victims on one node, against every set of them."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st

from controller.eviction import victim_search
from controller.eviction.victim_search import EvictionCost, Preemption, Tries, VictimUnit, cheapest_set, cost_of

SLICES = 8

COSTS = st.builds(
    EvictionCost,
    priority=st.integers(-2, 3),
    busy=st.integers(0, 3),
    pods=st.integers(1, 3),
    recency=st.integers(0, 5),
    gpu_hours=st.integers(0, 8).map(lambda quarters: quarters / 4),
    slices=st.integers(1, SLICES).map(float),
)


def needs(devices: int, size: int, gpus: Collection[str], units: Collection[VictimUnit]) -> victim_search.Enough:
    """Room for ``devices`` of so many slices, each on another GPU; a unit has an equal part of each of its GPUs."""

    def enough(gone: Collection[VictimUnit]) -> bool:
        used = dict.fromkeys(gpus, 0.0)
        for unit in units:
            for gpu in unit.gpus if unit not in gone else ():
                used[gpu] += unit.cost.slices / len(unit.gpus)
        return sum(used[gpu] <= SLICES - size for gpu in gpus) >= devices

    return enough


def best_of_all(units: Collection[VictimUnit], enough: victim_search.Enough) -> EvictionCost | None:
    every = chain.from_iterable(combinations(units, size) for size in range(1, len(units) + 1))
    return min((cost_of(chosen) for chosen in every if enough(chosen)), default=None)


@st.composite
def searches(draw: st.DrawFn) -> tuple[list[VictimUnit], int, victim_search.Enough]:
    gpus = [f"gpu-{number}" for number in range(draw(st.integers(1, 4)))]
    places = st.frozensets(st.sampled_from(gpus), min_size=1, max_size=2)
    units = [
        VictimUnit((f"pod-{number}",), frozenset({f"claim-{number}"}), draw(places), draw(COSTS))
        for number in range(draw(st.integers(0, 9)))
    ]
    devices, size = draw(st.integers(1, len(gpus))), draw(st.integers(1, SLICES))
    return units, devices, needs(devices, size, gpus, units)


@given(searches(), COSTS)
def test_no_set_of_victims_is_cheaper(
    search: tuple[list[VictimUnit], int, victim_search.Enough], limit: EvictionCost
) -> None:
    units, devices, enough = search
    if enough(()):
        return
    for known_devices in (devices, 0):
        tries, before = Tries(), Preemption("another", (), limit)
        result = cheapest_set("node", units, known_devices, enough, tries, before)
        best = best_of_all(units, enough)
        assert result is not None
        assert result.cost == (best if best is not None and best < limit else limit)
        assert result is before or enough(result.units)
        assert tries.remaining > 0


def test_of_many_equal_pods_a_set_is_found_that_has_no_superfluous_one() -> None:
    units = [
        VictimUnit((f"pod-{number}",), frozenset(), frozenset({"gpu-0"}), EvictionCost(priority=0, pods=1, slices=0.1))
        for number in range(70)
    ]
    gone_at_least = 35
    tries = Tries()
    victims = cheapest_set("node", units, 1, lambda gone: len(gone) >= gone_at_least, tries, None)
    assert victims is not None
    assert len(victims.units) == gone_at_least
    assert tries.remaining <= 0
