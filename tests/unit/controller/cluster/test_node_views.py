"""What changed since the last decision, as everything that is derived from views of nodes is told."""

from __future__ import annotations

import pytest

from controller.cluster.node_views import NodeChanges, NodeViews, PoolPart, PublishedSlice
from driver.kube.types import GpuNodePlan, Metadata, Node, PlanMetadata
from driver.model.plan import Held, NodeCondition, NodeConditionType, PlanStatus

HELD = {"gpu-0": Held("gpu-0", "default/claim")}


def node(name: str, **labels: str) -> Node:
    return Node(Metadata(name, uid=name, labels=labels))


def slice_of(name: str) -> PublishedSlice:
    return PublishedSlice(name, PoolPart(f"{name}-gpu.tessera.dev", 1, 1), {"gpu-0": 1}, frozenset({"gpu-0"}))


@pytest.fixture
def views() -> NodeViews:
    """Two nodes, about which a decision has been made."""
    found = NodeViews("gpu.tessera.dev")
    for name in "ab":
        found.update(name, node(name), None, [slice_of(name)], {}, node_changed=True)
    assert found.changes() == NodeChanges(frozenset("ab"), {"a": node("a"), "b": node("b")}, list(found.all()), True)
    found.acknowledge()
    return found


def test_nothing_changed_after_a_decision(views: NodeViews) -> None:
    assert views.changes() == NodeChanges(frozenset(), {}, [], False)


def test_a_change_is_there_until_a_decision_has_been_made_of_it(views: NodeViews) -> None:
    views.update("a", node("a"), None, [slice_of("a")], HELD, node_changed=False)
    views.update("b", node("b"), None, [slice_of("b")], {}, node_changed=False)
    for _ in range(2):  # the first decision fails
        assert views.changes() == NodeChanges(frozenset("ab"), {}, [views.all()[0]], False)
    assert views.all()[0].held == HELD


def test_a_view_that_stays_equal_stays_the_same_object(views: NodeViews) -> None:
    before = views.all()
    views.update("a", node("a", irrelevant="label"), None, [slice_of("a")], {}, node_changed=True)
    assert views.all() is before
    assert views.changes() == NodeChanges(frozenset("a"), {"a": node("a", irrelevant="label")}, [], False)


def test_a_node_that_is_gone_changes_the_membership(views: NodeViews) -> None:
    views.update("a", None, None, [slice_of("a")], {}, node_changed=True)
    assert [view.name for view in views.all()] == ["b"]
    assert views.changes() == NodeChanges(frozenset("a"), {"a": None}, [], True)


def test_a_node_is_unable_for_the_reason_that_its_plan_has(views: NodeViews) -> None:
    conditions = tuple(NodeCondition(kind, "", f"because {kind}") for kind in NodeConditionType)
    plan = GpuNodePlan(PlanMetadata("a"), status=PlanStatus(conditions=conditions))
    views.update("a", node("a"), plan, [slice_of("a")], {}, node_changed=False)
    assert [view.unable for view in views.all()] == ["because Unable", None]


def test_devices_that_a_node_left_out_of_its_slices_count_as_published_and_not_as_offered(views: NodeViews) -> None:
    """A claim may just have been allocated one, so they have to be withdrawn."""
    plan = GpuNodePlan(PlanMetadata("a"), status=PlanStatus(left_out=("gpu-1",)))
    views.update("a", node("a"), plan, [slice_of("a")], {}, node_changed=False)
    assert views.all()[0].published.keys() == {"gpu-0", "gpu-1"}
    assert views.all()[0].offered == {"gpu-0"}
