"""An API server that keeps no shared counters, its upgrade, and its downgrade while offers overlap: a real cluster.

Feature gates stand for the versions, so that one release is enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from driver.kube.client import KubeClient, load_configuration
from driver.model.plan import COUNTERS_FIELD
from tests.e2e.conftest import skip_without
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess, plugins
from tests.support.plugin import SLICES, PluginFlags, PluginProcess
from tests.support.scheduling import Scheduling, asked, forget

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

SETTLED_S = 90.0
LAYOUT = {"gpu-0-mig-3g40gb-0", "gpu-0-mig-3g40gb-4", "gpu-1", "gpu-2", "gpu-3"}


def gates(enabled: bool) -> dict[str, list[str]]:
    flags = [f"--feature-gates=DRAPartitionableDevices={str(enabled).lower()}"]
    return {"kube-apiserver": flags, "kube-scheduler": flags}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with control_plane("counters-go", gates(enabled=False)) as running:
        install(running)
        yield running


@pytest.fixture
def node(cluster: Cluster) -> Iterator[PluginProcess]:
    with plugins(cluster, ["n1"], PluginFlags(gpus="sim:h100-pcie-4", layout="0=3g.40gb,3g.40gb")) as [found]:
        yield found


def replace_control_plane(cluster: Cluster, *, keeps_counters: bool) -> None:
    plane = cluster.control_plane
    plane.stop()
    cluster._state.extra_args.update(gates(enabled=keeps_counters))
    plane.start_apiserver()
    plane.start_controllers()
    plane.wait()
    if keeps_counters:
        skip_without(cluster, "shared counters")  # 1.34 has them in the slices of the devices only


def counted(node: PluginProcess) -> set[bool]:
    return {COUNTERS_FIELD in device for device in node.devices().values()}


def status(controller: ControllerProcess) -> dict[str, Any]:
    found: dict[str, Any] = controller.plans().get("n1", {}).get("status", {})
    return found


def delete_slices(cluster: Cluster) -> None:
    """As a kubelet does that starts."""
    client = KubeClient(load_configuration(cluster.kubeconfig), "test")
    for item in client.get_object(SLICES)["items"]:
        client.delete(f"{SLICES}/{item['metadata']['name']}", missing_ok=True)


def test_a_node_follows_what_the_api_server_keeps(cluster: Cluster, node: PluginProcess) -> None:
    assert node.devices().keys() == LAYOUT
    assert counted(node) == {False}
    half, full = Scheduling(cluster, "half"), Scheduling(cluster, "full")
    half.ask(asked("gpu-inference-3g-40gb"))
    full.ask(asked("gpu-training"))
    given = {half.given()[0].device, full.given()[0].device}
    assert given <= LAYOUT

    replace_control_plane(cluster, keeps_counters=True)
    wait_for(lambda: counted(node) == {True} and len(node.devices()) > 20, SETTLED_S, "all that fits, with counters")
    assert given <= node.devices().keys()

    replace_control_plane(cluster, keeps_counters=False)
    before = node.devices()
    controller = ControllerProcess(cluster)
    controller.start()
    wait_for(lambda: status(controller).get("offerMode") == "Disjoint", SETTLED_S, "disjoint offers")
    assert COUNTERS_FIELD in status(controller)["dropped"]
    wait_for(lambda: counted(node) == {False}, SETTLED_S, "no counters")
    wait_for(lambda: len(node.devices()) < len(before), SETTLED_S, "fewer devices")
    assert given <= node.devices().keys()
    small = Scheduling(cluster, "small")
    small.ask(asked("gpu-inference-1g-10gb"))
    assert small.given()[0].device not in given
    controller.stop()
    forget(half, full, small)


@pytest.mark.slow
def test_devices_that_lose_their_counters_are_not_published_until_they_are_withdrawn(
    cluster: Cluster, node: PluginProcess
) -> None:
    replace_control_plane(cluster, keeps_counters=True)
    wait_for(lambda: counted(node) == {True} and len(node.devices()) > 20, SETTLED_S, "all that fits, with counters")
    node.stop()
    delete_slices(cluster)
    replace_control_plane(cluster, keeps_counters=False)
    node.spawn()
    wait_for(node.slices, SETTLED_S, "the slices")
    assert node.devices() == {}
    controller = ControllerProcess(cluster)
    controller.start()
    wait_for(node.devices, SETTLED_S, "disjoint offers")
    wait_for(lambda: status(controller).get("leftOut") == [], SETTLED_S, "nothing is left out")
    assert counted(node) == {False}
    assert status(controller)["offerMode"] == "Disjoint"
    controller.stop()
