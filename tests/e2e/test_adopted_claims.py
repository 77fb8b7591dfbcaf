"""From NVIDIA's DRA driver to ours on a node with a running pod: the pod stays, its GPU is given to nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from driver.config.flag_values import NVIDIA_DRIVER
from kubelet_plugin.dra.protocol.generated import dra_v1_pb2
from tests.harness.cluster import Cluster
from tests.harness.settings import Settings
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.command import run_tessera
from tests.support.controller import ControllerProcess
from tests.support.kubelet import DraClient
from tests.support.nvidia_claims import nvidia_file
from tests.support.nvidia_driver import ENVIRONMENT, NvidiaDriver, nvidia_class
from tests.support.plugin import SLICES, PluginFlags, PluginProcess
from tests.support.workloads import CLAIMS, PODS, Workloads, request

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600), pytest.mark.needs("shared counters")]

SMALL, FULL = "mig.nvidia.com", "gpu-training"
SOON_S, WIPED_S = 60.0, 150.0
NAMED = ("--driver-name", NVIDIA_DRIVER)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.start(Settings(name="adopted-claims")) as running:
        install(running, {"driverName": NVIDIA_DRIVER})
        running.apply(nvidia_class())
        yield running


@pytest.fixture
def plugin(cluster: Cluster) -> Iterator[PluginProcess]:
    process = PluginProcess(cluster, cluster.nodes[0], PluginFlags(driver_name=NVIDIA_DRIVER))
    yield process
    process.stop()


@pytest.fixture
def controller(cluster: Cluster) -> Iterator[ControllerProcess]:
    process = ControllerProcess(cluster, flags=NAMED)
    yield process
    process.stop()


@pytest.fixture
def workloads(cluster: Cluster) -> Iterator[Workloads]:
    created = Workloads(cluster)
    yield created
    created.delete_all()


def containers(cluster: Cluster, pod: str) -> list[tuple[str, int]]:
    statuses = cluster.api.get(f"{PODS}/{pod}")["status"]["containerStatuses"]
    return [(status["containerID"], status["restartCount"]) for status in statuses]


def pools(cluster: Cluster) -> set[str]:
    items: list[dict[str, Any]] = cluster.api.get(SLICES)["items"]
    return {item["spec"]["pool"]["name"] for item in items}


def says(cluster: Cluster, text: str, *command: str) -> bool:
    """Whether the command prints ``text``, in as many lines as the terminal needs."""
    return text in " ".join(run_tessera(cluster, *command, *NAMED).output.split())


def bound(workloads: Workloads, pods: list[str]) -> list[str]:
    return [pod for pod in pods if workloads.node(pod)]


def test_one_adopted_1g_claim_leaves_seven_of_eight_gpus_until_its_pod_ends(
    cluster: Cluster, plugin: PluginProcess, controller: ControllerProcess, workloads: Workloads
) -> None:
    nvidia = NvidiaDriver(plugin)
    nvidia.start()
    workloads.running(workloads.pod("old", workloads.claim("old", request(SMALL))))
    assert workloads.allocated("old") == [nvidia.device]
    before = containers(cluster, "old")
    nvidia.stop()
    file = nvidia_file(plugin.node.kubelet_dir)
    content = file.read_bytes()

    plugin.start()
    controller.start()
    wait_for(lambda: plugin.node.name not in pools(cluster), SOON_S, "the slices of NVIDIA's driver are gone")
    fulls = [workloads.pod(f"full-{number}", workloads.claim(f"full-{number}", request(FULL))) for number in range(8)]
    wait_for(lambda: len(bound(workloads, fulls)) == 7, SOON_S, "seven pods are placed")
    [waiting] = set(fulls) - set(bound(workloads, fulls))
    held = f"claim default/old, which NVIDIA's DRA driver prepared, holds {nvidia.device} of it"
    for command in (("why", waiting), ("map",)):
        wait_for(partial(says, cluster, held, *command), SOON_S, f"{command[0]} has the reason of the eighth")
    assert {f"gpu-{number}" for number in range(1, 8)} == {
        workloads.allocated(pod)[0] for pod in fulls if pod != waiting
    }

    cluster.node(plugin.node.name).restart_kubelet()
    wait_for(lambda: plugin.log.read_text().count("registered with the kubelet") > 1, WIPED_S, "registered once more")
    wait_for(plugin.slices, WIPED_S, "slices after the restart of the kubelet")
    assert containers(cluster, "old") == before
    assert ENVIRONMENT in workloads.exec("old", "env")
    uid = cluster.api.get(f"{CLAIMS}/old")["metadata"]["uid"]
    answers = DraClient(plugin.socket).call(dra_v1_pb2, "Prepare", [("default", "old", uid)])
    [device] = answers[uid].devices
    assert list(device.cdi_device_ids) == [f"k8s.{NVIDIA_DRIVER}/claim={uid}-{nvidia.device}"]
    assert len(bound(workloads, fulls)) == 7

    workloads.delete_pods("old")
    workloads.running(waiting)
    assert not list(plugin.node.cdi_dir.glob("k8s.*"))
    assert not plugin.partitions()
    assert file.read_bytes() == content
    workloads.running(*fulls)
