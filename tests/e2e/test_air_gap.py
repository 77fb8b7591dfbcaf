"""The files of a release are all that a cluster without network needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.cluster import Cluster
from tests.harness.processes import ProcessTable
from tests.harness.progress import Progress
from tests.harness.settings import Settings
from tests.image.architecture import native
from tests.release.build import Dist, write
from tests.support.in_pods import CACHE, HERE, Release
from tests.support.no_network import interfaces, no_network
from tests.support.workloads import Workloads, request

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NOT_THERE = ("Pulling", "Failed", "BackOff", "ErrImageNeverPull")
"""Reasons of Events of pods whose image is not on their node."""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Dist:
    return write(CACHE, tmp_path_factory.mktemp("dist"), "registry.example/gpu/tessera")


@pytest.fixture(scope="module")
def cluster(dist: Dist) -> Iterator[Cluster]:
    with no_network(), Cluster.start(Settings(name="air-gap", usual_places=True), Progress()) as running:
        yield running


@pytest.fixture(scope="module")
def release(cluster: Cluster, dist: Dist) -> Release:
    for node in cluster.nodes:
        node.import_image(dist.archive(native()))
    installed = Release(cluster, "sim:h100-1", package=str(dist.chart))
    installed.install()
    return installed


def test_no_process_of_the_cluster_has_a_network(cluster: Cluster) -> None:
    assert {name for record in ProcessTable(cluster.directory).all() for name in interfaces(record.pid)} == {"lo"}


def test_a_pod_gets_its_gpu_and_no_image_is_pulled(release: Release, cluster: Cluster, dist: Dist) -> None:
    workloads = Workloads(cluster)
    workloads.running(workloads.pod("serve", workloads.claim("serve", request("gpu-inference"))))
    [partition] = release.partitions(cluster.nodes[0].name)
    assert partition["holder"] == "default/serve"
    images = {container["image"] for pod in release.pods() for container in pod["spec"]["containers"]}
    assert images == {dist.image}
    events = cluster.api.get(f"/api/v1/namespaces/{HERE}/events")["items"]
    pulled = {event["message"] for event in events if event["reason"] == "Pulled"}
    assert pulled
    assert all("already present on machine" in message for message in pulled)
    assert not [event["message"] for event in events if event["reason"] in NOT_THERE]


def test_the_archive_of_all_images_can_be_loaded_as_kind_does_it(cluster: Cluster, dist: Dist) -> None:
    [node] = cluster.nodes
    node._ctr("images", "import", "--all-platforms", "--digests", "--snapshotter=overlayfs", str(dist.archive()))
    assert dist.image in node._ctr("images", "list", "--quiet").split()
