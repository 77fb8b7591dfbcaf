"""The real cluster-autoscaler on nodes that publish every device: it adds and removes as many nodes as are needed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from driver.errors import ApiError
from driver.kube.client import KubeClient, load_configuration
from driver.model.plan import PUBLISH
from tests.bench.placement.fleet import FleetNode, Mode, simulated_gpus
from tests.harness.cluster import Cluster
from tests.harness.processes import ProcessTable, kill
from tests.harness.waiting import wait_for
from tests.integration.cloud import Cloud, provider_id
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess
from tests.support.plugin import SLICES
from tests.support.workloads import PODS

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

SOON_S, LATER_S = 90.0, 180.0
SETTLED_S = 15.0
"""Several rounds of the autoscaler, in which it would order more nodes."""

TEMPLATES = "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaimtemplates"
SETS = "/apis/apps/v1/namespaces/default/replicasets"
MONITORING = "monitoring"
DAEMON_SETS = f"/apis/apps/v1/namespaces/{MONITORING}/daemonsets"
FLAGS = (
    "--cloud-provider=externalgrpc",
    "--leader-elect=false",
    "--scan-interval=2s",
    "--scale-down-delay-after-add=5s",
    "--scale-down-unneeded-time=5s",
    "--unremovable-node-recheck-timeout=5s",
    "--node-delete-delay-after-taint=0s",
    "--max-graceful-termination-sec=2",
    "--namespace=kube-system",
    "--address=127.0.0.1:0",
    "-v=4",
)


@dataclass
class Autoscaled:
    """A cluster whose nodes an autoscaler adds and removes; each has eight simulated H100."""

    cluster: Cluster
    client: KubeClient
    nodes: dict[str, FleetNode] = field(default_factory=dict)
    stops: dict[str, threading.Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cloud = Cloud(10, self.start, self.end)

    def start(self, name: str) -> None:
        gpus = simulated_gpus("dgx-h100", self.cluster.directory, name)
        node = FleetNode(self.cluster, name, gpus, Mode.COMPLETE, labels={PUBLISH: "complete"})
        self.client.patch(f"/api/v1/nodes/{name}", {"spec": {"providerID": provider_id(name)}})
        self.nodes[name], self.stops[name] = node, threading.Event()
        node.start(self.stops[name])

    def end(self, name: str) -> None:
        self.stops[name].set()
        self.nodes.pop(name).notify()
        self.client.delete(f"/api/v1/nodes/{name}", missing_ok=True)

    def run(self, name: str, device_class: str, pods: int, count: int = 1) -> None:
        """Keep so many pods, each with a claim for ``count`` devices."""
        exactly = {"deviceClassName": device_class, "count": count}
        self._create(SETS, "default", name, exactly, {"replicas": pods})

    def monitor(self, name: str) -> None:
        """Start a DaemonSet whose pods monitor all GPUs of their node; returns once it does so on every node."""
        labels = {"resource.kubernetes.io/admin-access": "true"}
        self.client.create("/api/v1/namespaces", {"metadata": {"name": MONITORING, "labels": labels}})
        exactly = {"deviceClassName": "gpu-monitor", "adminAccess": True, "allocationMode": "All"}
        self._create(DAEMON_SETS, MONITORING, name, exactly, {})
        wait_for(self.all_monitored, SOON_S, "all nodes are monitored")

    def _create(
        self, sets: str, namespace: str, name: str, exactly: Mapping[str, Any], extra: Mapping[str, Any]
    ) -> None:
        """A set of pods, each of which has a claim with ``exactly`` as its request."""
        request = {"name": "gpu", "exactly": exactly}
        claim = {"metadata": {"name": name}, "spec": {"spec": {"devices": {"requests": [request]}}}}
        self.client.create(TEMPLATES.format(namespace), claim)
        labels = {"app": name}
        container = {"name": "main", "image": "none", "resources": {"claims": [{"name": "gpu"}]}}
        claims = [{"name": "gpu", "resourceClaimTemplateName": name}]
        spec = {"containers": [container], "resourceClaims": claims, "terminationGracePeriodSeconds": 1}
        pod = {"metadata": {"labels": labels}, "spec": spec}
        selector = {"matchLabels": labels}
        self.client.create(sets, {"metadata": {"name": name}, "spec": {**extra, "selector": selector, "template": pod}})

    def scale(self, name: str, pods: int) -> None:
        self.client.patch(f"{SETS}/{name}", {"spec": {"replicas": pods}})

    def pods(self, path: str = PODS) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = self.client.get_object(path)["items"]
        return found

    def monitors(self) -> list[Mapping[str, Any]]:
        return self.pods(f"/api/v1/namespaces/{MONITORING}/pods")

    def all_monitored(self) -> bool:
        """Whether the only monitors that there are run on every node."""
        running = [pod["spec"]["nodeName"] for pod in self.monitors() if pod["status"]["phase"] == "Running"]
        return sorted(running) == sorted(self.cloud.nodes) and len(running) == len(self.monitors())

    def all_bound(self, pods: int) -> bool:
        found = self.pods()
        return len(found) == pods and all(pod["spec"].get("nodeName") for pod in found)

    def slices(self, node: str) -> str:
        """The slices of a node apart from what the API server writes."""
        items = self.client.get_object(SLICES)["items"]
        return json.dumps([item["spec"] for item in items if item["spec"]["nodeName"] == node], sort_keys=True)

    def play_kubelets(self, stop: threading.Event) -> None:
        """Let bound pods run, and end those that are deleted."""
        while not stop.wait(0.2):
            for pod in self.pods("/api/v1/pods"):
                path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
                try:
                    if "deletionTimestamp" in pod["metadata"]:
                        self.client.delete(path, grace_s=0, missing_ok=True)
                    elif pod["spec"].get("nodeName") and pod["status"]["phase"] != "Running":
                        ready = {"type": "Ready", "status": "True"}
                        self.client.patch(f"{path}/status", {"status": {"phase": "Running", "conditions": [ready]}})
                except ApiError as error:
                    assert error.status in {404, 409}, error  # noqa: PT017 - it is gone, or was changed by others

    def unused_for(self, seconds: float) -> bool:
        """Wait so long; whether the autoscaler has ordered no node meanwhile."""
        before = len(self.cloud.ordered)
        threading.Event().wait(seconds)
        return len(self.cloud.ordered) == before


@pytest.fixture
def autoscaled(cluster_autoscaler: Path, tmp_path: Path) -> Iterator[Autoscaled]:
    with control_plane("autoscaled") as cluster:
        install(cluster)
        found = Autoscaled(cluster, KubeClient(load_configuration(cluster.kubeconfig), "test"))
        stop = threading.Event()
        threading.Thread(target=found.play_kubelets, args=(stop,), daemon=True).start()
        controller = ControllerProcess(cluster)
        controller.start()
        found.cloud.add("first")
        with found.cloud.serving() as address:
            config = tmp_path / "cloud.yaml"
            config.write_text(f"address: {address}\n")
            command = [
                str(cluster_autoscaler),
                *FLAGS,
                f"--kubeconfig={cluster.kubeconfig}",
                f"--cloud-config={config}",
            ]
            table = ProcessTable(cluster.directory)
            record = table.spawn("cluster-autoscaler", command, cluster.logs_dir / "cluster-autoscaler.log")
            yield found
            kill([record])
        controller.stop()
        stop.set()
        for each in found.stops.values():
            each.set()


def test_one_node_is_added_for_one_pod_where_all_gpus_are_held(autoscaled: Autoscaled) -> None:
    autoscaled.run("full", "gpu-training", 8)
    wait_for(lambda: autoscaled.all_bound(8), SOON_S, "all GPUs are held")
    idle = autoscaled.slices("first")
    autoscaled.scale("full", 9)
    wait_for(lambda: autoscaled.all_bound(9), LATER_S, "the ninth pod is bound")
    assert autoscaled.unused_for(SETTLED_S)
    assert len(autoscaled.cloud.ordered) == 1
    assert autoscaled.slices("first") == idle


def test_a_claim_for_all_gpus_of_a_node_gets_one_where_one_gpu_is_held(autoscaled: Autoscaled) -> None:
    autoscaled.run("one", "gpu-training", 1)
    wait_for(lambda: autoscaled.all_bound(1), SOON_S, "one GPU is held")
    autoscaled.run("eight", "gpu-training", 1, count=8)
    wait_for(lambda: autoscaled.all_bound(2), LATER_S, "the pod with eight GPUs is bound")
    assert len(autoscaled.cloud.ordered) == 1


def test_exactly_one_node_is_added_for_partitions_beside_full_gpus(autoscaled: Autoscaled) -> None:
    autoscaled.run("full", "gpu-training", 7)
    wait_for(lambda: autoscaled.all_bound(7), SOON_S, "seven GPUs are held")
    autoscaled.run("small", "gpu-inference-1g-10gb", 30)
    wait_for(lambda: autoscaled.all_bound(37), LATER_S, "all partitions are allocated")
    assert autoscaled.unused_for(SETTLED_S)
    assert len(autoscaled.cloud.ordered) == 1


def test_nodes_whose_pods_fit_elsewhere_are_removed(autoscaled: Autoscaled) -> None:
    autoscaled.run("full", "gpu-training", 24)
    wait_for(lambda: autoscaled.all_bound(24), LATER_S, "three nodes are full")
    assert len(autoscaled.cloud.nodes) == 3
    autoscaled.scale("full", 6)
    wait_for(lambda: len(autoscaled.cloud.nodes) == 1, LATER_S, "two nodes are removed")
    wait_for(partial(autoscaled.all_bound, 6), LATER_S, "all pods run on the node that is left")


def test_an_idle_node_whose_monitor_has_all_its_monitor_devices_is_removed(autoscaled: Autoscaled) -> None:
    autoscaled.monitor("watcher")
    autoscaled.run("full", "gpu-training", 9)
    wait_for(lambda: autoscaled.all_bound(9), LATER_S, "two nodes are used")
    wait_for(autoscaled.all_monitored, SOON_S, "both nodes are monitored")
    autoscaled.scale("full", 1)
    wait_for(lambda: len(autoscaled.cloud.nodes) == 1, LATER_S, "the idle node is removed")
    wait_for(autoscaled.all_monitored, LATER_S, "the node that is left is monitored")
    wait_for(partial(autoscaled.all_bound, 1), LATER_S, "its pod runs")


def test_exactly_one_node_is_added_for_one_pod_where_every_node_is_monitored(autoscaled: Autoscaled) -> None:
    autoscaled.run("full", "gpu-training", 8)
    wait_for(lambda: autoscaled.all_bound(8), SOON_S, "all GPUs are held")
    autoscaled.monitor("watcher")
    assert autoscaled.unused_for(SETTLED_S)
    autoscaled.scale("full", 9)
    wait_for(lambda: autoscaled.all_bound(9), LATER_S, "the ninth pod is bound")
    wait_for(autoscaled.all_monitored, SOON_S, "the new node is monitored")
    assert autoscaled.unused_for(SETTLED_S)
    assert len(autoscaled.cloud.ordered) == 1


def test_a_group_whose_monitors_were_removed_still_grows(autoscaled: Autoscaled) -> None:
    """The autoscaler takes a node for unready whose number of pools is smaller than that of the node it copied."""
    autoscaled.monitor("watcher")
    assert autoscaled.unused_for(SETTLED_S)
    monitored = autoscaled.slices("first")
    autoscaled.client.delete(f"{DAEMON_SETS}/watcher")
    wait_for(lambda: not autoscaled.monitors(), SOON_S, "the monitors are gone")
    assert autoscaled.unused_for(SETTLED_S)
    autoscaled.run("full", "gpu-training", 9)
    wait_for(lambda: autoscaled.all_bound(9), LATER_S, "the ninth pod is bound")
    assert len(autoscaled.cloud.ordered) == 1
    assert autoscaled.slices("first") == monitored
