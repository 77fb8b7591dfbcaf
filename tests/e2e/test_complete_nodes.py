"""Nodes that publish every device: constant slices, planned around by the controller; and new nodes without a plan."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from driver.kube.client import KubeClient, load_configuration
from driver.kube.watch_cache import Change, WatchCache
from driver.slices.publisher import Slice
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.complete_nodes import is_complete, label, specs
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess, plugins
from tests.support.plugin import SLICES, PluginFlags
from tests.support.scheduling import Scheduling, asked

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SMALL, FULL = "gpu-inference-1g-10gb", "gpu-training"
SOON_S = 60.0


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with control_plane("complete-nodes") as running:
        install(running)
        yield running


@pytest.fixture
def led(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster with a controller that was there before the first node."""
    controller = ControllerProcess(cluster)
    controller.start()
    lease = "/apis/coordination.k8s.io/v1/namespaces/tessera/leases/tessera-controller-heartbeat"
    wait_for(lambda: cluster.api.get(lease), SOON_S, "the controller is there")
    yield cluster
    controller.stop()
    assert controller.refused() == []


def plan(cluster: Cluster, node: str) -> dict[str, Any]:
    return {"spec": {}, **cluster.api.get(f"/apis/gpu.tessera.dev/v1alpha1/gpunodeplans/{node}")}


class Pools:
    """Every version of the node's pool that a watch saw, as (complete, number of devices)."""

    def __init__(self, cluster: Cluster, node: str, stop: threading.Event) -> None:
        self.seen: list[tuple[bool, int]] = []
        self._slices: dict[str, Slice] = {}
        client = KubeClient(load_configuration(cluster.kubeconfig), "watcher")
        selector = {"fieldSelector": f"spec.nodeName={node}"}
        cache = WatchCache(client, SLICES, Slice, lambda found: found, self._changed, selector)
        threading.Thread(target=cache.run, args=(stop,), daemon=True).start()
        wait_for(lambda: cache.synced, SOON_S, "slices were listed")

    def _changed(self, changes: Any) -> None:
        for change in changes:
            self._change(change)
            pools = [item.spec["pool"] for item in self._slices.values()]
            newest = max((pool["generation"] for pool in pools), default=0)
            current = [item for item in self._slices.values() if item.spec["pool"]["generation"] == newest]
            complete = {len(current)} == {item.spec["pool"]["resourceSliceCount"] for item in current}
            self.seen.append((complete, sum(len(item.spec.get("devices") or ()) for item in current)))

    def _change(self, change: Change[Slice]) -> None:
        if change.new is None:
            self._slices.pop(change.key.name, None)
        else:
            self._slices[change.key.name] = change.new


@pytest.mark.needs("shared counters")
def test_a_new_node_has_no_complete_pool_before_its_first_plan(led: Cluster) -> None:
    stop = threading.Event()
    pools = Pools(led, "n1", stop)
    try:
        with plugins(led, ["n1"], PluginFlags(gpus="sim:dgx-h100")) as [node]:
            wait_for(node.devices, SOON_S, "the controller's offers are published")
            wait_for(lambda: (plan(led, "n1").get("status") or {}).get("mode") == "Planned", SOON_S, "it is reported")
            assert len(node.devices()) < 8 * 26
    finally:
        stop.set()
    assert (False, 0) in pools.seen
    assert (True, 0) not in pools.seen


@pytest.mark.needs("shared counters")
def test_the_controller_offers_nothing_on_a_complete_node_and_leaves_its_devices_alone(led: Cluster) -> None:
    with plugins(led, ["n2"], PluginFlags(gpus="sim:dgx-h100")) as [node]:
        wait_for(lambda: plan(led, "n2")["spec"].get("offers"), SOON_S, "a plan with offers")
        label(led, "n2", "complete")
        wait_for(lambda: is_complete(node), SOON_S, "every device is published")
        wait_for(lambda: not plan(led, "n2")["spec"].get("offers"), SOON_S, "a plan without offers")
        wait_for(lambda: plan(led, "n2")["status"]["mode"] == "Complete", SOON_S, "it is reported")
        idle = specs(node)
        full = [Scheduling(led, f"full-{number}") for number in range(7)]
        for each in full:
            each.ask(asked(FULL), node="n2")
        small = Scheduling(led, "small")
        small.ask(asked(SMALL), node="n2")
        given = {each.given()[0].device for each in (*full, small)}
        assert len({name.partition("-mig-")[0] for name in given}) == 8
        refused = Scheduling(led, "refused")
        refused.ask(asked(FULL), node="n2")
        assert "needs a full GPU: none is free, of 8 NVIDIA H100 80GB HBM3 that have it" in reason(led, "refused")
        assert specs(node) == idle
        label(led, "n2", "curated")
        wait_for(lambda: len(node.devices()) < 8 * 26, SOON_S, "only some devices are published")
        assert given <= node.devices().keys()
        for each in (*full, small, refused):
            each.forget()


def reason(cluster: Cluster, claim: str) -> str:
    """The controller's reason for a claim that waits."""

    def found() -> str:
        items = cluster.api.get("/api/v1/namespaces/default/events")["items"]
        texts = [i["message"] for i in items if i["involvedObject"].get("name") == claim and i["reason"] == "AllHeld"]
        return texts[-1] if texts else ""

    return wait_for(found, SOON_S, "the controller's reason")


@pytest.mark.needs("shared counters")
def test_a_label_that_is_not_valid_is_named(led: Cluster) -> None:
    with plugins(led, ["n3"], PluginFlags(gpus="sim:dgx-h100")):
        label(led, "n3", "compleet")

        def event() -> list[str]:
            items = led.api.get("/api/v1/namespaces/default/events")["items"]
            return [
                i["message"] for i in items if i["involvedObject"].get("name") == "n3" and "publish" in i["message"]
            ]

        [message] = wait_for(event, SOON_S, "an Event on the Node")
        assert message.startswith(
            "label gpu.tessera.dev/publish=compleet is ignored: accepted are curated and complete"
        )


@pytest.fixture
def listing(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster with a controller that lists devices, as by default."""
    controller = ControllerProcess(cluster, flags=("--min-published", "auto"))
    controller.start()
    yield cluster
    controller.stop()


def published(devices: dict[str, dict[str, Any]], kind: str) -> list[str]:
    """Those of a kind, tainted and held ones included, as Kueue counts them."""
    return [
        name
        for name, device in devices.items()
        if device["attributes"]["type" if kind == "gpu" else "profile"] == {"string": kind}
    ]


@pytest.mark.needs("shared counters")
def test_a_tool_that_counts_published_devices_finds_a_whole_node_and_some_of_each_kind(listing: Cluster) -> None:
    with plugins(listing, ["n1"], PluginFlags(gpus="sim:dgx-h100")) as [node]:

        def full_gpus() -> list[bool]:
            """Whether each of those that are published is offered."""
            devices = node.devices()
            return sorted("taints" not in devices[name] for name in published(devices, "gpu"))

        wait_for(
            lambda: full_gpus() == [False] * 6 + [True] * 2, SOON_S, "all full GPUs are published, two to be given"
        )
        eight = Scheduling(listing, "eight")
        eight.ask(asked(FULL, count=8))
        assert len(eight.given()) == 8
        listed = "partitions are listed though nothing is free"
        wait_for(lambda: len(published(node.devices(), "1g.10gb")) == 2, SOON_S, listed)
        part = Scheduling(listing, "part")
        part.ask(asked(SMALL))
        assert part.refused()
        eight.forget()
        assert part.given()
        part.forget()
