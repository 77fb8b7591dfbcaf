"""A real node moves from NVIDIA's device plugin and DRA driver to Tessera and back: `tessera migrate`."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from driver.config.flag_values import NVIDIA_DRIVER
from tests.harness.cluster import Cluster
from tests.harness.images import BUSYBOX_IMAGE
from tests.harness.progress import Progress
from tests.harness.settings import Settings
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.command import run_tessera
from tests.support.other_drivers import (
    DAEMON_SETS,
    DEPLOY,
    DEVICE_PLUGIN,
    DRA_DRIVER,
    OPERATOR,
    OperatedNode,
    daemon_set,
)
from tests.support.plugin import SLICES, TESSERA, PluginFlags, PluginProcess
from tests.support.workloads import CLAIMS, PODS, SLEEP, TEMPLATES, Workloads, bound_pod, request

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(500)]

CLASSES = "/apis/resource.k8s.io/v1/deviceclasses"
STATE = "gpu.tessera.dev/migration"
SOON_S, MOVED_S = 60.0, 200.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.start(Settings(name="migrate"), Progress()) as running:
        install(running)
        running.api.post("/api/v1/namespaces", {"metadata": {"name": OPERATOR}})
        yield running


@pytest.fixture
def operated(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[OperatedNode]:
    """A node with the component of the GPU Operator that the test names."""
    app = request.param
    node = OperatedNode(cluster, PluginProcess(cluster, cluster.nodes[0], PluginFlags(gpus="sim:h100-pcie-4")))
    labels = {DEPLOY[app]: "true", "nvidia.com/gpu.deploy.mig-manager": "true", "nvidia.com/mig.config": "all-disabled"}
    node.label(**labels)
    cluster.apply([daemon_set(app)])
    wait_for(lambda: node.pods(app), SOON_S, f"{app} runs")
    with node.operated():
        yield node
    cluster.api.request("DELETE", f"{DAEMON_SETS}/{app}")
    node.label(**dict.fromkeys(labels))


def plan_of(node: OperatedNode, *flags: str) -> dict[str, Any]:
    answer = run_tessera(node.cluster, "migrate", node.name, "--plan", "-o", "json", *flags)
    assert answer.exit_code == 0, answer.output
    [plan] = json.loads(answer.stdout)
    assert isinstance(plan, dict)
    return plan


class Command:
    """``tessera migrate`` in a process of its own; ``said``: what it has printed."""

    def __init__(self, node: OperatedNode, log: Path, *flags: str) -> None:
        self._log = log
        command = [TESSERA, "migrate", node.name, "--kubeconfig", str(node.cluster.kubeconfig), *flags]
        with log.open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    @property
    def said(self) -> str:
        return self._log.read_text()

    def says(self, text: str) -> None:
        wait_for(lambda: text in self.said, SOON_S, f"{text} in {self.said}")

    def ends(self) -> int:
        return self.process.wait(MOVED_S)


@pytest.mark.parametrize("operated", [DEVICE_PLUGIN], indirect=True)
def test_a_node_moves_from_the_device_plugin_when_its_pods_have_ended_and_back(
    cluster: Cluster, operated: OperatedNode, tmp_path: Path
) -> None:
    before = operated.labels()
    wait_for(
        lambda: operated.node()["status"]["allocatable"].get("nvidia.com/gpu") == "8", SOON_S, "the plugin's resource"
    )
    resources = {"limits": {"nvidia.com/gpu": "1"}}
    container = {"name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never", "command": ["sh", "-c", SLEEP]}
    spec = {
        "hostNetwork": True,
        "terminationGracePeriodSeconds": 2,
        "containers": [{**container, "resources": resources}],
    }
    cluster.api.post(PODS, {"metadata": {"name": "trainer"}, "spec": spec})
    cluster.wait_pod("trainer")

    plan = plan_of(operated)
    assert plan["pods"] == [
        {"pod": "default/trainer", "owner": "-", "resources": ["nvidia.com/gpu"], "classes": ["gpu-training"]}
    ]
    assert plan["step"] == "not moved"
    assert operated.labels() == before
    assert not operated.node()["spec"].get("unschedulable")

    first = Command(operated, tmp_path / "first")
    first.says("waiting until pods and claims of the other driver have ended: pod default/trainer has nvidia.com/gpu")
    first.process.send_signal(signal.SIGINT)
    assert first.ends() == 1
    assert f"interrupted; node {operated.name} waits until pods and claims of the other driver have ended" in first.said
    assert f"tessera migrate {operated.name} --back undoes it" in first.said
    assert operated.pods(DEVICE_PLUGIN)
    assert operated.node()["spec"]["unschedulable"]

    second = Command(operated, tmp_path / "second")
    second.says("pod default/trainer has nvidia.com/gpu")
    assert cluster.api.get(f"{PODS}/trainer")["status"]["phase"] == "Running"
    cluster.api.request("DELETE", f"{PODS}/trainer")
    assert second.ends() == 0, second.said
    assert operated.pods(DEVICE_PLUGIN) == []
    assert not operated.node()["spec"].get("unschedulable")
    assert operated.labels()[DEPLOY[DEVICE_PLUGIN]] == "false"

    workloads = Workloads(cluster)
    workloads.running(workloads.pod("moved", workloads.claim("moved", request("gpu-training"))))
    back = Command(operated, tmp_path / "back", "--back")
    back.says("waiting until claims of Tessera have ended: claim default/moved (pods: moved)")
    workloads.delete_pods("moved")
    workloads.delete_claims("moved")
    assert back.ends() == 0, back.said
    assert operated.labels() == before
    assert operated.pods(DEVICE_PLUGIN)
    assert not operated.plugin.running
    node = operated.node()
    assert not node["spec"].get("unschedulable")
    assert STATE not in node["metadata"]["annotations"]


def allocate(cluster: Cluster, node: str, claim: str, device: str) -> None:
    """What the scheduler writes for a device of NVIDIA's DRA driver."""
    result = {"request": "gpu", "driver": NVIDIA_DRIVER, "pool": node, "device": device}
    fields = [{"key": "metadata.name", "operator": "In", "values": [node]}]
    allocation = {
        "devices": {"results": [result]},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": fields}]},
    }
    path = f"{CLAIMS}/{claim}"
    cluster.api.patch(f"{path}/status", {"status": {"allocation": allocation}})


