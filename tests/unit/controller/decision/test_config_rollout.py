"""The rollout of configurations: a tenth of the nodes at a time, and no further after one that does not come back."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec
import pytest

from controller.cluster.cache import Snapshot
from controller.cluster.claim_index import ClaimIndex, ClusterState
from controller.cluster.node_views import NodeChanges
from controller.decision.config_rollout import IDLE_SECONDS, READY_TIMEOUT_SECONDS, STARTS_PER_TURN, ConfigRollout
from driver.config.node_configs import CONFIG_LABEL, CONFIGS_KEY, NO_CONFIG, NODE_CONFIGS, read_configs
from driver.kube.types import PAUSED, GpuNodePlan, Metadata, Node, NodeSpec, PlanMetadata, Taint
from driver.model.plan import PATH, ConfigStatus, NodeCondition, NodeConditionType, PlanSpec, PlanStatus
from tests.support.api_server import ObjectApi
from tests.support.clock import FakeClock

CONFIG_MAP = f"/api/v1/namespaces/tessera/configmaps/{NODE_CONFIGS}"


class Rollout:
    """Nodes that follow their plans, and a rollout whose turns the test takes."""

    def __init__(self, api: ObjectApi, count: int) -> None:
        self.api, self.clock = api, FakeClock()
        self.unreachable: set[str] = set()
        self.names = [f"n{number:03}" for number in range(count)]
        self.labels: dict[str, dict[str, str]] = {name: {"gpu": "l4"} for name in self.names}
        self.plans = {
            name: GpuNodePlan(PlanMetadata(name), status=self.status(NO_CONFIG.revision)) for name in self.names
        }
        for name in self.names:
            api.store(f"{PATH}/{name}", spec={})
        self.rollout = ConfigRollout(api.server.client(), "tessera", self.snapshot, self.clock)

    @staticmethod
    def status(revision: str, error: str = "") -> PlanStatus:
        return PlanStatus(config=ConfigStatus("", revision, error))

    def snapshot(self) -> Snapshot:
        taints = (Taint("node.kubernetes.io/unreachable", effect="NoExecute"),)
        specs = {name: NodeSpec(taints=taints) for name in self.unreachable}
        nodes = tuple(
            Node(Metadata(name=name, labels=self.labels[name]), specs.get(name, NodeSpec())) for name in self.names
        )
        state = ClusterState(ClaimIndex("gpu.tessera.dev"), (), (), nodes)
        return Snapshot(state, self.plans, (), {}, NodeChanges(frozenset(), {}, (), membership=False))

    def edit(self, **settings: str) -> str:
        """Change the configuration of all nodes; the revision of its settings."""
        text = json.dumps([{"name": "l4", "nodeSelector": {"gpu": "l4"}, "settings": settings}])
        self.api.store(CONFIG_MAP, data={CONFIGS_KEY: text})
        return read_configs(text)[0].revision

    def turn(self) -> set[str]:
        """The nodes that may start since this turn."""
        before = self.allowed()
        self.seconds = self.rollout.turn()
        for plan in self.api.folder(f"{PATH}/any").values():
            name = plan["metadata"]["name"]
            spec = PlanSpec(config_revision=plan["spec"].get("configRevision", ""))
            self.plans[name] = msgspec.structs.replace(self.plans[name], spec=spec)
        return {name for name, _ in self.allowed() - before}

    def allowed(self) -> set[tuple[str, str]]:
        """The nodes that may start, each with the revision."""
        return {(name, plan.spec.config_revision) for name, plan in self.plans.items() if plan.spec.config_revision}

    def restarted(self, names: set[str], error: str = "") -> None:
        for name in names:
            plan = self.plans[name]
            revision = NO_CONFIG.revision if error else plan.spec.config_revision
            self.plans[name] = msgspec.structs.replace(plan, status=self.status(revision, error))


@pytest.fixture
def api() -> Iterator[ObjectApi]:
    with ObjectApi() as running:
        yield running


def test_a_tenth_of_the_nodes_restarts_at_a_time_until_all_have(api: ObjectApi) -> None:
    rollout = Rollout(api, 40)
    rollout.edit(shares="all=4")
    for _ in range(10):
        started = rollout.turn()
        assert len(started) == 4
        assert rollout.turn() == set()  # until they are ready
        rollout.restarted(started)
    assert rollout.turn() == set()
    assert {name for name, _ in rollout.allowed()} == {*rollout.names}
    assert rollout.seconds == IDLE_SECONDS


def test_many_nodes_are_not_written_at_once(api: ObjectApi) -> None:
    rollout = Rollout(api, 200)
    rollout.edit(shares="all=4")
    assert len(rollout.turn()) == STARTS_PER_TURN


def test_no_further_node_restarts_after_one_that_does_not_become_ready(api: ObjectApi) -> None:
    rollout = Rollout(api, 3)
    rollout.edit(shares="all=4")
    [first] = rollout.turn()
    rollout.clock.advance(READY_TIMEOUT_SECONDS - 1)
    assert rollout.turn() == set()
    rollout.clock.advance(2)
    assert rollout.turn() == set()
    rollout.edit(shares="all=2")  # corrected: another rollout
    assert rollout.turn() == {first}
    rollout.restarted({first})
    assert len(rollout.turn()) == 1


def test_a_node_that_keeps_its_configuration_holds_up_no_other(api: ObjectApi) -> None:
    rollout = Rollout(api, 2)
    rollout.restarted({"n000"}, error="GPU 0 would not be managed")
    rollout.edit(excludeGpus="0")
    assert rollout.turn() == {"n001"}


def test_paused_plans_and_nodes_with_another_configuration_are_left_alone(api: ObjectApi) -> None:
    rollout = Rollout(api, 3)
    paused = PlanMetadata("n000", annotations={PAUSED: "true"})
    rollout.plans["n000"] = GpuNodePlan(paused, status=rollout.status(NO_CONFIG.revision))
    rollout.labels["n001"] = {"gpu": "l4", CONFIG_LABEL: "missing"}
    rollout.edit(shares="all=4")
    assert rollout.turn() == {"n002"}


def test_a_node_that_is_down_does_not_hold_up_the_others(api: ObjectApi) -> None:
    rollout = Rollout(api, 2)
    rollout.unreachable = {"n000"}
    rollout.edit(shares="all=4")
    assert rollout.turn() == {"n001"}


def test_a_node_that_waits_for_its_driver_does_not_hold_up_the_others(api: ObjectApi) -> None:
    rollout = Rollout(api, 2)
    unable = NodeCondition(NodeConditionType.UNABLE, "2026-11-28T12:00:00Z", "the node's NVIDIA driver can't be used")
    working = rollout.plans["n000"]
    status = msgspec.structs.replace(working.status, conditions=(unable,))
    rollout.plans["n000"] = msgspec.structs.replace(working, status=status)
    rollout.edit(shares="all=4")
    assert rollout.turn() == {"n001"}
    rollout.restarted({"n001"})
    rollout.plans["n000"] = working
    assert rollout.turn() == {"n000"}


def test_a_mistake_in_the_configurations_restarts_nobody(api: ObjectApi) -> None:
    rollout = Rollout(api, 2)
    api.store(CONFIG_MAP, data={CONFIGS_KEY: "["})
    assert rollout.turn() == set()
    assert rollout.seconds == IDLE_SECONDS
