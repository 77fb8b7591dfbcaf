"""A pod ``train`` that waits for devices, what the others are, and the Events about them (no kubelet ends a pod)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from driver.errors import NOT_FOUND, accepted_status
from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.support.controller import ControllerProcess

SOON_S = 60.0
FENCE = "/api/v1/namespaces/tessera/configmaps/tessera-fence"
POLICIES = "/apis/gpu.tessera.dev/v1alpha1/gpupolicies"
CORE, APPS = "/api/v1/namespaces/default", "/apis/apps/v1/namespaces/default"
DRA = "/apis/resource.k8s.io/v1/namespaces/default"
FULL = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu-training"}}]}}


@contextmanager
def running_controller(cluster: Cluster) -> Iterator[ControllerProcess]:
    """A controller that is refused no request."""
    process = ControllerProcess(cluster)
    process.start()
    yield process
    process.stop()
    assert process.refused() == []


def requesting(template: str) -> dict[str, Any]:
    """The field of a pod with a claim of its own from this ResourceClaimTemplate."""
    return {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": template}]}


def notebooks(template: str) -> dict[str, Any]:
    """A ReplicaSet of one notebook with such a claim."""
    labels = {"app": "notebook"}
    pod = busybox_pod("notebook", restartPolicy="Always", **requesting(template))
    content = {"metadata": {"labels": labels}, "spec": pod["spec"]}
    return {
        "metadata": {"name": "notebook"},
        "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": content},
    }


def end(cluster: Cluster, pod: str) -> None:
    with accepted_status(NOT_FOUND):
        cluster.api.request("DELETE", f"{CORE}/pods/{pod}", {"gracePeriodSeconds": 0})


def pods(cluster: Cluster, app: str) -> list[dict[str, Any]]:
    return list(cluster.api.get(f"{CORE}/pods?labelSelector=app%3D{app}")["items"])


def is_refused(cluster: Cluster, pod: str = "train") -> bool:
    """Whether the scheduler has found no node for it, or the API server has refused what it has chosen."""
    conditions = cluster.api.get(f"{CORE}/pods/{pod}")["status"].get("conditions", [])
    return any(condition["reason"] in ("Unschedulable", "SchedulerError") for condition in conditions)


def fenced(cluster: Cluster) -> str:
    """All entries of the fence."""
    fence = cluster.api.get(FENCE)
    return " ".join((fence.get("data") or {}).values())


def events_of(cluster: Cluster, policy: str) -> list[dict[str, Any]]:
    query = f"fieldSelector=involvedObject.kind%3DGpuPolicy,involvedObject.name%3D{policy}"
    return list(cluster.api.get(f"{CORE}/events?{query}")["items"])


def events_about(cluster: Cluster, pod: str) -> list[dict[str, Any]]:
    return list(cluster.api.get(f"{CORE}/events?fieldSelector=involvedObject.name%3D{pod}")["items"])
