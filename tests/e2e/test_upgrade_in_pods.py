"""Helm upgrades, rolls back and uninstalls on a real cluster, where Tessera runs in pods, while pods come and go."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from driver.errors import EnvironmentFault
from tests.harness.cluster import Cluster
from tests.harness.progress import Progress
from tests.harness.settings import Settings
from tests.harness.waiting import wait_for
from tests.support.chart import CHART, RELEASE
from tests.support.helm import helm
from tests.support.in_pods import HERE, Release, image, values
from tests.support.pod_plugins import SliceWatch, Stream, failed_prepares
from tests.support.workloads import Workloads, is_gone, request

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

GPUS = "sim:h100-pcie-4"
PLUGINS = f"/apis/apps/v1/namespaces/{HERE}/daemonsets/tessera-node"
JOB = f"/apis/batch/v1/namespaces/{HERE}/jobs/tessera-uninstall"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{HERE}/leases"
CLAIMS = f"/apis/resource.k8s.io/v1/namespaces/{HERE}/resourceclaims"
ROLLOUT_S = 120.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    built = image()
    with Cluster.start(Settings(name="upgrade-helm", nodes=1, usual_places=True), Progress()) as running:
        for node in running.nodes:
            node.import_image(built.archive)
        yield running


@pytest.fixture
def release(cluster: Cluster) -> Iterator[Release]:
    """Installed, and uninstalled unless the test has done that."""
    installed = Release(cluster, GPUS)
    installed.install()
    yield installed
    if not is_gone(cluster, PLUGINS):
        installed.uninstall()


@pytest.fixture
def workloads(cluster: Cluster, release: Release) -> Iterator[Workloads]:
    own = Workloads(cluster)
    yield own
    own.delete_all()
    own.wait_until_gone()


def rolled_out(cluster: Cluster, release: Release) -> bool:
    """Whether the node has one plugin, the new one, and it is available."""
    found = cluster.api.get(PLUGINS)
    status: dict[str, Any] = found["status"]
    current = status.get("observedGeneration") == found["metadata"]["generation"]
    counts = [status.get(name) for name in ("updatedNumberScheduled", "numberAvailable", "desiredNumberScheduled")]
    return current and counts == [1, 1, 1] and len(release.pods("node")) == 1


def test_an_upgrade_and_a_rollback_fail_no_pod(cluster: Cluster, release: Release, workloads: Workloads) -> None:
    [node] = cluster.nodes
    stop = threading.Event()
    watch = SliceWatch(cluster, node.name)
    watch.run(stop)
    changed = values(GPUS)
    changed["nodePlugin"] = {**changed["nodePlugin"], "logLevel": "debug"}
    seen = {release.plugin_on(node.name)["metadata"]["uid"]}
    with Stream(workloads, "rolled", "gpu-inference").flowing() as stream:
        stream.more()
        for action, arguments in (("upgrade", [str(CHART), RELEASE, changed]), ("rollback", [RELEASE])):
            helm(cluster, HERE, action, *arguments)
            wait_for(lambda: rolled_out(cluster, release), ROLLOUT_S, f"the new plugin after the {action}")
            seen.add(release.plugin_on(node.name)["metadata"]["uid"])
            stream.more()
    stop.set()
    assert len(seen) == 3
    assert failed_prepares(cluster, "rolled") == []
    assert watch.flicker == []
    assert not release.partitions(node.name)


def test_uninstalling_refuses_first_and_leaves_nothing_then(
    cluster: Cluster, release: Release, workloads: Workloads
) -> None:
    [node] = cluster.nodes
    workloads.running(workloads.pod("user", template=workloads.template("user", request("gpu-inference"))))
    with pytest.raises(EnvironmentFault, match="tessera-uninstall"):
        release.uninstall()
    assert not is_gone(cluster, JOB)
    assert release.slices(node.name)
    workloads.delete_pods("user")
    release.uninstall()
    assert not release.slices(node.name)
    assert cluster.api.get(LEASES)["items"] == []
    assert cluster.api.get(CLAIMS)["items"] == []
    assert is_gone(cluster, JOB)
    assert list(node.cdi_dir.iterdir()) == []
    assert list((node.kubelet_dir / "plugins" / "gpu.tessera.dev").rglob("*")) == []
