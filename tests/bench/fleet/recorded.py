"""Lists of a big cluster as the API server would send them, kept in files, and a client that reads them.

The nodes are alike, 8 H100 each. Of a hundred, 60 are held whole by one claim each, 15 are cut into 1g.10gb, one claim
a partition, and 25 are free; some offers stand on the free ones.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from driver.hardware.simulator import load_description
from driver.kube.paging import PAGE
from driver.kube.transport import Object
from driver.model.device import Device, DeviceKind, devices_of, number_gpus
from driver.model.gpu import Gpu
from driver.model.plan import API_VERSION, PATH, Held, PlanMode, PlanStatus, Summary, offer_of
from driver.model.plan_gpus import GpuState, described, line
from driver.slices.build import PublishedGpu, SliceBuilder, slice_object
from driver.slices.names import Pool
from driver.slices.publisher import SLICES
from tessera.fleet.gpus import discover, gpus_of
from tests.support.chart import CLASS_FILES

DRIVER = "gpu.tessera.dev"
GROUP = "/apis/resource.k8s.io/v1"
CLAIMS, CLASSES, PODS, NODES = f"{GROUP}/resourceclaims", f"{GROUP}/deviceclasses", "/api/v1/pods", "/api/v1/nodes"
EPOCH = "0123456789ab"
LISTED_AT = 1_000_000


@dataclass(frozen=True)
class RecordedNode:
    """``held`` devices by claim name, ``offers`` that stand."""

    name: str
    gpus: tuple[Gpu, ...]
    held: Mapping[str, tuple[Device, ...]]
    offers: tuple[Device, ...]

    @property
    def pool(self) -> Pool:
        return Pool(self.name, DRIVER)


def nodes(count: int) -> Iterator[RecordedNode]:
    """``count`` nodes, one after the other."""
    like = discover(load_description("dgx-h100"))
    for index in range(count):
        name = f"node-{index:05}"
        gpus = gpus_of(name, like)
        devices = [device for gpu in gpus for device in devices_of(gpu, gpu.minor)]
        small = tuple(device for device in devices if device.profile and device.profile.name == "1g.10gb")
        if index % 20 < 12:
            held = {f"train-{index}": tuple(device for device in devices if device.kind is DeviceKind.FULL)}
            yield RecordedNode(name, gpus, held, ())
        elif index % 20 < 15:
            yield RecordedNode(name, gpus, {f"serve-{index}-{i}": (each,) for i, each in enumerate(small)}, ())
        else:
            offers = tuple(device for device in devices if device.gpu is gpus[0]) if index < 20 else ()
            yield RecordedNode(name, gpus, {}, offers)


def record(count: int, directory: Path) -> None:
    """Write the lists of ``count`` nodes into ``directory``."""
    writers = {path: _Pages(directory, path) for path in (SLICES, CLAIMS, NODES, PATH, PODS, CLASSES)}
    for node in nodes(count):
        writers[NODES].add([_node(node)])
        writers[PATH].add([plan_object(node)])
        writers[SLICES].add(_slices(node))
        writers[CLAIMS].add(claim_object(name, node, devices) for name, devices in node.held.items())
    writers[CLASSES].add(
        {**each, "metadata": {**each["metadata"], **_meta(str(at))}}
        for at, file in enumerate(CLASS_FILES)
        for each in yaml.safe_load_all(file.read_text())
    )
    for writer in writers.values():
        writer.close()


class Recorded:
    """Stands for a KubeClient: lists come from the files, watches from ``events``, writes are answered and counted."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.events: dict[str, queue.Queue[bytes]] = {path: queue.Queue() for path in _folders()}
        self.version = LISTED_AT
        self.writes = 0
        self.on_write: Any = lambda path, stored: None

    def get(self, path: str, query: Mapping[str, str] | None = None) -> bytes:
        file = self._directory / _folders()[path] / (query or {}).get("continue", "0")
        return file.read_bytes()

    def get_object(self, path: str) -> Object:
        return {"metadata": {"resourceVersion": "1"}, "data": {}}

    def stream(self, path: str, query: Mapping[str, str], read_timeout_s: float) -> Iterator[bytes]:
        while True:
            yield self.events[path].get()

    def create(self, path: str, body: Object) -> Object:
        return self._stored(path, body)

    def patch(self, path: str, body: Object) -> Object:
        return self._stored(path, body)

    def replace(self, path: str, body: Object, query: Mapping[str, str] | None = None) -> Object:
        return self._stored(path, body)

    def tell(self, path: str, kind: str, item: Object) -> None:
        """An event of the watch of ``path``."""
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self.events[path].put(json.dumps({"type": kind, "object": item}).encode())

    def _stored(self, path: str, body: Object) -> Object:
        self.writes += 1
        self.version += 1
        metadata = {"name": path.rpartition("/")[2], **body.get("metadata", {}), "resourceVersion": str(self.version)}
        stored: Object = {**body, "metadata": metadata}
        return self.on_write(path, stored) or stored


