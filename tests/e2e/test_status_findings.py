"""What ``tessera status`` has to find on a real cluster, where nothing but the API server can tell it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from driver.errors import ApiError
from driver.kube.controller_heartbeat import HEARTBEAT, LEAVING
from driver.kube.lease import leases
from driver.model.plan import API_VERSION, FENCE, KIND, PATH
from driver.simulator.node import SimulatedNode
from tests.harness.cluster import Cluster
from tests.harness.progress import Progress
from tests.harness.settings import Settings
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.controller import ControllerProcess
from tests.support.disks import fill, small_disk
from tests.support.nvml_client import process_on
from tests.support.plugin import COMMAND_S, TESSERA, PluginFlags, PluginProcess
from tests.support.status import SEEN_S, status, told
from tests.support.workloads import CLAIMS, PODS, RUNNING_S, Workloads, is_gone, request

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

POLICIES = "/apis/admissionregistration.k8s.io/v1"
NOTICED_S = 120.0
"""A kubelet that has ended is noticed after 40 s, a plugin that has ended after 30 s."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    binaries = os.environ.get("TESSERA_BINARIES")
    settings = Settings(name="findings", binaries=Path(binaries) if binaries else None)
    with Cluster.start(settings, Progress()) as running:
        install(running)
        yield running


@pytest.fixture(scope="module")
def plugin(cluster: Cluster) -> Iterator[PluginProcess]:
    """Its state directory is a file system of its own."""
    process = PluginProcess(cluster, cluster.nodes[0], PluginFlags(gpus="sim:h100-1", health_address="127.0.0.1:0"))
    with small_disk(process.state_dir, "16m"):
        process.spawn()
        process.wait_ready()
        yield process
        process.stop()


@pytest.fixture(scope="module")
def controller(cluster: Cluster, plugin: PluginProcess) -> Iterator[ControllerProcess]:
    process = ControllerProcess(cluster)
    process.start()
    wait_for(lambda: cluster.api.get(f"{leases('tessera')}/{HEARTBEAT}"), SEEN_S, "the controller's first heartbeat")
    yield process
    process.stop()


@pytest.fixture(autouse=True)
def sound(cluster: Cluster, controller: ControllerProcess) -> None:
    """Nothing is found before the test, but for what is reported for 10 minutes; what a test breaks it mends."""

    def nothing_found() -> bool:
        found = {check: text for check, text in told(cluster).items() if check != "directories"}
        if found:
            raise ApiError(str(found))
        return True

    wait_for(nothing_found, NOTICED_S, "nothing is found")


def finds(cluster: Cluster, check: str, message: str) -> None:
    wait_for(lambda: message in told(cluster).get(check, ""), NOTICED_S, f"{check}: {message}")


@pytest.mark.parametrize("part", ["validatingadmissionpolicies", "validatingadmissionpolicybindings"])
def test_a_fence_without_its_policy_or_binding(cluster: Cluster, part: str) -> None:
    cluster.api.request("DELETE", f"{POLICIES}/{part}/{FENCE}")
    finds(cluster, "policies", FENCE)
    install(cluster)
    wait_for(lambda: "policies" not in told(cluster), SEEN_S, "it is back")


@pytest.mark.slow
def test_a_state_directory_that_is_full_is_also_why_an_allocated_claim_waits(
    cluster: Cluster, plugin: PluginProcess
) -> None:
    workloads = Workloads(cluster)
    filler = fill(plugin.state_dir)
    try:
        finds(cluster, "directories", "no claim can be prepared since")
        workloads.pod("blocked", workloads.claim("blocked", request("gpu-training")))
        because = f"node {plugin.node.name} can't prepare it since "
        wait_for(lambda: because in run_command(cluster, "tessera why pod/blocked", "tessera"), SEEN_S, because)
    finally:
        filler.unlink()
    workloads.running("blocked")
    workloads.delete_all()
    workloads.wait_until_gone()
    wait_for(lambda: "no claim can be" not in told(cluster).get("directories", ""), SEEN_S, "it is writable again")


def wait_told(cluster: Cluster, pattern: str) -> None:
    """Wait until ``why`` says of the pod ``next`` what the pattern matches."""

    def is_told() -> bool:
        told = run_command(cluster, "tessera why pod/next", "tessera")
        if not re.search(pattern, told):
            raise ApiError(told)
        return True

    wait_for(is_told, SEEN_S, "it is told")


