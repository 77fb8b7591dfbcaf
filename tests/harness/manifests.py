"""Kubernetes objects that tests need again and again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.harness.images import BUSYBOX_IMAGE, SLEEP_FOREVER

CAPACITY = {"cpu": "64", "memory": "512Gi", "ephemeral-storage": "1Ti", "pods": "500"}
"""Of a node object without a kubelet."""


def busybox_pod(
    name: str,
    command: Sequence[str] = SLEEP_FOREVER,
    *,
    namespace: str = "default",
    node: str | None = None,
    container: Mapping[str, Any] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """A pod that runs ``command`` in busybox, as the cluster needs it: host network, image from the node.

    ``node`` asks the scheduler for that node; ``container`` and ``spec`` add fields to the container and to the pod's
    spec, or override them. It does not restart, and ends at once when deleted.
    """
    base = {"name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never", "command": list(command)}
    body: dict[str, Any] = {
        "hostNetwork": True,
        "automountServiceAccountToken": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 5,
        "containers": [{**base, **(container or {})}],
    }
    if node is not None:
        body["nodeSelector"] = {"kubernetes.io/hostname": node}
    body.update(spec)
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": body}


def node_object(name: str, labels: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A Node; its status has to be set apart (``ready_status``, ``starting_status``)."""
    own = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {**own, **(labels or {})}}}


def ready_status(capacity: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The status of a node that takes pods though nobody runs them."""
    resources = {**CAPACITY, **(capacity or {})}
    ready = {"type": "Ready", "status": "True", "reason": "NoKubelet", "message": "a node object of the test harness"}
    return {"status": {"capacity": resources, "allocatable": resources, "conditions": [ready]}}


def starting_status(name: str, address: str) -> dict[str, Any]:
    """The status of a node whose kubelet is about to start: it keeps these addresses."""
    addresses = [{"type": "InternalIP", "address": address}, {"type": "Hostname", "address": name}]
    # Not Ready, rather than silent: the kubelet hurries its first report only for a node that says so.
    ready = {"type": "Ready", "status": "False", "reason": "Starting", "message": "its kubelet has not reported yet"}
    return {"status": {"addresses": addresses, "conditions": [ready]}}
