"""A fleet at the API server: Node objects without kubelets, claims that hold three quarters of it, slices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from driver.kube.claims import GROUP
from driver.kube.transport import KubeClient
from driver.slices.build import slice_object
from driver.slices.publisher import SLICES
from tests.bench.scale.layouts import Publishing
from tests.bench.scale.nodes import HELD_PROFILE, HeldGpu, pool_of
from tests.bench.scale.writing import in_parallel
from tests.harness.manifests import node_object, ready_status
from tests.harness.progress import Part
from tests.harness.waiting import wait_for
from tests.support.published import DRIVER

NODES = "/api/v1/nodes"
HELD_NAMESPACE = "held"
HELD_CLAIMS = f"{GROUP}/namespaces/{HELD_NAMESPACE}/resourceclaims"
DEVICE_CLASS = f"gpu-inference-{HELD_PROFILE.replace('.', '-')}"

NODES_READY_S = 180.0


class ServedFleet:
    """Writes the objects of the fleet, several at a time."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self.slice_updates = 0
        self._published: dict[str, dict[str, Any]] = {}

    def create_nodes(self, part: Part, names: Iterable[str]) -> None:
        """Nodes that take pods: with no taint left on them."""
        in_parallel(part, lambda name: self._client.create(NODES, {**node_object(name), **ready_status()}), names)
        wait_for(self._untainted, NODES_READY_S, "all Node objects without taints", 1.0)

    def hold(self, part: Part, held: Iterable[HeldGpu]) -> None:
        """A claim for each device, allocated as the scheduler would have done it."""
        self._client.create("/api/v1/namespaces", {"metadata": {"name": HELD_NAMESPACE}})
        each = ((gpu.node, device.name) for gpu in held for device in gpu.devices)
        in_parallel(part, lambda device: self._hold(*device), each)

    def publish(self, part: Part, nodes: Iterable[str], publishing: Publishing) -> None:
        """Slices of this layout in the place of all there were."""
        in_parallel(part, lambda name: self._client.delete(f"{SLICES}/{name}"), list(self._published))
        self._published.clear()
        in_parallel(part, lambda node: self.update(node, publishing), nodes)

    def update(self, node: str, publishing: Publishing) -> None:
        """Write those slices of the node whose content has changed."""
        pool, contents = pool_of(node), publishing.contents(node)
        for name, content in contents.items():
            known = self._published.get(name)
            if known is not None and known["content"] == content:
                continue
            body = slice_object(name, content, pool, 1, len(contents), None)
            if known is None:
                stored = self._client.create(SLICES, body)
            else:
                body["metadata"]["resourceVersion"] = known["version"]
                stored = self._client.replace(f"{SLICES}/{name}", body)
                self.slice_updates += 1
            self._published[name] = {"content": content, "version": stored["metadata"]["resourceVersion"]}

    def _hold(self, node: str, device: str) -> None:
        name, request = f"{node}-{device}", "gpu"
        exactly = {"deviceClassName": DEVICE_CLASS}
        spec = {"devices": {"requests": [{"name": request, "exactly": exactly}]}}
        self._client.create(HELD_CLAIMS, {"metadata": {"name": name}, "spec": spec})
        result = {"request": request, "driver": DRIVER, "pool": pool_of(node).name, "device": device}
        status = {"status": {"allocation": {"devices": {"results": [result]}}}}
        self._client.patch(f"{HELD_CLAIMS}/{name}/status", status)

    def _untainted(self) -> bool:
        return not any(node["spec"].get("taints") for node in self._client.get_object(NODES)["items"])
