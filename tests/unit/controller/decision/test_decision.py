"""A decision does no more than what changed asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.controller import DECISION_INTERVAL_SECONDS
from driver.clock import soonest
from driver.kube.controller_heartbeat import SILENCE_TIMEOUT_SECONDS
from tests.trace.decision import CASES, SettledCluster
from tests.trace.tracer import Trace, traced

MAX_FUNCTIONS, MAX_MODULES = 250, 40
SATISFIED, NEEDS_MORE = CASES.values()


@pytest.fixture
def cluster(tmp_path: Path) -> SettledCluster:
    return SettledCluster(tmp_path / "lists", nodes=20)


def decision_of(cluster: SettledCluster) -> Trace:
    with traced() as trace:
        cluster.decide()
    return trace


def test_a_claim_that_published_offers_satisfy_is_decided_by_few_functions_and_no_plan_is_written(
    cluster: SettledCluster,
) -> None:
    cluster.add("new", *SATISFIED)
    trace = decision_of(cluster)
    assert "controller/decision/plan_writer.py" not in trace.modules
    assert len(trace.calls) <= MAX_FUNCTIONS
    assert len(trace.modules) <= MAX_MODULES


def test_the_first_claim_of_a_class_does_not_wait_until_its_selectors_are_compiled(cluster: SettledCluster) -> None:
    cluster.add("new", *SATISFIED)
    assert not [module for module in decision_of(cluster).modules if module.startswith("deviceclasses/")]


def test_a_claim_that_needs_more_offers_has_them_written_into_plans(cluster: SettledCluster) -> None:
    cluster.add("new", *NEEDS_MORE)
    trace = decision_of(cluster)
    assert ("controller/decision/plan_writer.py", "PlanWriter._write") in trace.calls
    assert len(trace.calls) <= MAX_FUNCTIONS
    assert len(trace.modules) <= MAX_MODULES


def test_decisions_are_never_further_apart_than_the_sign_of_life_needs() -> None:
    assert soonest(DECISION_INTERVAL_SECONDS, None, None) == DECISION_INTERVAL_SECONDS
    assert soonest(DECISION_INTERVAL_SECONDS, 55.0, None) == DECISION_INTERVAL_SECONDS
    assert soonest(DECISION_INTERVAL_SECONDS, 55.0, 0.3, None) == 0.3
    assert soonest(None, None) is None
    assert 2 * DECISION_INTERVAL_SECONDS < SILENCE_TIMEOUT_SECONDS
