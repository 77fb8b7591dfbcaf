"""Monitors of GPUs, with adminAccess: they run next to workloads, see all GPUs, and change nothing for anybody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.harness.progress import Progress
from tests.harness.settings import Settings
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.controller import ControllerProcess
from tests.support.features import has
from tests.support.plugin import PluginProcess
from tests.support.workloads import Workloads, is_gone, request, wait_default_account

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

SOON_S = 90.0
HERE = "gpu-monitoring"
SMALL = "gpu-inference-1g-10gb"
RESOURCES = f"/apis/resource.k8s.io/v1/namespaces/{HERE}"
DAEMON_SETS, PODS = f"/apis/apps/v1/namespaces/{HERE}/daemonsets", f"/api/v1/namespaces/{HERE}/pods"
MONITORS = [f"gpu-{number}-monitor" for number in range(8)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.start(Settings(name="monitors", nodes=1), Progress()) as running:
        install(running)
        labels = {"resource.kubernetes.io/admin-access": "true"}
        running.api.post("/api/v1/namespaces", {"metadata": {"name": HERE, "labels": labels}})
        wait_default_account(running, HERE)
        exactly = {"deviceClassName": usual_class(running), "adminAccess": True}
        claim = {
            "metadata": {"name": "tried"},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
        }

        def is_in_force() -> bool:
            tried = running.api.request("POST", f"{RESOURCES}/resourceclaims?dryRun=All", claim)
            return bool(tried["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] == "gpu-monitor")

        wait_for(is_in_force, SOON_S, "claims with adminAccess get class gpu-monitor")
        yield running


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[PluginProcess]:
    """The real node's plugin; it follows a controller."""
    plugin, controller = PluginProcess(cluster, cluster.nodes[0]), ControllerProcess(cluster)
    plugin.start()
    controller.start()
    wait_for(lambda: plan(plugin).get("status", {}).get("mode") == "Planned", SOON_S, "the node follows its plan")
    wait_for(lambda: not plugin.monitors(), SOON_S, "nobody needs monitor devices")
    yield plugin
    controller.stop()
    plugin.stop()
    assert controller.refused() == []
    assert plugin.refused() == []


def plan(node: PluginProcess) -> dict[str, Any]:
    found: dict[str, Any] = node.cluster.api.get(f"/apis/gpu.tessera.dev/v1alpha1/gpunodeplans/{node.node.name}")
    return found


def usual_class(cluster: Cluster) -> str:
    """The class that monitors have hard-coded, where the API server gives their claims the one of monitor devices."""
    return "gpu-training" if has(cluster, "mutating policies") else "gpu-monitor"


@pytest.fixture
def watching(cluster: Cluster) -> Iterator[Callable[..., str]]:
    """Start a DaemonSet whose claim has ``exactly`` as its request, with adminAccess; gives its name."""
    started: list[str] = []

    def start(name: str, **exactly: Any) -> str:
        asked = {"name": "gpus", "exactly": {"deviceClassName": usual_class(cluster), "adminAccess": True, **exactly}}
        template = {"metadata": {"name": name}, "spec": {"spec": {"devices": {"requests": [asked]}}}}
        cluster.api.post(f"{RESOURCES}/resourceclaimtemplates", template)
        usual = busybox_pod(
            name,
            container={"resources": {"claims": [{"name": "gpus"}]}},
            restartPolicy="Always",
            terminationGracePeriodSeconds=0,
            resourceClaims=[{"name": "gpus", "resourceClaimTemplateName": name}],
        )
        pod = {"metadata": {"labels": {"app": name}}, "spec": usual["spec"]}
        daemon_set = {"selector": {"matchLabels": {"app": name}}, "template": pod}
        cluster.api.post(DAEMON_SETS, {"metadata": {"name": name}, "spec": daemon_set})
        started.append(name)
        return name

    yield start
    for name in started:
        for path in (f"{DAEMON_SETS}/{name}", f"{RESOURCES}/resourceclaimtemplates/{name}"):
            if not is_gone(cluster, path):
                cluster.api.request("DELETE", path)
    wait_for(lambda: not cluster.api.get(PODS)["items"], SOON_S, "the monitors are gone")


@pytest.fixture
def workloads(cluster: Cluster) -> Iterator[Workloads]:
    workloads = Workloads(cluster)
    yield workloads
    workloads.delete_all()


def running(cluster: Cluster, name: str) -> str:
    """The DaemonSet's pod, once it runs."""

    def of_set() -> list[str]:
        pods = (pod for pod in cluster.api.get(PODS)["items"] if pod["metadata"]["labels"]["app"] == name)
        return [pod["metadata"]["name"] for pod in pods if pod["status"]["phase"] == "Running"]

    [pod] = wait_for(of_set, SOON_S, f"the monitor {name} runs")
    return pod


def environment(cluster: Cluster, pod: str) -> list[str]:
    """The variables of the pod's monitor devices."""
    variables = cluster.nodes[0].exec(HERE, pod, ["env"]).splitlines()
    return sorted(variable.partition("=")[0] for variable in variables if "_MONITOR=" in variable)


def test_a_daemon_set_of_monitors_runs_next_to_workloads_and_what_is_offered_stays(
    cluster: Cluster, node: PluginProcess, watching: Callable[..., str], workloads: Workloads
) -> None:
    workloads.pod("infer", workloads.claim("infer", request(SMALL)))
    workloads.pod("train", workloads.claim("train", request("gpu-training")))
    workloads.running("infer", "train")
    node.wait_quiet()
    slices, decided = node.versions(), plan(node)["spec"]
    name = watching("watcher", allocationMode="All")
    pod = running(cluster, name)
    assert node.monitors() == MONITORS
    assert environment(cluster, pod) == [f"TESSERA_DEVICE_GPU_{number}_MONITOR" for number in range(8)]
    assert node.versions() == slices, "the pool of devices was not written"
    assert all(plan(node)["spec"][field] == decided[field] for field in ("held", "offers", "listed", "publishHeld"))
    workloads.pod("second", workloads.claim("second", request(SMALL)))
    workloads.running("second")


def test_monitor_devices_go_with_the_last_monitor(
    cluster: Cluster, node: PluginProcess, watching: Callable[..., str]
) -> None:
    for name in ("one", "other"):
        running(cluster, watching(name, count=2))
    assert node.monitors() == MONITORS
    cluster.api.request("DELETE", f"{DAEMON_SETS}/one")
    wait_for(lambda: len(cluster.api.get(PODS)["items"]) == 1, SOON_S, "one monitor has ended")
    assert node.monitors() == MONITORS
    cluster.api.request("DELETE", f"{DAEMON_SETS}/other")
    wait_for(lambda: not node.monitors() and node.nothing_left(), SOON_S, "nobody needs them any more")


def test_a_plugin_that_is_restarted_keeps_its_monitors(
    cluster: Cluster, node: PluginProcess, watching: Callable[..., str]
) -> None:
    pod = running(cluster, watching("lasting", allocationMode="All"))
    wait_for(lambda: len(node.records()) == 1, SOON_S, "the monitors of the tests before have ended")
    records = [path.read_text() for path in node.records()]
    node.restart()
    assert node.monitors() == MONITORS
    assert [path.read_text() for path in node.records()] == records
    assert running(cluster, "lasting") == pod
