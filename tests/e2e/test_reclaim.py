"""Idle notebooks on a real node with simulated GPUs: a pod that waits gets the GPU of one that is idle, no other."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from driver.clock import seconds_time
from driver.simulator.node import SimulatedNode
from driver.simulator.state.gpu_load import SimulatedActivity, constant
from kubelet_plugin.checkpoint.records import decode_record
from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.harness.progress import Progress
from tests.harness.settings import Settings
from tests.harness.waiting import wait_for
from tests.support.chart import ANY_SIZE, install
from tests.support.controller import ControllerProcess
from tests.support.plugin import PluginFlags, PluginProcess
from tests.support.workloads import PODS, Workloads, reported_of, request

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(500)]

SOON_S, IDLE_S = 120.0, 240.0
POLICIES, PLANS = (f"/apis/gpu.tessera.dev/v1alpha1/{kind}" for kind in ("gpupolicies", "gpunodeplans"))
SETS = "/apis/apps/v1/namespaces/default/replicasets"
NOTEBOOKS = ("busy", "idle", "kept", "other")
POLICY = {
    "apiVersion": "gpu.tessera.dev/v1alpha1",
    "kind": "GpuPolicy",
    "metadata": {"name": "notebooks"},
    "spec": {"mode": "Active", "reclaim": {"idleAfter": "105s", "action": "Evict"}},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.start(Settings(name="reclaim", nodes=1), Progress()) as running:
        install(running, {**ANY_SIZE, "nodePlugin": {"usageInterval": "5s"}})
        yield running


@pytest.fixture(scope="module")
def plugin(cluster: Cluster) -> Iterator[PluginProcess]:
    """The plugin of a node with four GPUs, with a controller."""
    flags = PluginFlags(gpus="sim:h100-pcie-4", usage_interval="5s", metrics_address="127.0.0.1:0")
    process, controller = PluginProcess(cluster, cluster.nodes[0], flags), ControllerProcess(cluster)
    process.start()
    controller.start()
    yield process
    controller.stop()
    process.stop()
    assert [*controller.refused(), *process.refused()] == []


def notebook(name: str, annotations: dict[str, str]) -> dict[str, Any]:
    """A ReplicaSet of one pod, as of a Deployment."""
    labels = {"app": name}
    claims = [{"name": "gpu", "resourceClaimTemplateName": "full"}]
    container = {"resources": {"claims": [{"name": "gpu"}]}}
    pod = busybox_pod(name, container=container, restartPolicy="Always", resourceClaims=claims)
    template = {"metadata": {"labels": labels, "annotations": annotations}, "spec": pod["spec"]}
    return {"metadata": {"name": name}, "spec": {"selector": {"matchLabels": labels}, "template": template}}


def pods(cluster: Cluster, app: str) -> list[dict[str, Any]]:
    return list(cluster.api.get(f"{PODS}?labelSelector=app%3D{app}")["items"])


def use_gpu(plugin: PluginProcess, claim: str) -> None:
    records = [decode_record(path.read_bytes(), path) for path in plugin.records()]
    [uuid] = [device.gpu_uuid for record in records if record.name == claim for device in record.devices]
    SimulatedNode.attach(plugin.host_root).put_load(uuid, constant(SimulatedActivity.of(0.5), 1 << 30))


def test_the_idle_notebook_goes_and_busy_and_kept_ones_stay(cluster: Cluster, plugin: PluginProcess) -> None:
    api = cluster.api
    Workloads(cluster).template("full", request("gpu-training"))
    tomorrow = {"gpu.tessera.dev/keep-until": seconds_time(datetime.now(UTC) + timedelta(days=1))}
    for name in NOTEBOOKS:
        api.post(SETS, notebook(name, tomorrow if name == "kept" else {}))

    def started() -> dict[str, Any] | None:
        present = {name: pod for name in NOTEBOOKS for pod in pods(cluster, name)}
        return present if [pod["status"]["phase"] for pod in present.values()] == ["Running"] * 4 else None

    before = wait_for(started, SOON_S, "all notebooks run")
    assert before is not None
    claims = {name: pod["status"]["resourceClaimStatuses"][0]["resourceClaimName"] for name, pod in before.items()}
    for name in ("busy", "other"):
        use_gpu(plugin, claims[name])
    api.post(POLICIES, POLICY)
    train = busybox_pod(
        "train",
        container={"resources": {"claims": [{"name": "gpu"}]}},
        resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "full"}],
    )
    api.post(PODS, train)

    def reported() -> set[str]:
        entries = api.get(f"{PLANS}/{plugin.node.name}")["status"].get("idle", [])
        return {entry.partition(" ")[0] for entry in entries}

    idle = {f"default/{claims[name]}" for name in ("idle", "kept")}
    wait_for(lambda: reported() == idle, IDLE_S, "the node reports the idle claims")
    wait_for(lambda: api.get(f"{PODS}/train")["status"]["phase"] == "Running", IDLE_S, "the waiting pod has a GPU")
    for name in NOTEBOOKS:
        is_same = [pod["metadata"]["uid"] for pod in pods(cluster, name)] == [before[name]["metadata"]["uid"]]
        assert is_same == (name != "idle"), name
    reasons = reported_of(cluster, before["idle"]["metadata"]["name"])
    assert "; from " in reasons, "IdleSoon"
    assert "evicted for pod train of priority 0, which waits for its devices: they are idle" in reasons
