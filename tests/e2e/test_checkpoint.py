"""A training job that is evicted for a pod of higher priority goes on where it was, on a real node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from driver.kube.client import Object
from tests.harness.cluster import Cluster
from tests.harness.images import BUSYBOX_IMAGE
from tests.harness.manifests import busybox_pod
from tests.harness.progress import Progress
from tests.harness.settings import Settings
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.controller import ControllerProcess
from tests.support.plugin import PluginFlags, PluginProcess
from tests.support.workloads import PODS, PROJECT, TEMPLATES

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

SOON_S = 90.0
JOBS = "/apis/batch/v1/namespaces/default/jobs"
POLICY: Object = {
    "apiVersion": "gpu.tessera.dev/v1alpha1",
    "kind": "GpuPolicy",
    "metadata": {"name": "training"},
    "spec": {"mode": "Active", "preemption": {"enabled": True, "byNamespaces": ["default"]}},
}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A node with one H100, and a controller."""
    with Cluster.start(Settings(name="checkpoint", nodes=1), Progress()) as running:
        install(running)
        plugin = PluginProcess(running, running.nodes[0], PluginFlags(gpus="sim:h100-1"))
        controller = ControllerProcess(running)
        plugin.start()
        controller.start()
        yield running
        controller.stop()
        plugin.stop()
        assert (controller.refused(), plugin.refused()) == ([], [])


def example(folder: Path) -> list[Object]:
    """The example's objects, with ``folder`` of the node instead of a PersistentVolumeClaim."""
    template, job = yaml.safe_load_all((PROJECT / "deploy" / "examples" / "checkpoint.yaml").read_text())
    spec: Any = job["spec"]["template"]["spec"]
    spec |= {"hostNetwork": True, "automountServiceAccountToken": False}
    spec["volumes"] = [{"name": "checkpoints", "hostPath": {"path": str(folder)}}]
    spec["containers"][0] |= {"image": BUSYBOX_IMAGE, "imagePullPolicy": "Never"}
    return [template, job]


def pods(cluster: Cluster) -> dict[str, Object]:
    """The pods that run now, by name."""
    present = cluster.api.get(PODS)["items"]
    return {pod["metadata"]["name"]: pod for pod in present if pod["status"].get("phase") == "Running"}


def test_an_evicted_training_job_saves_its_work_and_goes_on_once_the_gpu_is_free(
    cluster: Cluster, tmp_path: Path
) -> None:
    api, saved = cluster.api, tmp_path / "step"
    template, job = example(tmp_path)
    api.post(TEMPLATES, template)
    api.post(JOBS, job)
    [first] = wait_for(lambda: pods(cluster), SOON_S, "the job runs")
    api.post("/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": "serving"}, "value": 10})
    claims = [{"name": "gpu", "resourceClaimTemplateName": "checkpoint"}]
    api.post(PODS, busybox_pod("serve", resourceClaims=claims, priorityClassName="serving"))
    api.post("/apis/gpu.tessera.dev/v1alpha1/gpupolicies", POLICY)
    wait_for(lambda: list(pods(cluster)) == ["serve"], SOON_S, "the pod of higher priority runs instead")
    step = int(saved.read_text())
    assert step > 0
    api.request("DELETE", f"{PODS}/serve")
    [second] = wait_for(lambda: [name for name in pods(cluster) if name != "serve"], SOON_S, "the job goes on")
    assert second != first
    status = api.get(f"{JOBS}/checkpoint")["status"]
    assert (status["active"], status.get("failed", 0)) == (1, 0), "the eviction does not count as a failure"
    (tmp_path / "save").touch()
    wait_for(lambda: int(saved.read_text()) > step, SOON_S, "it counts on from the step that was saved")
