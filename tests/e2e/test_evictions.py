"""Pods that are moved off a GPU that refuses to be cut, or that is drained, on a real node with a controller."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from controller.fence.fenced_devices import read_fenced
from driver.kube.client import KubeClient, load_configuration
from driver.slices.build import CLOSED
from driver.slices.slice_names import Pool
from tests.harness.cluster import Cluster
from tests.harness.progress import Progress
from tests.harness.settings import Settings
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.command import run_tessera
from tests.support.controller import ControllerProcess
from tests.support.plugin import DRIVER, PluginProcess
from tests.support.workloads import CLAIMS, PODS, Workloads, request

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

SOON_S = 90.0
SMALL = "gpu-inference-1g-10gb"
CUT = "nvmlDeviceCreateGpuInstanceWithPlacement"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.start(Settings(name="starts", nodes=1), Progress()) as running:
        install(running)
        yield running


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[PluginProcess]:
    """The real node's plugin, with a controller that moves pods after five seconds."""
    plugin = PluginProcess(cluster, cluster.nodes[0])
    plugin.start()
    controller = ControllerProcess(cluster, flags=("--evict-failed-starts-s", "5"))
    controller.start()
    name = plugin.node.name
    wait_for(
        lambda: plan(cluster, name).get("status", {}).get("mode") == "Planned", SOON_S, "the node follows its plan"
    )
    yield plugin
    controller.stop()
    plugin.stop()
    assert controller.refused() == []
    assert plugin.refused() == []


def plan(cluster: Cluster, node: str) -> dict[str, Any]:
    found: dict[str, Any] = cluster.api.get(f"/apis/gpu.tessera.dev/v1alpha1/gpunodeplans/{node}")
    return found


def events(cluster: Cluster, reason: str) -> list[str]:
    items = cluster.api.get("/api/v1/namespaces/default/events")["items"]
    return [item["message"] for item in items if item.get("reason") == reason]


def pods_of(cluster: Cluster, job: str) -> dict[str, dict[str, Any]]:
    pods = cluster.api.get(PODS)["items"]
    return {pod["metadata"]["name"]: pod for pod in pods if pod["metadata"].get("labels", {}).get("job-name") == job}


def pod_spec(workloads: Workloads, name: str) -> dict[str, Any]:
    """A pod with a claim of its own from a template."""
    container = {
        "name": "main",
        "image": "docker.io/tessera/busybox:local",
        "command": ["sleep", "3600"],
        "resources": {"claims": [{"name": "gpu"}]},
    }
    template = workloads.template(name, request(SMALL))
    return {
        "hostNetwork": True,
        "terminationGracePeriodSeconds": 0,
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": template}],
        "containers": [container],
    }


JOBS = "/apis/batch/v1/namespaces/default/jobs"


def job(cluster: Cluster, workloads: Workloads, name: str) -> None:
    spec = {"restartPolicy": "Never", **pod_spec(workloads, name)}
    body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": {"template": {"spec": spec}}}
    cluster.api.post(JOBS, body)


def test_a_pod_on_a_gpu_that_refuses_to_be_cut_is_moved_to_another_and_both_sides_are_told(
    cluster: Cluster, node: PluginProcess
) -> None:
    workloads = Workloads(cluster)
    node.fault("fail", CUT, "--code", "UNKNOWN")
    job(cluster, workloads, "serve")

    def unprepared() -> Any:
        return plan(cluster, node.node.name)["status"].get("unprepared")

    [failed] = wait_for(unprepared, SOON_S, "the node reports the claim that it can't prepare")
    assert failed["cause"] == "GPU"
    assert "NVML says UNKNOWN (999" in failed["message"]
    [first] = pods_of(cluster, "serve").values()
    claim = f"{CLAIMS}/{first['status']['resourceClaimStatuses'][0]['resourceClaimName']}"
    [result] = cluster.api.get(claim)["status"]["allocation"]["devices"]["results"]
    broken = result["device"].split("-")[1]
    node.fault("clear")
    node.fault("fail", CUT, "--code", "UNKNOWN", "--gpu", broken)

    def moved() -> Any:
        pods = [pod for pod in pods_of(cluster, "serve").values() if pod["status"]["phase"] == "Running"]
        return [pod for pod in pods if pod["metadata"]["uid"] != first["metadata"]["uid"]]

    wait_for(moved, 2 * SOON_S, "the Job's next pod runs on another GPU")
    moved_by = "is evicted, so that its controller replaces it"
    messages = wait_for(
        lambda: [message for message in events(cluster, "FailedStart") if moved_by in message], SOON_S, "an Event"
    )
    assert all("can't prepare" in message for message in messages)
    wait_for(lambda: not unprepared(), SOON_S, "nothing fails any more")
    node.fault("clear")
    # Its pod may be on the GPU that another test drains.
    cluster.api.request("DELETE", f"{JOBS}/serve", {"propagationPolicy": "Background"})
    wait_for(lambda: not pods_of(cluster, "serve"), SOON_S, "the Job's pods are gone")