@pytest.mark.parametrize("operated", [DRA_DRIVER], indirect=True)
def test_a_node_moves_from_nvidias_dra_driver_and_the_plan_names_what_has_to_change(
    cluster: Cluster, operated: OperatedNode, tmp_path: Path
) -> None:
    before = operated.labels()
    name = operated.name
    release = {"meta.helm.sh/release-name": "nvidia-dra", "meta.helm.sh/release-namespace": "nvidia"}
    expression = f"device.driver == '{NVIDIA_DRIVER}' && device.attributes['{NVIDIA_DRIVER}'].type == 'gpu'"
    selectors = [{"cel": {"expression": expression}}]
    metadata = {"name": NVIDIA_DRIVER, "annotations": release}
    cluster.api.post(CLASSES, {"metadata": metadata, "spec": {"selectors": selectors}})
    product = f"device.attributes['{NVIDIA_DRIVER}'].productName == 'NVIDIA H100 80GB HBM3'"
    workloads = Workloads(cluster)
    workloads.template("theirs", request(NVIDIA_DRIVER, selector=product))
    workloads.claim("held", request(NVIDIA_DRIVER))
    wait_for(lambda: any(item["spec"]["driver"] == NVIDIA_DRIVER for item in slices(cluster)), SOON_S, "their slices")
    bound = {"pod": "default/holder"}
    allocate(cluster, name, "held", "gpu-1")
    bound_pod(cluster, "holder", name, "held", owned=False)

    plan = plan_of(operated)
    [claim] = plan["claims"]
    assert (claim["claim"], claim["devices"], claim["pods"]) == ("default/held", ["gpu-1"], ["holder"]), bound
    assert claim["outcome"] == f"must end first: only --driver-name {NVIDIA_DRIVER} adopts claims"
    [theirs] = [item for item in plan["classes"] if item["name"] == NVIDIA_DRIVER]
    assert theirs["release"] == "nvidia/nvidia-dra"
    assert theirs["instead"] == "gpu-training, a full GPU"
    changes = {(change["object"], change["path"].rpartition(".")[2]) for change in plan["changes"]}
    assert ("ResourceClaimTemplate default/theirs", "deviceClassName") in changes
    assert ("ResourceClaimTemplate default/theirs", "expression") in changes
    assert ("ResourceClaim default/held", "deviceClassName") in changes
    [unprepared] = plan_of(operated, "--driver-name", NVIDIA_DRIVER)["claims"]
    assert unprepared["outcome"] == "must end first: its pod has not started"

    move = Command(operated, tmp_path / "move")
    move.says("claim default/held (pods: holder)")
    assert operated.labels() == before
    workloads.delete_claims("held")
    cluster.api.request("DELETE", f"{PODS}/holder", {"gracePeriodSeconds": 0})
    assert move.ends() == 0, move.said
    assert {item["spec"]["driver"] for item in slices(cluster)} == {"gpu.tessera.dev"}
    back = Command(operated, tmp_path / "back", "--back")
    assert back.ends() == 0, back.said
    assert operated.labels() == before
    assert {item["spec"]["driver"] for item in slices(cluster)} == {NVIDIA_DRIVER}
    cluster.api.request("DELETE", f"{TEMPLATES}/theirs")
    cluster.api.request("DELETE", f"{CLASSES}/{NVIDIA_DRIVER}")


def slices(cluster: Cluster) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = cluster.api.get(SLICES)["items"]
    return items
