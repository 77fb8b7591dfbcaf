"""The public trace: which devices its tasks get, and the bound that no placement exceeds."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import pytest

from driver.model.device import devices_of
from driver.model.offer import FULL
from driver.placement.occupancy import GpuState
from tests.bench.placement.trace import PROFILES, Request
from tests.bench.public_trace.packing import gpus_needed, partition_gpus
from tests.bench.public_trace.replays import BOUND, REPLAYS, churning, filling, replay
from tests.bench.public_trace.tasks import INFLATION, Rule, churn, inflation, tasks
from tests.support.gpus import gpu_of

FOUR, THREE, TWO, _, ONE = PROFILES[1:]


def fits_on_one_gpu(profiles: list[str], state: GpuState) -> bool:
    """Whether all have a place, by trying every placement with the product's own rules."""
    if not profiles:
        return True
    gpu = gpu_of()
    places = (device for device in devices_of(gpu, 0, 0) if device.profile and device.profile.name == profiles[0])
    return any(fits_on_one_gpu(profiles[1:], state.take(device.spot)) for device in places if state.fits(device))


@pytest.mark.parametrize(("ones", "twos", "threes", "fours"), list(product(range(8), range(4), range(3), range(2))))
def test_the_bound_of_one_gpu_is_what_placements_admit(ones: int, twos: int, threes: int, fours: int) -> None:
    profiles = ["4g.40gb"] * fours + ["3g.40gb"] * threes + ["2g.20gb"] * twos + ["1g.10gb"] * ones
    fits = fits_on_one_gpu(profiles, GpuState.of(gpu_of()))
    assert (partition_gpus(ones, twos, threes, fours) <= 1) is fits


def test_two_3g_and_four_2g_need_two_gpus() -> None:
    """Two 3g on one GPU would leave a slice that nothing can use."""
    assert gpus_needed(Counter({THREE: 2, TWO: 4})) == 2


def test_what_no_bound_is_known_of_is_refused() -> None:
    with pytest.raises(ValueError, match="3 x full"):
        gpus_needed(Counter({Request(FULL, 3): 1}))


def test_a_task_gets_the_smallest_device_that_has_its_part_of_a_gpu() -> None:
    by_compute, by_memory = (Counter(str(task.request) for task in tasks(rule)) for rule in (Rule.COMPUTE, Rule.MEMORY))
    assert by_compute["8 x full"] == by_memory["8 x full"] == 44
    assert by_compute["4g.40gb"] > 0 == by_memory["4g.40gb"]
    assert by_compute.total() == by_memory.total() == 7064


def test_tasks_come_until_they_ask_for_more_than_the_fleet() -> None:
    scenario = inflation(Rule.COMPUTE, 4, 1)
    asked = sum(arrival.request.slices(scenario.gpu) for arrival in scenario.trace())
    assert INFLATION - 0.3 < asked / scenario.slices <= INFLATION
    assert {arrival.duration for arrival in scenario.trace()} == {math.inf}
    assert scenario.trace() != inflation(Rule.COMPUTE, 4, 2).trace()


def test_tasks_that_come_and_go_ask_for_as_much_as_the_load_says() -> None:
    scenario = churn(Rule.COMPUTE, 4, 1, 1.2)
    arrivals = scenario.trace()
    asked = sum(arrival.request.slices(scenario.gpu) * arrival.duration for arrival in arrivals)
    assert asked / arrivals[-1].at / scenario.slices == pytest.approx(1.2)


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_refused_before_the_bound(seed: int) -> None:
    scenario = inflation(Rule.COMPUTE, 6, seed)
    results = {name: filling(replay(name, scenario)) for name in REPLAYS}
    assert max(results.values(), key=lambda result: result.before_refusal) == results[BOUND]
    assert all(0.5 < result.before_refusal <= result.end <= 1 for result in results.values())
    assert all(result.refused for result in results.values())


def test_what_is_held_and_admitted_while_tasks_come_and_go_is_counted_after_the_warm_up() -> None:
    scenario = churn(Rule.COMPUTE, 2, 1, 1.0)
    result = churning(replay(BOUND, scenario), scenario.warm_up)
    assert 0.5 < result.held < 1
    assert 0.5 < result.admitted < 1
    assert {str(request) for request in result.by_request} >= {"1g.10gb", "full"}
