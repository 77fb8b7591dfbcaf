"""The chart and the image on a real cluster of two nodes: everything of Tessera runs in pods."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from driver.errors import EnvironmentFault
from driver.model.plan import PATH
from tests.harness.cluster import Cluster
from tests.harness.node import NodeError
from tests.harness.progress import Progress
from tests.harness.settings import Settings
from tests.harness.waiting import wait_for
from tests.support.in_pods import HERE, READY_S, Release, image
from tests.support.plugin import SLICES
from tests.support.workloads import Workloads, request

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

GPUS = "sim:h100-pcie-4"
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{HERE}/leases/tessera-controller"
NOBODY = "65532"
WHO = ("/usr/bin/python3.11", "-c", "import os; print(os.getuid())")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.start(Settings(name="image-helm", nodes=2, usual_places=True), Progress()) as running:
        yield running


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Release:
    installed = Release(cluster, GPUS, {"nodePlugin": {"extraArgs": ["--sim-latency=zero"]}})
    installed.import_image(image())
    installed.install()
    return installed


@pytest.fixture
def workloads(cluster: Cluster, release: Release) -> Iterator[Workloads]:
    own = Workloads(cluster)
    yield own
    own.delete_all()
    own.wait_until_gone()


def a_pod_with_a_partition(workloads: Workloads, name: str) -> str:
    """It runs; returns its node."""
    workloads.running(workloads.pod(name, workloads.claim(name, request("gpu-inference"))))
    node: str = workloads.cluster.api.get(f"/api/v1/namespaces/default/pods/{name}")["spec"]["nodeName"]
    return node


def told(workloads: Workloads, pod: str) -> list[str]:
    """The UUIDs of its devices, as its container has them in variables."""
    lines = workloads.exec(pod, "env").splitlines()
    return [line.partition("=")[2] for line in lines if line.startswith("TESSERA_DEVICE_")]


def test_the_plugin_of_each_node_tells_of_that_nodes_gpus_and_of_no_others(release: Release, cluster: Cluster) -> None:
    """In its plan's status; which of them it publishes, the controller decides."""
    uuids = {node.name: {gpu["uuid"] for gpu in release.gpus(node.name)} for node in cluster.nodes}
    assert {len(each) for each in uuids.values()} == {4}
    for node, own in uuids.items():

        def told(node: str = node) -> set[str]:
            status = json.dumps(cluster.api.get(f"{PATH}/{node}").get("status", {}))
            return {uuid for each in uuids.values() for uuid in each if uuid in status}

        assert wait_for(told, READY_S, f"{node} tells of its GPUs") == own

    def published() -> list[dict[str, Any]]:
        return [device for item in cluster.api.get(SLICES)["items"] for device in item["spec"].get("devices") or ()]

    devices = wait_for(published, READY_S, "the controller has chosen what is published")
    assert all(device["attributes"]["simulated"]["bool"] for device in devices)


def test_of_two_controllers_that_are_not_root_one_leads(release: Release, cluster: Cluster) -> None:
    names = {pod["metadata"]["name"] for pod in release.pods("controller")}
    assert len(names) == 2
    holder = wait_for(lambda: cluster.api.get(LEASE)["spec"].get("holderIdentity"), READY_S, "a leading controller")
    assert holder in names
    assert {release.run(pod, *WHO).strip() for pod in release.pods("controller")} == {NOBODY}


def test_a_pod_of_tessera_has_no_shell(release: Release) -> None:
    for pod in (*release.pods("node"), *release.pods("controller")):
        with pytest.raises(NodeError, match="no such file or directory"):
            release.run(pod, "/bin/sh", "-c", "true")


def test_a_pod_gets_a_partition_and_gives_it_back(release: Release, workloads: Workloads) -> None:
    node = a_pod_with_a_partition(workloads, "serve")
    [partition] = release.partitions(node)
    assert partition["holder"] == "default/serve"
    assert told(workloads, "serve") == [partition["uuid"]]
    found = workloads.exec("serve", "find", "/dev", "-name", "nvidia*", "-type", "c").split()
    assert len([path for path in found if path.startswith("/dev/nvidia-caps/")]) == 2
    workloads.delete_pods("serve")
    assert not release.partitions(node)
    assert not list(workloads.cluster.node(node).cdi_dir.iterdir())


def test_a_running_pod_notices_nothing_of_a_plugin_that_is_killed(release: Release, workloads: Workloads) -> None:
    node = a_pod_with_a_partition(workloads, "serve")
    before, devices = release.partitions(node), told(workloads, "serve")
    plugin = release.plugin_on(node)
    release.cluster.node(node).kill_container(HERE, plugin["metadata"]["name"])
    wait_for(lambda: release.runs_again(node), READY_S, "the plugin's container runs again")
    assert release.plugin_on(node)["metadata"]["uid"] == plugin["metadata"]["uid"]
    assert release.partitions(node) == before
    assert told(workloads, "serve") == devices
    [status] = workloads.cluster.wait_pod("serve")["status"]["containerStatuses"]
    assert status["restartCount"] == 0
    workloads.delete_pods("serve")
    assert not release.partitions(node)


def test_it_can_not_be_uninstalled_under_a_running_pod(release: Release, workloads: Workloads) -> None:
    a_pod_with_a_partition(workloads, "serve")
    with pytest.raises(EnvironmentFault, match="helm uninstall"):
        release.uninstall()
    assert len(release.pods("node")) == 2
    assert workloads.cluster.wait_pod("serve")["status"]["phase"] == "Running"


def test_a_job_of_the_chart_tests_a_gpu_of_its_node(release: Release, cluster: Cluster) -> None:
    node = cluster.nodes[1].name
    cluster.kubectl("label", "namespace", HERE, "resource.kubernetes.io/admin-access=true")
    job, log = release.run_acceptance_job({"node": node, "gpu": "gpu-3", "readOnly": False, "container": True})
    steps = {line.split()[1]: line.split()[2] for line in log.partition("---")[0].splitlines() if line}
    assert steps["idle"] == steps["every-partition"] == "Passed", log
    # The image has no shell, which the simulator's nvidia-smi needs: the claim has brought it nevertheless.
    assert "/usr/bin/nvidia-smi can't be run" in log
    assert [name for name, state in steps.items() if state == "Failed"] == ["container"]
    assert job["status"]["failed"] == 1
    assert "product: NVIDIA H100 PCIe" in log
    assert not release.partitions(node)


@pytest.mark.slow
def test_uninstalled_it_leaves_nothing_and_installed_again_it_serves_pods(
    release: Release, cluster: Cluster, workloads: Workloads
) -> None:
    release.uninstall()
    assert cluster.api.get(SLICES)["items"] == []
    assert not [file for node in cluster.nodes for file in node.cdi_dir.iterdir()]
    release.install()
    assert len(release.partitions(a_pod_with_a_partition(workloads, "serve"))) == 1