def test_a_claim_that_waits_for_what_a_pod_deleted_by_force_still_uses_is_told_so(
    cluster: Cluster, plugin: PluginProcess
) -> None:
    """The API server has forgotten its claim, but a process is left on the partition, which can't be removed."""
    workloads = Workloads(cluster)
    workloads.pod("forced", workloads.claim("forced", request("gpu-inference-1g-10gb")))
    workloads.running("forced")
    prepared = wait_for(lambda: cluster.api.get(f"{CLAIMS}/forced")["status"].get("devices"), SEEN_S, "it is reported")
    [partition] = set(re.findall(r"MIG-[0-9a-f-]+", str(prepared)))
    with process_on(SimulatedNode.attach(plugin.host_root), partition):
        for path in (f"{PODS}/forced", f"{CLAIMS}/forced"):
            cluster.api.request("DELETE", path, {"gracePeriodSeconds": 0})
        wait_for(lambda: is_gone(cluster, f"{CLAIMS}/forced"), SEEN_S, "the API server has forgotten the claim")
        workloads.pod("next", workloads.claim("next", request("gpu-training")))
        wait_told(cluster, r"claim default/forced \(.*\) still (has|holds)")
    workloads.running("next")
    workloads.delete_all()
    workloads.wait_until_gone()


def test_after_a_deletion_by_force_while_the_kubelet_was_down_the_next_pod_is_told_what_still_holds_its_gpu(
    cluster: Cluster, plugin: PluginProcess
) -> None:
    workloads = Workloads(cluster)
    workloads.pod("forced", workloads.claim("forced", request("gpu-training")))
    workloads.running("forced")
    wait_for(lambda: plugin.devices()["gpu-0"].get("taints"), SEEN_S, "its device is offered to nobody else")
    cluster.nodes[0].stop_kubelet()
    try:
        for path in (f"{PODS}/forced", f"{CLAIMS}/forced"):
            cluster.api.request("DELETE", path, {"gracePeriodSeconds": 0})
        wait_for(lambda: is_gone(cluster, f"{CLAIMS}/forced"), SEEN_S, "the API server has forgotten the claim")
        workloads.pod("next", workloads.claim("next", request("gpu-training")))
        wait_told(cluster, r"claim default/forced \(.*\) still has gpu-0 on this node")  # before the node is not ready
    finally:
        cluster.nodes[0].start_kubelet()
    workloads.running("next")
    workloads.delete_all()
    workloads.wait_until_gone()


def test_a_cdi_directory_that_was_removed(cluster: Cluster, plugin: PluginProcess) -> None:
    workloads = Workloads(cluster)
    workloads.pod("keeps", workloads.claim("keeps", request("gpu-training")))
    workloads.running("keeps")
    (spec,) = plugin.cdi_specs()
    content = spec.read_bytes()
    shutil.rmtree(plugin.node.cdi_dir)
    finds(cluster, "directories", "was missing: it is created again")
    wait_for(lambda: spec.exists() and spec.read_bytes() == content, SEEN_S, "the spec is back")
    workloads.delete_all()
    workloads.wait_until_gone()