def test_while_the_driver_of_a_node_is_missing_it_gets_no_pods_and_everybody_is_told_why(
    cluster: Cluster, node: PluginProcess
) -> None:
    workloads = Workloads(cluster)
    node.stop()
    node.fault("fail", "nvmlInit", "--code", "DRIVER_NOT_LOADED")
    node.spawn()
    try:
        wait_for(lambda: plan(cluster, node.node.name)["status"].get("conditions"), SOON_S, "the node's condition")
        wait_for(lambda: not plan(cluster, node.node.name)["spec"].get("offers"), SOON_S, "nothing is offered")
        published = node.versions()
        assert published
        kubernetes = KubeClient(load_configuration(cluster.kubeconfig), "test")
        pool = Pool(node.node.name, DRIVER).name

        def fenced() -> set[str]:
            return {device.device for device in read_fenced(kubernetes, "tessera") or () if device.pool == pool}

        def offered() -> set[str]:
            held = {entry.partition(" ")[0] for entry in plan(cluster, node.node.name)["spec"].get("held", ())}
            devices = node.devices().items()
            return {name for name, device in devices if CLOSED["key"] not in str(device.get("taints"))} - held

        wait_for(lambda: fenced() >= offered(), SOON_S, "every device that is still offered is fenced")
        pod = workloads.pod("late", workloads.claim("late", request(SMALL)))
        told = "a fault keeps"
        wait_for(lambda: any(told in message for message in events(cluster, "GpuFault")), SOON_S, "the pod's Event")
        shown = run_tessera(cluster, "status").stdout
        assert "the node's NVIDIA driver can't be used: NVML says DRIVER_NOT_LOADED" in shown
        assert not cluster.api.get(f"{CLAIMS}/late").get("status", {}).get("allocation")
        assert node.versions() == published
    finally:
        node.fault("clear")
    workloads.running(pod)
    wait_for(lambda: not plan(cluster, node.node.name)["status"].get("conditions"), SOON_S, "the condition has ended")
    workloads.delete_pods("late")


DEPLOYMENTS, BUDGETS = (
    "/apis/apps/v1/namespaces/default/deployments",
    "/apis/policy/v1/namespaces/default/poddisruptionbudgets",
)
WEB = {"app": "web"}


def running_web(cluster: Cluster) -> dict[str, str]:
    """UID and claim of each pod of the Deployment that runs and is not ending."""
    pods = [pod for pod in cluster.api.get(PODS)["items"] if pod["metadata"].get("labels", {}).get("app") == "web"]
    return {
        pod["metadata"]["uid"]: pod["status"]["resourceClaimStatuses"][0]["resourceClaimName"]
        for pod in pods
        if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
    }


def test_a_drained_gpu_is_free_once_its_pods_have_moved_and_the_pods_that_stay_are_named(
    cluster: Cluster, node: PluginProcess
) -> None:
    workloads = Workloads(cluster)
    template = {"metadata": {"labels": WEB}, "spec": pod_spec(workloads, "web")}
    spec = {"replicas": 1, "selector": {"matchLabels": WEB}, "template": template}
    cluster.api.post(
        DEPLOYMENTS, {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": spec}
    )
    first = wait_for(lambda: running_web(cluster), SOON_S, "the pod of the Deployment")
    [device] = workloads.allocated(*first.values())
    uuid, number = node.devices()[device]["attributes"]["parentUUID"]["string"], device.split("-")[1]
    gpu = f"{node.node.name}/gpu-{number}"
    on_gpu = request(SMALL, selector=f'device.attributes["{DRIVER}"].parentUUID == "{uuid}"')
    workloads.running(workloads.pod("bare", workloads.claim("bare", on_gpu)))
    budget = {"minAvailable": 1, "selector": {"matchLabels": WEB}}
    cluster.api.post(BUDGETS, {"metadata": {"name": "web"}, "spec": budget})
    counted = "the budget counts the pod"
    wait_for(lambda: cluster.api.get(f"{BUDGETS}/web").get("status", {}).get("currentHealthy"), SOON_S, counted)

    before = plan(cluster, node.node.name)["spec"].get("cordoned", [])
    dry = run_tessera(cluster, "drain", gpu, "--dry-run")
    assert dry.exit_code == 1
    assert "PodDisruptionBudget web forbids it" in dry.stdout
    assert "default/bare: delete it when it has done its work" in dry.stdout
    assert plan(cluster, node.node.name)["spec"].get("cordoned", []) == before

    protected = run_tessera(cluster, "drain", gpu, "--reason", "fan", "--timeout", "10")
    assert protected.exit_code == 1
    assert "not now: PodDisruptionBudget web forbids it" in protected.stdout
    assert running_web(cluster) == first
    cluster.api.request("DELETE", f"{BUDGETS}/web")

    partly = run_tessera(cluster, "drain", gpu, "--timeout", str(SOON_S))
    assert partly.exit_code == 1
    assert "default/bare" in partly.stdout
    assert "web" not in partly.stdout
    assert f"{gpu} is still in use: " in partly.stderr
    assert f"; {gpu} stays cordoned" in partly.stderr
    moved = wait_for(lambda: running_web(cluster), SOON_S, "the next pod of the Deployment")
    assert moved.keys().isdisjoint(first)
    [other] = workloads.allocated(*moved.values())
    assert other.split("-")[1] != number
    assert workloads.node("bare") == node.node.name

    workloads.end_pods("bare")
    drained = run_tessera(cluster, "drain", gpu, "--timeout", str(SOON_S))
    assert (drained.exit_code, drained.stdout) == (0, f"drained {gpu} ({uuid}): 0 pods evicted\n")
    assert [partition for partition in node.partitions() if partition["gpu"] == int(number)] == []
    cluster.api.request("DELETE", f"{DEPLOYMENTS}/web")
    workloads.delete_all()
    assert run_tessera(cluster, "uncordon", gpu).exit_code == 0
