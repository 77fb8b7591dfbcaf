"""A fleet at the API server: Node objects without kubelets, claims that hold three quarters of it, slices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from uuid import uuid4

from driver.kube.client import KubeClient
from driver.kube.get_and_list import RESOURCE_GROUP
from driver.model.device import Device
from driver.slices.build import Content, slice_object, slice_spec
from driver.slices.publisher import SLICES, changes
from tests.bench.placement.replay import claim
from tests.bench.placement.trace import Request
from tests.bench.scale.bulk import Etcd
from tests.bench.scale.layouts import Publishing
from tests.bench.scale.nodes import HeldGpu, pool_of
from tests.bench.scale.writing import in_parallel
from tests.harness.manifests import node_object, ready_status
from tests.harness.progress import Part
from tests.harness.waiting import wait_for
from tests.support.published import DRIVER

NODES = "/api/v1/nodes"
HELD_NAMESPACE = "held"
HELD_CLAIMS = f"{RESOURCE_GROUP}/namespaces/{HELD_NAMESPACE}/resourceclaims"

NODES_READY_S = 180.0


class ServedFleet:
    """Writes the objects of the fleet."""

    def __init__(self, client: KubeClient, etcd: Etcd) -> None:
        self._client = client
        self._etcd = etcd
        self._published: dict[str, Content] = {}
        self.slice_updates = 0

    def create_nodes(self, part: Part, names: Iterable[str]) -> None:
        """Nodes that take pods: with no taint left on them."""
        in_parallel(part, lambda name: self._client.create(NODES, {**node_object(name), **ready_status()}), names)
        self.wait_untainted()

    def wait_untainted(self) -> None:
        """Wait until pods may be scheduled to every node."""
        wait_for(self._untainted, NODES_READY_S, "all Node objects without taints", 1.0)

    def hold(self, part: Part, held: Iterable[HeldGpu]) -> None:
        """A claim for each device, allocated as the scheduler would have done it."""
        self._client.create("/api/v1/namespaces", {"metadata": {"name": HELD_NAMESPACE}})
        claims = (_held_claim(gpu.node, device, number) for gpu in held for number, device in enumerate(gpu.devices))
        first = next(claims)
        self._client.create(HELD_CLAIMS, first)
        self._client.patch(f"{HELD_CLAIMS}/{first['metadata']['name']}/status", {"status": first["status"]})
        self._etcd.put("resourceclaims", claims, part.tick)

    def publish(self, part: Part, nodes: Iterable[str], publishing: Publishing) -> None:
        """Slices of this layout in the place of all there were."""
        self._etcd.delete_all("resourceslices")
        self._published.clear()
        first, *others = nodes
        for item in self._slices(first, publishing.contents(first)):
            self._client.create(SLICES, item)
        slices = (item for node in others for item in self._slices(node, publishing.contents(node)))
        self._etcd.put("resourceslices", slices, part.tick)

    def update(self, node: str, publishing: Publishing) -> None:
        """Write those slices of the node whose content has changed, as a node plugin does."""
        contents, pool = publishing.contents(node), pool_of(node)
        before = {name: slice_spec(self._published[name], pool, 1, len(contents)) for name in contents}
        actual = {name: {"metadata": {"resourceVersion": ""}, "spec": spec} for name, spec in before.items()}
        for name, content in changes(contents, actual, {}, pool).write:
            item = slice_object(name, content, pool, 1, len(contents), None)
            self._client.replace(f"{SLICES}/{name}", item)
            self._published[name] = content
            self.slice_updates += 1

    def _slices(self, node: str, contents: Mapping[str, Content]) -> Iterator[dict[str, Any]]:
        """The objects of ``contents``; they count as published."""
        for name, content in contents.items():
            self._published[name] = content
            yield slice_object(name, content, pool_of(node), 1, len(contents), None)

    def _untainted(self) -> bool:
        return not any(node["spec"].get("taints") for node in self._client.get_object(NODES)["items"])


def _held_claim(node: str, device: Device, number: int) -> dict[str, Any]:
    request = Request(device.spot.kind, gib=device.spot.at if device.shared else 0)
    item = claim(f"{node}-{device.name}-{number}", request)
    result: dict[str, Any] = {"request": "gpu", "driver": DRIVER, "pool": pool_of(node).name, "device": device.name}
    if request.gib:
        result |= {"shareID": str(uuid4()), "consumedCapacity": {"memory": f"{request.gib}Gi"}}
    item["metadata"]["namespace"] = HELD_NAMESPACE
    return {**item, "status": {"allocation": {"devices": {"results": [result]}}}}
