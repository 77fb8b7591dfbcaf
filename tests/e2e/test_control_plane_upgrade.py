"""The control plane is upgraded from 1.35 to 1.37 and back: running pods keep their partitions, new ones get theirs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from driver.model.plan import PATH, OfferMode
from tests.harness.cluster import Cluster
from tests.harness.progress import Progress
from tests.harness.settings import Settings
from tests.harness.versions import release
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.controller import ControllerProcess
from tests.support.plugin import PluginProcess
from tests.support.workloads import CLAIMS, PODS, Workloads, request

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1500)]

OLD, NEW = release("1.35.4"), release("1.37.1")
CLASSES = ["gpu-training"] * 2 + ["gpu-inference-1g-10gb"] * 20 + ["gpu-inference-2g-20gb"] * 8
MODE_S = 120.0


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster.start(Settings(name="cp-upgrade", release=OLD), Progress()) as running:
        install(running)
        yield running


def state_of(cluster: Cluster, plugin: PluginProcess) -> dict[str, Any]:
    """What must be the same before and after: pods, their containers, allocations, partitions, records, CDI specs."""
    pods = cluster.api.get(PODS)["items"]
    claims = cluster.api.get(CLAIMS)["items"]
    return {
        "pods": {pod["metadata"]["name"]: (pod["metadata"]["uid"], pod["status"]["phase"]) for pod in pods},
        "restarts": {pod["metadata"]["name"]: pod["status"]["containerStatuses"][0]["restartCount"] for pod in pods},
        "devices": {each["metadata"]["name"]: each["status"]["allocation"]["devices"]["results"] for each in claims},
        "partitions": sorted((each["uuid"], each["gpu"]) for each in plugin.partitions()),
        "records": plugin.records(),
        "specs": plugin.cdi_specs(),
    }


def published(plugin: PluginProcess, mode: OfferMode) -> bool:
    """Whether the node follows ``mode`` and all its devices are published that way."""
    status = plugin.cluster.api.get(f"{PATH}/{plugin.node.name}").get("status", {})
    counted = {"consumesCounters" in device for device in plugin.devices().values()}
    return bool(status.get("offerMode") == mode and counted == {mode is OfferMode.COUNTERS})


def test_thirty_pods_keep_what_they_have_and_new_ones_start_in_every_version(cluster: Cluster) -> None:
    plugin, controller = PluginProcess(cluster, cluster.nodes[0]), ControllerProcess(cluster)
    workloads = Workloads(cluster)
    plugin.start()
    controller.start()

    def run(name: str, device_class: str) -> str:
        return workloads.pod(name, workloads.claim(name, request(device_class)))

    wait_for(lambda: published(plugin, OfferMode.DISJOINT), MODE_S, "disjoint offers on 1.35")
    workloads.running(*[run(f"pod-{number}", name) for number, name in enumerate(CLASSES)])
    before = state_of(cluster, plugin)
    assert len(before["pods"]) == len(before["records"]) == len(CLASSES)
    for to, mode in ((NEW, OfferMode.COUNTERS), (OLD, OfferMode.DISJOINT)):
        cluster.change_release(to, Progress())
        wait_for(lambda mode=mode: published(plugin, mode), MODE_S, f"{mode} on {to.kubernetes}")  # type: ignore[misc]
        assert state_of(cluster, plugin) == before
        later = run(f"later-{mode.lower()}", "gpu-inference-1g-10gb")
        workloads.running(later)
        workloads.delete_pods(later)
        workloads.delete_claims(later)
        wait_for(lambda: state_of(cluster, plugin) == before, 60, "what came later has gone")
    controller.stop()
    plugin.stop()
