"""NVIDIA's device plugin and DRA driver on a real node, as the GPU Operator runs them: real DaemonSets by its labels.

What these pods would do themselves, this module does while they run: the resource in the Node's status, and slices as
NVIDIA's DRA driver writes them (cmd/gpu-kubelet-plugin/deviceinfo.go). It also starts Tessera's node plugin where its
DaemonSet would.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from driver.config.flag_values import NVIDIA_DRIVER
from tests.harness.cluster import Cluster
from tests.harness.images import BUSYBOX_IMAGE
from tests.support.plugin import SLICES, PluginProcess
from tests.support.workloads import SLEEP, is_gone

OPERATOR = "gpu-operator"
DAEMON_SETS = f"/apis/apps/v1/namespaces/{OPERATOR}/daemonsets"
DEVICE_PLUGIN, DRA_DRIVER = "nvidia-device-plugin-daemonset", "nvidia-dra-driver-kubelet-plugin"
DEPLOY = {DEVICE_PLUGIN: "nvidia.com/gpu.deploy.device-plugin", DRA_DRIVER: "nvidia.com/gpu.deploy.dra-driver"}
GPUS = 8
COMPUTE_DOMAINS = "compute-domain.nvidia.com"
CHANNEL = "compute-domain-default-channel.nvidia.com"


def daemon_set(app: str) -> dict[str, Any]:
    """A DaemonSet of the GPU Operator; ``app`` is its name and the label of its pods."""
    container = {"name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never", "command": ["sh", "-c", SLEEP]}
    spec = {
        "nodeSelector": {DEPLOY[app]: "true"},
        "hostNetwork": True,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 2,
        "containers": [container],
    }
    template = {"metadata": {"labels": {"app": app}}, "spec": spec}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": app, "namespace": OPERATOR},
        "spec": {"selector": {"matchLabels": {"app": app}}, "template": template},
    }


def nvidia_slice(node: str) -> dict[str, Any]:
    """Two full GPUs and a MIG device, as NVIDIA's DRA driver publishes them."""
    common = {
        "productName": {"string": "NVIDIA H100 80GB HBM3"},
        "brand": {"string": "Nvidia"},
        "architecture": {"string": "Hopper"},
        "cudaComputeCapability": {"version": "9.0.0"},
        "driverVersion": {"version": "580.95.5"},
        "cudaDriverVersion": {"version": "13.0.0"},
    }
    uuids = [f"GPU-00000000-0000-4000-8000-00000000000{index}" for index in range(2)]
    devices: list[dict[str, Any]] = [
        {
            "name": f"gpu-{index}",
            "attributes": {"type": {"string": "gpu"}, "uuid": {"string": uuid}, **common},
            "capacity": {"memory": {"value": "81559Mi"}},
        }
        for index, uuid in enumerate(uuids)
    ]
    partition = {"parentUUID": {"string": uuids[1]}, "profile": {"string": "1g.10gb"}}
    mig = {"type": {"string": "mig"}, "uuid": {"string": "MIG-00000000-0000-4000-8000-000000000001"}}
    devices.append(
        {
            "name": "gpu-1-mig-1g10gb-19-0",
            "attributes": {**mig, **partition, **common},
            "capacity": {"memory": {"value": "9728Mi"}},
        }
    )
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": NVIDIA_DRIVER, "nodeName": node, "pool": pool, "devices": devices}
    return {"metadata": {"name": f"{node}-{NVIDIA_DRIVER}"}, "spec": spec}


class OperatedNode:
    """One node, on which the GPU Operator's components and Tessera's node plugin run as its labels say."""

    def __init__(self, cluster: Cluster, plugin: PluginProcess) -> None:
        self.cluster, self.plugin, self.name = cluster, plugin, plugin.node.name
        self.path = f"/api/v1/nodes/{self.name}"
        self._slice = f"{SLICES}/{self.name}-{NVIDIA_DRIVER}"

    def node(self) -> dict[str, Any]:
        return self.cluster.api.get(self.path)

    def labels(self) -> dict[str, str]:
        labels: dict[str, str] = self.node()["metadata"]["labels"]
        return {name: value for name, value in labels.items() if "nvidia.com" in name or "tessera" in name}

    def label(self, **labels: str | None) -> None:
        self.cluster.api.patch(self.path, {"metadata": {"labels": labels}})

    def pods(self, app: str) -> list[dict[str, Any]]:
        pods = self.cluster.api.get(f"/api/v1/namespaces/{OPERATOR}/pods?labelSelector=app={app}")["items"]
        return [pod for pod in pods if pod["status"].get("phase") == "Running"]

    def follow(self) -> None:
        """Do what the components and the DaemonSet of the node plugin do, as things are now."""
        offered = str(GPUS) if self.pods(DEVICE_PLUGIN) else "0"
        if self.node()["status"]["allocatable"].get("nvidia.com/gpu", "0") != offered:
            amounts = {"nvidia.com/gpu": offered}
            self.cluster.api.patch(f"{self.path}/status", {"status": {"capacity": amounts, "allocatable": amounts}})
        serves, has_slice = bool(self.pods(DRA_DRIVER)), not is_gone(self.cluster, self._slice)
        if serves and not has_slice:
            self.cluster.api.post(SLICES, nvidia_slice(self.name))
        if has_slice and not serves:  # the kubelet does it when a driver has been gone for 30 s
            self.cluster.api.request("DELETE", self._slice)
        is_here = self.labels().get("gpu.tessera.dev/node") == "true"
        if is_here and not self.plugin.running:
            self.plugin.spawn()
        if self.plugin.running and not is_here:
            self.plugin.stop()

    @contextmanager
    def operated(self) -> Iterator[None]:
        """Follow the labels while the block runs."""
        stop = threading.Event()

        def run() -> None:
            while not stop.wait(0.5):
                self.follow()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(60)


def channel_class() -> dict[str, Any]:
    """The DeviceClass of NVIDIA's chart for the IMEX channel of a node."""
    attributes = f"device.attributes['{COMPUTE_DOMAINS}']"
    expression = f"device.driver == '{COMPUTE_DOMAINS}' && {attributes}.type == 'channel' && {attributes}.id == 0"
    metadata = {"name": CHANNEL}
    spec = {"selectors": [{"cel": {"expression": expression}}]}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": metadata, "spec": spec}


def channel_slice(node: str) -> dict[str, Any]:
    """What NVIDIA's compute-domain plugin publishes (cmd/compute-domain-kubelet-plugin): no GPU and no clique."""
    devices = [
        {"name": f"{kind}-0", "attributes": {"type": {"string": kind}, "id": {"int": 0}}}
        for kind in ("channel", "daemon")
    ]
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": COMPUTE_DOMAINS, "nodeName": node, "pool": pool, "devices": devices}
    return {"metadata": {"name": f"{node}-{COMPUTE_DOMAINS}"}, "spec": spec}


def clique_of_domain(info: Any) -> str:
    """The clique by which that plugin joins nodes to a domain, from NVML's fabric information of a GPU."""
    return f"{uuid.UUID(bytes=bytes(info.clusterUuid))}.{info.cliqueId}"