class _Pages:
    """Items of one list, page by page into files."""

    def __init__(self, directory: Path, path: str) -> None:
        self._folder = directory / _folders()[path]
        self._folder.mkdir(parents=True)
        self._items: list[Object] = []
        self._page = 0

    def add(self, items: Iterable[Object]) -> None:
        for item in items:
            if len(self._items) == PAGE:
                self._write(f"{self._page + 1}")
            self._items.append(item)

    def close(self) -> None:
        self._write("")

    def _write(self, following: str) -> None:
        page = {"metadata": {"resourceVersion": str(LISTED_AT), "continue": following}, "items": self._items}
        (self._folder / str(self._page)).write_text(json.dumps(page, separators=(",", ":")))
        self._page, self._items = self._page + 1, []


def _folders() -> dict[str, str]:
    return {path: path.rpartition("/")[2] for path in (SLICES, CLAIMS, NODES, PATH, PODS, CLASSES)}


def _meta(uid: str) -> Object:
    """What every object has beside its name; managed fields are a part of what is decoded."""
    fields: Object = {"f:spec": {f"f:field-{at}": {} for at in range(8)}}
    managed = {"manager": "tessera", "operation": "Update", "time": "2026-11-22T00:00:00Z", "fieldsV1": fields}
    return {
        "uid": f"00000000-0000-0000-0000-{uid:>012}",
        "resourceVersion": str(LISTED_AT - 1),
        "creationTimestamp": "2026-11-22T00:00:00Z",
        "managedFields": [managed],
    }


def _node(node: RecordedNode) -> Object:
    labels = {f"example.com/label-{at}": f"value-{at}" for at in range(20)}
    images = [{"names": [f"registry/image-{at}@sha256:{at:064}"], "sizeBytes": at * 1000} for at in range(50)]
    conditions = [{"type": each, "status": "False", "reason": "Fine"} for each in ("MemoryPressure", "DiskPressure")]
    metadata = {"name": node.name, "labels": {"kubernetes.io/hostname": node.name, **labels}, **_meta(node.name[5:])}
    return {"metadata": metadata, "spec": {}, "status": {"images": images, "conditions": conditions}}


def plan_object(node: RecordedNode) -> Object:
    """Its plan, followed by the node."""
    states = [GpuState(gpu, gpu.minor) for gpu in node.gpus]
    held = sorted(str(Held(each.name, f"default/{name}")) for name, devices in node.held.items() for each in devices)
    spec = {"epoch": EPOCH, "held": held, "offers": sorted(str(offer_of(each)) for each in node.offers)}
    status = PlanStatus(
        observed_generation=1,
        epoch=EPOCH,
        mode=PlanMode.PLANNED,
        summary=Summary(len(states), len(held), len(node.offers)),
        gpus=tuple(line(state) for state in states),
        inventory=described(states),
    )
    told = {
        "observedGeneration": status.observed_generation,
        "epoch": status.epoch,
        "mode": status.mode.value,
        "summary": {"gpus": len(states), "held": len(held), "offered": len(node.offers)},
        "gpus": list(status.gpus),
        "inventory": status.inventory,
    }
    metadata = {"name": node.name, "generation": 1, **_meta(node.name[5:])}
    return {"apiVersion": API_VERSION, "kind": "GpuNodePlan", "metadata": metadata, "spec": spec, "status": told}


def _slices(node: RecordedNode) -> Iterator[Object]:
    numbers = number_gpus(node.gpus, {})
    held = [device for devices in node.held.values() for device in devices]
    published = [
        PublishedGpu(
            gpu,
            numbers[gpu.uuid],
            tuple(device for device in held if device.gpu is gpu),
            tuple(device for device in node.offers if device.gpu is gpu),
            closed=frozenset(device.name for device in held if device.gpu is gpu),
        )
        for gpu in node.gpus
    ]
    built = SliceBuilder(node.pool).build(published)
    for name, content in built.items():
        item = slice_object(name, content, node.pool, 1, len(built), None)
        yield {"metadata": {**item["metadata"], **_meta(node.name[5:])}, "spec": item["spec"]}


def claim_object(name: str, node: RecordedNode | None, devices: Iterable[Device], profile: str = "1g-10gb") -> Object:
    """A claim that has ``devices`` of ``node``, or waits."""
    request = {
        "name": "gpu",
        "exactly": {"deviceClassName": f"gpu-inference-{profile}", "allocationMode": "ExactCount", "count": 1},
    }
    status: Object = {}
    if node is not None:
        results = [
            {"request": "gpu", "driver": DRIVER, "pool": node.pool.name, "device": device.name} for device in devices
        ]
        term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node.name]}]}
        allocation = {"devices": {"results": results}, "nodeSelector": {"nodeSelectorTerms": [term]}}
        status = {"allocation": allocation, "reservedFor": [{"resource": "pods", "name": name, "uid": f"uid-{name}"}]}
    metadata = {"name": name, "namespace": "default", **_meta(str(abs(hash(name)) % 10**12))}
    return {"metadata": metadata, "spec": {"devices": {"requests": [request]}}, "status": status}
