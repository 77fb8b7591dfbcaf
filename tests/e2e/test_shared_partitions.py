"""Partitions that claims share, each with a compute instance of its own, on the real scheduler and kubelet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from driver.simulator.node import SimulatedNode
from tests.e2e.conftest import skip_without
from tests.harness.cluster import Cluster
from tests.harness.progress import Progress
from tests.harness.settings import Settings
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.controller import ControllerProcess
from tests.support.plugin import PluginFlags, PluginProcess
from tests.support.scheduling import asked
from tests.support.workloads import CLAIMS, Workloads, reported_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

INSTANCE = asked("gpu-compute-instance", 'device.attributes["gpu.tessera.dev"].profile == "1c.3g.40gb"')
SOON_S = 60.0
PODS_OF_ALL_GPUS = 4 * 2 * 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.start(Settings(name="shared-partitions"), Progress()) as running:
        install(running)
        skip_without(running, "shared counters")
        yield running


@pytest.fixture(scope="module")
def plugin(cluster: Cluster) -> Iterator[PluginProcess]:
    flags = PluginFlags(gpus="sim:h100-pcie-4", compute_instances="1c.3g.40gb")
    process = PluginProcess(cluster, cluster.nodes[0], flags)
    process.start()
    yield process
    process.stop()
    assert process.refused() == []


def claims_by_device(cluster: Cluster) -> Counter[str]:
    claims = (claim for claim in cluster.api.get(CLAIMS)["items"] if claim.get("status", {}).get("allocation"))
    results = (claim["status"]["allocation"]["devices"]["results"] for claim in claims)
    return Counter(result["device"] for [result] in results)


def uuids_by_partition(plugin: PluginProcess) -> dict[str, set[str]]:
    """The MIG devices of each GPU instance of the simulated node, by ``minor/id``."""
    node = SimulatedNode.attach(plugin.host_root)
    return {
        f"{minor}/{instance.id}": {compute.uuid for compute in instance.compute}
        for minor in range(4)
        for instance in node.gpu_state(minor).instances
    }


def test_three_pods_have_one_partition_and_a_fourth_opens_another(cluster: Cluster, plugin: PluginProcess) -> None:
    workloads = Workloads(cluster)
    names = [f"pod-{number}" for number in range(4)]
    for name in names:
        workloads.pod(name, workloads.claim(name, INSTANCE))
        workloads.running(name)
    assert sorted(claims_by_device(cluster).values()) == [1, 3]
    instances = uuids_by_partition(plugin)
    assert sorted(map(len, instances.values())) == [1, 3]

    def reported() -> set[str]:
        claims = cluster.api.get(CLAIMS)["items"]
        return {device["data"]["uuid"] for claim in claims for device in claim["status"].get("devices", ())}

    wait_for(lambda: reported() == set().union(*instances.values()), SOON_S, "the MIG UUIDs in status.devices")
    plugin.kill()
    plugin.start()
    assert uuids_by_partition(plugin) == instances
    workloads.delete_pods(*names)
    wait_for(lambda: not list((plugin.state_dir / "claims").iterdir()), SOON_S, "no record left")
    assert uuids_by_partition(plugin) == {}


def test_the_controller_keeps_partitions_open_and_says_when_no_slice_is_left(
    cluster: Cluster, plugin: PluginProcess
) -> None:
    controller, workloads = ControllerProcess(cluster), Workloads(cluster)
    controller.start()
    names = [f"planned-{number:02}" for number in range(PODS_OF_ALL_GPUS)]
    for name in names:
        workloads.pod(name, workloads.claim(name, INSTANCE))
    workloads.running(*names)
    assert set(claims_by_device(cluster).values()) == {3}
    workloads.pod("late", workloads.claim("late", INSTANCE))
    reason = wait_for(lambda: reported_of(cluster, "late"), SOON_S, "the reason on the claim")
    assert "no compute slice is left in the partitions, of 4 NVIDIA H100 PCIe" in reason
    workloads.delete_pods(names[0])
    workloads.running("late")
    assert set(map(len, uuids_by_partition(plugin).values())) == {3}
    workloads.delete_pods("late", *names[1:])
    wait_for(lambda: uuids_by_partition(plugin) == {}, SOON_S, "no partition left")
    controller.stop()
    assert controller.refused() == []
