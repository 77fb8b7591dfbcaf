"""What a node writes of its plan, and of the fence when it runs standalone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from driver.kube.controller_heartbeat import HEARTBEAT
from driver.kube.lease import leases
from driver.model.plan import CURATED, PATH, PlanMode, PlanStatus
from driver.slices.slice_names import Pool
from kubelet_plugin.changes import ChangeNotifier, NodeChange
from kubelet_plugin.plan.instructions import WatchedInstructions
from kubelet_plugin.plan.plan_status import FenceRelease, PlanStatusWriter
from tests.support.api_server import ObjectApi
from tests.support.running import eventually, in_thread

CONFIG_MAPS = "/api/v1/namespaces/tessera/configmaps"
FENCED = {"node-a-gpu.tessera.dev": "gpu-0 gpu-1 gpu-2=uid=1800000000", "node-b-gpu.tessera.dev": "gpu-0"}


@dataclass
class Node:
    """node-a, standing alone in ``epoch`` or not."""

    api: ObjectApi
    epoch: str | None = None

    def __post_init__(self) -> None:
        pool = Pool("node-a", "gpu.tessera.dev")
        mode: Any = self
        self.fence = FenceRelease(self.api.server.client(), "tessera", pool, mode)

    def unplanned_epoch(self) -> str | None:
        return self.epoch

    def fenced(self) -> dict[str, str]:
        data: dict[str, str] = self.api.folder(CONFIG_MAPS)["tessera-fence"]["data"]
        return data


@pytest.fixture
def node() -> Iterator[Node]:
    with ObjectApi() as api:
        api.store(f"{CONFIG_MAPS}/tessera-fence", data=dict(FENCED))
        yield Node(api)


def test_alone_a_node_lifts_its_own_fence_and_no_other(node: Node) -> None:
    node.epoch = "e1"
    with in_thread(node.fence.run, node.fence.notify):
        node.fence.notify()
        eventually(lambda: node.fenced() == {"node-b-gpu.tessera.dev": "gpu-0"}, "its own is lifted")


def test_a_node_that_follows_a_plan_leaves_the_fence_alone(node: Node) -> None:
    node.fence._release()
    assert node.fenced() == FENCED


def test_it_asks_once_each_time_it_comes_to_stand_alone(node: Node) -> None:
    for epoch in ("e1", "e1", None, "e1", "e2", "e2"):
        node.epoch = epoch
        node.fence._release()
    assert node.api.count("PATCH") == 2


def test_where_nothing_was_ever_fenced_there_is_nothing_to_lift(node: Node) -> None:
    node.api.drop(f"{CONFIG_MAPS}/tessera-fence")
    node.epoch = "e1"
    node.fence._release()
    node.fence._release()
    assert node.api.count("PATCH") == 1


def test_a_fence_that_can_not_be_lifted_now_is_lifted_later(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.api.once("PATCH", lambda exchange: exchange.refuse(500, "etcd"))
    node.epoch = "e1"
    with in_thread(node.fence.run, node.fence.notify):
        node.fence.notify()
        eventually(lambda: len(node.fenced()) == 1, "its own is lifted")
    assert "trying again" in caplog.text


NODE, LEASES = "/api/v1/nodes/node-a", leases("tessera")
PLAN = f"{PATH}/node-a"


@dataclass
class Reporting:
    """node-a, which reports its GPUs."""

    api: ObjectApi

    def __post_init__(self) -> None:
        client, changes = self.api.server.client(), ChangeNotifier()
        self.plans = WatchedInstructions(client, "tessera", "node-a", lambda: CURATED, changes)
        self.follower = SimpleNamespace(instructions=self.plans)
        report: Any = self
        self.writer = PlanStatusWriter(client, "node-a", report)
        changes.subscribe(NodeChange.PLAN, self.writer.notify)

    def status(self) -> PlanStatus:
        return PlanStatus(epoch="e1", mode=PlanMode.STANDALONE, inventory="all of its GPUs")

    def inventory(self) -> str:
        found = self.api.folder(PATH).get("node-a", {}).get("status", {}).get("inventory", "")
        return str(found)


@contextmanager
def running(reporting: Reporting) -> Iterator[None]:
    with ExitStack() as stack:
        for run in reporting.plans.loops:
            stack.enter_context(in_thread(run, reporting.api.end_watches))
        with in_thread(reporting.writer.run, reporting.writer.notify):
            yield


@pytest.fixture
def reporting() -> Iterator[Reporting]:
    with ObjectApi() as api:
        api.store(NODE, spec={})
        yield Reporting(api)


def test_without_a_controller_a_node_creates_its_plan_and_reports_its_gpus_there(reporting: Reporting) -> None:
    with running(reporting):
        eventually(reporting.inventory, "its GPUs are reported")
    plan = reporting.api.folder(PATH)["node-a"]
    assert "spec" not in plan
    [owner] = plan["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("Node", "node-a")


def test_where_there_is_a_controller_a_node_waits_for_its_plan(reporting: Reporting) -> None:
    reporting.api.store(f"{LEASES}/{HEARTBEAT}", spec={})
    with running(reporting):
        eventually(lambda: reporting.plans.has_controller(), "the controller is known")
        reporting.api.store(PLAN, spec={"epoch": "e0"})
        eventually(reporting.inventory, "its GPUs are reported")
    assert reporting.api.folder(PATH)["node-a"]["spec"] == {"epoch": "e0"}
    assert reporting.api.count("POST") == 0


def test_a_node_that_may_not_create_its_plan_goes_on(reporting: Reporting, caplog: pytest.LogCaptureFixture) -> None:
    reporting.api.once("POST", lambda exchange: exchange.refuse(403, "not in this role"))
    with running(reporting):
        eventually(lambda: reporting.api.count("POST"), "it has tried")
        reporting.api.store(PLAN, spec={})
        eventually(reporting.inventory, "its GPUs are reported")
    assert "not in this role" not in caplog.text
