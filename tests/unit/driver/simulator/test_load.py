"""The counters that loads drive: they never go back, and averages between them are what the loads say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.simulator.state.gpu_load import WHOLE_GPU, Load, Loads, Phase, SimulatedActivity, duty, steps

START = 1.75e9
ratios = st.floats(0, 1)
rates = st.floats(0, 1e12)
activities = st.builds(SimulatedActivity, ratios, ratios, ratios, ratios, ratios, rates, rates)
phases = st.lists(st.builds(Phase, st.floats(0.05, 1e4), activities), min_size=1, max_size=5).map(tuple)
devices = st.sampled_from([WHOLE_GPU, "MIG-a", "MIG-b"])


def simulate(load: Load, begin: float, end: float) -> SimulatedActivity:
    """The integral of a load, added up phase by phase."""
    total, time = SimulatedActivity(), 0.0
    # Relative to the start, where numbers are precise enough to be added up.
    begin, end = begin - load.since, end - load.since
    for _ in range(10_000):
        for phase in load.phases:
            total = total.plus(phase.activity, max(0.0, min(end, time + phase.seconds) - max(begin, time)))
            time += phase.seconds
            if time >= end:
                return total
    raise AssertionError("the window is too long for its phases")


@given(phases, st.floats(0, 60), st.floats(0.1, 20))
def test_the_average_over_any_window_is_what_the_load_says(
    phases: tuple[Phase, ...], offset: float, seconds: float
) -> None:
    load = Load(phases, since=START)
    begin = START + offset
    end = begin + seconds
    expected = SimulatedActivity().plus(simulate(load, begin, end), 1 / (end - begin))
    measured = SimulatedActivity().plus(load.integral(end).plus(load.integral(begin), -1), 1 / (end - begin))
    assert measured[:5] == pytest.approx(expected[:5], rel=1e-6, abs=1e-6)
    # Counters of 1e14 bytes are exact to less than a byte.
    assert measured[5:] == pytest.approx(expected[5:], rel=1e-6, abs=10)


@given(st.lists(st.tuples(st.floats(0, 1e6), devices, st.none() | phases), max_size=10))
def test_counters_never_go_back_whatever_is_set_replaced_or_removed(
    changes: list[tuple[float, str, tuple[Phase, ...] | None]],
) -> None:
    loads, now = Loads(), START
    before = dict.fromkeys((WHOLE_GPU, "MIG-a", "MIG-b"), SimulatedActivity())
    for seconds, device, phases in changes:
        now += seconds
        if phases is None:
            loads = loads.end(device, now)
        else:
            loads = loads.put(Load(phases, device, since=now, compute=1 / 7, memory=1 / 8))
        after = {name: loads.counters(name, now) for name in before}
        for name, counters in before.items():
            assert all(late >= early * (1 - 1e-12) - 1e-9 for late, early in zip(after[name], counters, strict=True)), (
                name
            )
        before = after


def test_a_load_in_the_future_has_not_begun() -> None:
    assert Load((Phase(1, SimulatedActivity.of(1.0)),), since=START).integral(START - 60) == SimulatedActivity()


def test_a_duty_of_one_and_a_single_point_are_constant() -> None:
    busy = SimulatedActivity.of(0.5)
    for phases in (duty(busy, 3, 1.0, 60), steps([(0, busy, 3)])):
        load = Load(phases, since=START)
        assert load.integral(START + 90).sm == pytest.approx(45)
        assert load.memory_at(START + 1e6 + 0.5) == 3
