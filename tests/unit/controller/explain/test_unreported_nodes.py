"""What is said of the fleet while nodes have not told their GPUs yet."""

from __future__ import annotations

import pytest

from controller.cluster.node_views import (
    ALL_REPORTED,
    REPORT_TIMEOUT_SECONDS,
    NodeView,
    UnreportedNodes,
    UnreportedNodesTracker,
)
from controller.explain.reason import ReasonCode
from driver.model.plan import PlanStatus
from tests.support.clock import FakeClock
from tests.support.queues import FULL, Situation, node_of, profile, request
from tests.support.reasons import reasons_of


def told(name: str) -> NodeView:
    return NodeView(name, name, name, PlanStatus(inventory="{}"), {}, frozenset(), {})


def silent(name: str) -> NodeView:
    return NodeView(name, name, name, PlanStatus(), {}, frozenset(), {})


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def tracker(clock: FakeClock) -> UnreportedNodesTracker:
    return UnreportedNodesTracker(clock.monotonic)


def test_nodes_that_have_all_told_are_not_waited_for(tracker: UnreportedNodesTracker) -> None:
    assert tracker.update([told("a"), told("b")]) == ALL_REPORTED


def test_a_node_that_has_not_told_is_waited_for_and_then_named(
    tracker: UnreportedNodesTracker, clock: FakeClock
) -> None:
    views = [told("a"), silent("b")]
    assert tracker.update(views) == UnreportedNodes(("b",), may_report=True)
    clock.advance(REPORT_TIMEOUT_SECONDS)
    assert tracker.update(views) == UnreportedNodes(("b",), may_report=False)
    assert tracker.update([told("a"), told("b")]) == ALL_REPORTED


def test_while_nobody_has_told_anything_the_first_is_waited_for(
    tracker: UnreportedNodesTracker, clock: FakeClock
) -> None:
    assert tracker.update([]).may_report
    clock.advance(REPORT_TIMEOUT_SECONDS)
    assert not tracker.update([]).may_report
    assert tracker.update([silent("late")]).may_report


def test_a_node_that_joins_has_its_own_time(tracker: UnreportedNodesTracker, clock: FakeClock) -> None:
    tracker.update([told("a")])
    clock.advance(2 * REPORT_TIMEOUT_SECONDS)
    assert tracker.update([told("a"), silent("new")]).may_report


def test_nothing_is_said_of_what_matches_while_a_node_is_about_to_tell() -> None:
    there = Situation(node_of("a")).wants(request(selector=profile("1g.99gb")))
    assert reasons_of(there.queue, UnreportedNodes(("b",), may_report=True)) == []


def test_what_is_held_is_said_all_the_same() -> None:
    there = Situation(node_of("a", "full")).wants(request(selector=FULL))
    assert [each.code for each in reasons_of(there.queue, UnreportedNodes(("b",), may_report=True))] == [
        ReasonCode.HELD
    ]


def test_a_class_that_is_not_there_is_said_at_once() -> None:
    there = Situation([]).wants(request("nope"))
    assert [each.code for each in reasons_of(there.queue, UnreportedNodes(may_report=True))] == [
        ReasonCode.NO_SUCH_CLASS
    ]


def test_a_node_that_stays_silent_is_named_beside_what_is_missing_elsewhere() -> None:
    there = Situation(node_of("a")).wants(request(selector=profile("1g.99gb")))
    [found] = reasons_of(there.queue, UnreportedNodes(("b",)))
    assert found.code is ReasonCode.NOTHING_MATCHES
    assert found.sentence.endswith("(nothing is known yet of the GPUs of b)")


@pytest.mark.parametrize(
    ("unreported", "part"),
    [
        pytest.param(UnreportedNodes(), "does the node plugin run there?", id="no node plugin at all"),
        pytest.param(
            UnreportedNodes(("a", "b", "c", "d", "e")), "on a, b, c and 2 more", id="node plugins that say nothing"
        ),
    ],
)
def test_without_any_gpu_it_is_said_that_none_is_known_and_not_what_is_selected(
    unreported: UnreportedNodes, part: str
) -> None:
    [found] = reasons_of(Situation([]).wants(request(selector=FULL)).queue, unreported)
    assert found.code is ReasonCode.NO_GPUS
    assert part in found.sentence
    assert "device." not in found.sentence