def run_command(cluster: Cluster, remedy: str, start: str) -> str:
    """Run the command of a remedy that begins with ``start``, word for word; gives what it prints."""
    [command] = re.findall(rf"{start}[^;)]*", remedy)
    program, *arguments = shlex.split(command)
    if program == "kubectl":
        return cluster.kubectl(*arguments)
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
    done = subprocess.run(
        [TESSERA, *arguments], env=environment, capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    assert not done.stderr, done.stderr
    return done.stdout


def remedy_of(cluster: Cluster, check: str, message: str) -> str:
    """The remedy of the finding that has ``message``, once there is one."""

    def remedy() -> str:
        findings = next(each["findings"] for each in status(cluster)[1] if each["check"] == check)
        for each in findings:
            if message in f"{each['about']} {each['message']}":
                return str(each["remedy"])
        raise ApiError(str(findings))

    return wait_for(remedy, SEEN_S, f"{check}: {message}")


UNCORDONED_BY_REMEDY = {
    "a cordoned node": ("kubectl", "cordon", "NodeClosed", "kubectl uncordon"),
    "a cordoned GPU": ("tessera", "cordon", "GpuCordoned", "tessera uncordon"),
}


@pytest.mark.parametrize("kind", UNCORDONED_BY_REMEDY)
def test_the_command_in_the_remedy_of_a_pending_claim_lets_its_pod_run(
    cluster: Cluster, plugin: PluginProcess, kind: str
) -> None:
    program, verb, code, start = UNCORDONED_BY_REMEDY[kind]
    gpu = "/gpu-0" if program == "tessera" else ""
    run_command(cluster, f"{program} {verb} {plugin.node.name}{gpu}", program)
    if gpu:
        assert remedy_of(cluster, "health", "all GPUs are cordoned") == f"tessera uncordon {plugin.node.name}/gpu-0"
    workloads = Workloads(cluster)

    def is_refused() -> bool:
        """The scheduler refuses a new pod; it may place one before it has seen the cordon."""
        pod = workloads.pod("shut-out", workloads.claim("shut-out", request("gpu-training")))
        wait_for(lambda: workloads.why_waiting(pod) or workloads.node(pod), SEEN_S, "the scheduler has tried")
        if workloads.node(pod):
            workloads.delete_all()
            workloads.wait_until_gone()
            return False
        return True

    wait_for(is_refused, SEEN_S, "the scheduler has seen the cordon")
    remedy = remedy_of(cluster, "claims", f"claim default/shut-out is pending, and will not resolve by itself: {code}")
    run_command(cluster, remedy, start)
    workloads.running("shut-out")
    workloads.delete_all()
    workloads.wait_until_gone()


def test_a_claim_that_can_never_be_met_is_found_with_the_command_that_explains_it(cluster: Cluster) -> None:
    workloads = Workloads(cluster)
    never = request("gpu-training", selector='device.attributes["gpu.tessera.dev"].productName == "B999"')
    workloads.pod("never", workloads.claim("never", never))
    remedy = remedy_of(cluster, "claims", "claim default/never is pending, and will not resolve by itself")
    assert "NothingMatches" in run_command(cluster, remedy, "tessera why")
    workloads.delete_all()
    workloads.wait_until_gone()


def test_a_class_that_does_not_exist_is_found(cluster: Cluster) -> None:
    workloads = Workloads(cluster)
    workloads.pod("typo", workloads.claim("typo", request("gpu-traning")))
    assert "correct the claim" in remedy_of(cluster, "claims", "NoSuchClass")
    workloads.delete_all()
    workloads.wait_until_gone()


def test_an_interrupted_uninstallation_is_cancelled_by_the_remedy(cluster: Cluster) -> None:
    cluster.kubectl("-n", "tessera", "annotate", "lease", HEARTBEAT, f"{LEAVING}=now")
    remedy = remedy_of(cluster, "controller", "an uninstallation has begun")
    run_command(cluster, remedy, "kubectl -n tessera annotate")
    wait_for(lambda: "uninstallation" not in told(cluster).get("controller", ""), SEEN_S, "nothing is uninstalled")


def test_what_a_removed_node_has_left_is_deleted_by_the_remedy(cluster: Cluster) -> None:
    plan = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "removed"}, "spec": {}}
    cluster.api.post(PATH, plan)
    remedy = remedy_of(cluster, "node plugins", "removed has slices or a plan, but no Node of this name exists")
    run_command(cluster, remedy, "kubectl delete")
    wait_for(lambda: "removed" not in told(cluster).get("node plugins", ""), SEEN_S, "nothing is left")


@pytest.mark.slow
def test_without_a_controller_pending_claims_are_found_too(cluster: Cluster, controller: ControllerProcess) -> None:
    workloads = Workloads(cluster)
    never = request("gpu-training", selector='device.attributes["gpu.tessera.dev"].productName == "B999"')
    controller.kill()
    try:
        workloads.pod("unreported", workloads.claim("unreported", never))
        finds(cluster, "claims", "claim default/unreported is pending, and will not resolve by itself: NothingMatches")
        workloads.delete_all()
        workloads.wait_until_gone()
    finally:
        controller.start()
    wait_for(lambda: "controller" not in told(cluster), NOTICED_S, "the controller leads again")


@pytest.mark.slow
def test_a_plugin_that_was_killed(cluster: Cluster, plugin: PluginProcess) -> None:
    plugin.kill()
    finds(cluster, "node plugins", plugin.node.name)
    plugin.start()
    wait_for(lambda: set(told(cluster)) <= {"directories"}, RUNNING_S, "it publishes again")


@pytest.mark.slow
def test_a_node_whose_kubelet_has_ended(cluster: Cluster, plugin: PluginProcess) -> None:
    node = cluster.node(plugin.node.name)
    node.kill_kubelet()
    try:
        finds(cluster, "node plugins", "its Node is not ready")
    finally:
        node.start_kubelet()
    wait_for(lambda: set(told(cluster)) <= {"directories"}, NOTICED_S, "the node is ready again")
