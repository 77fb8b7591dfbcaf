"""A small cluster, simulated: what curation is for shows even there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.bench.placement import report
from tests.bench.placement.experiment import Result
from tests.bench.placement.policies import BestFirst, LowestStart, Policy, curated
from tests.bench.placement.simulation import Outcome, Simulation, pooled
from tests.bench.placement.trace import FULL_NODE, UNIFORM, WITH_TRAINING, Scenario
from tests.support.gpus import gpu_of

SMALL = Scenario(UNIFORM, gpu_of(), nodes=4, arrivals=600, warm_up=150)


def outcome_of(scenario: Scenario, policy: Policy) -> Outcome:
    return Simulation(scenario, policy).run()


@pytest.mark.long
def test_curation_admits_clearly_more_than_first_fit() -> None:
    def acceptance(policy: Callable[[], Policy]) -> float:
        return sum(outcome_of(replace(SMALL, seed=seed), policy()).acceptance for seed in (1, 2, 3)) / 3

    first_fit, best_first, chosen = acceptance(LowestStart), acceptance(BestFirst), acceptance(lambda: curated(2))
    assert chosen > best_first > first_fit
    assert chosen > first_fit + 0.03


@pytest.mark.long
def test_whole_nodes_are_there_for_training_only_under_curation() -> None:
    scenario = replace(SMALL, mix=WITH_TRAINING, load=0.7, seed=2)
    assert outcome_of(scenario, LowestStart()).admitted[FULL_NODE] == 0
    assert outcome_of(scenario, curated(2)).admitted[FULL_NODE] >= 4


def test_the_trace_is_the_same_for_everyone_and_has_the_load_it_names() -> None:
    scenario = Scenario(UNIFORM, gpu_of(), arrivals=2_000)
    trace = scenario.trace()
    assert trace == scenario.trace()
    assert trace != replace(scenario, seed=2).trace()
    slice_time = sum(arrival.request.slices(scenario.gpu) * arrival.duration for arrival in trace)
    assert slice_time / trace[-1].at / scenario.slices == pytest.approx(1.0)


def test_pooled_slices_bound_what_first_fit_can_admit() -> None:
    bound = pooled(SMALL)
    assert bound.acceptance > outcome_of(SMALL, LowestStart()).acceptance
    assert bound.arrived.total() == 450


@pytest.mark.slow
def test_the_report_sets_the_reference_beside_what_was_found() -> None:
    result = Result("curated, K=2", "uniform", 0.95, (0.94, 0.96), {"1g.10gb": 1.0}, {"1g.10gb": 9}, 0.9, 0.1, 2.0)
    text = report.overall([result])
    assert "0.9500 ±0.0100 (0.954)" in text
    assert "1g.10gb" in report.by_request([result], "uniform")
