"""Lists of a big cluster as the API server would send them, kept in files, and a client that reads them.

The nodes are alike, 8 H100 each. Of a hundred, 60 are held whole by one claim each, 15 are cut into 1g.10gb, one claim
a partition, and 25 are free; some offers stand on the free ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from driver.kube.client import Object
from driver.kube.get_and_list import PAGE_SIZE
from driver.model.device import Device, devices_of, number_gpus
from driver.model.gpu import Gpu
from driver.model.offer import DeviceKind
from driver.model.plan import API_VERSION, PATH, Held, PlanMode, PlanStatus, Summary
from driver.model.reported_gpus import GpuReport, encode_inventory, gpu_line
from driver.slices.build import PublishedGpu, SliceBuilder, slice_object
from driver.slices.publisher import SLICES
from driver.slices.slice_names import Pool
from tessera.sim.fleet.fleet import discover, gpus_of
from tests.bench.fleet.replaying import folder_of
from tests.support.chart import class_texts

DRIVER = "gpu.tessera.dev"
GROUP = "/apis/resource.k8s.io/v1"
CLAIMS, CLASSES, PODS, NODES = f"{GROUP}/resourceclaims", f"{GROUP}/deviceclasses", "/api/v1/pods", "/api/v1/nodes"
EPOCH = "0123456789ab"
LISTED_AT = 1_000_000
NAME = "node-name-of-template"
"""Of a node that stands for all of its kind."""


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


def node_like(kind: str, gpus: tuple[Gpu, ...]) -> RecordedNode:
    """A node that is held whole, cut into small partitions, or free with offers or without."""
    devices = [device for gpu in gpus for device in devices_of(gpu, gpu.minor)]
    if kind == "whole":
        return RecordedNode(NAME, gpus, {f"train-{NAME}": tuple(d for d in devices if d.kind is DeviceKind.FULL)}, ())
    if kind == "cut":
        small = [device for device in devices if device.profile and device.profile.name == "1g.10gb"]
        return RecordedNode(NAME, gpus, {f"serve-{i}-{NAME}": (each,) for i, each in enumerate(small)}, ())
    return RecordedNode(NAME, gpus, {}, tuple(d for d in devices if d.gpu is gpus[0]) if kind == "offering" else ())


def kind_of(index: int) -> str:
    """Of the node of that number: 60, 15 and 25 of a hundred are whole, cut and free."""
    turn = index % 20
    return "whole" if turn < 12 else "cut" if turn < 15 else "offering" if index == 15 else "free"


def record(count: int, directory: Path, kind: Callable[[int], str] = kind_of) -> None:
    """Write the lists of ``count`` nodes into ``directory``; ``kind`` is that of the node of that number.

    Made once for each kind of node, as text, in which names and UUIDs are then replaced.
    """
    writers = {path: _Pages(directory, path) for path in (SLICES, CLAIMS, NODES, PATH, PODS, CLASSES)}
    like = discover("dgx-h100")
    template = gpus_of(NAME, like)
    texts = {kind: _texts(node_like(kind, template)) for kind in ("whole", "cut", "offering", "free")}
    for index in range(count):
        name = f"node-{index:05}"
        own = gpus_of(name, like)
        for path, items in texts[kind(index)].items():
            for item in items:
                text = item.replace(NAME, name)
                for ours, theirs in zip(template, own, strict=True):
                    text = text.replace(ours.uuid, theirs.uuid)
                writers[path].add(text)
    for at, text in enumerate(class_texts().values()):
        for each in yaml.safe_load_all(text):
            writers[CLASSES].add(_text({**each, "metadata": {**each["metadata"], **_meta(str(at))}}))
    for writer in writers.values():
        writer.close()


def _texts(node: RecordedNode) -> dict[str, list[str]]:
    return {
        NODES: [_text(_node(node))],
        PATH: [_text(plan_object(node))],
        SLICES: [_text(each) for each in slices_of(node)],
        CLAIMS: [_text(claim_object(name, node, devices)) for name, devices in node.held.items()],
    }


def _text(item: Object) -> str:
    return json.dumps(item, separators=(",", ":"))


class _Pages:
    """Items of one list, page by page into files."""

    def __init__(self, directory: Path, path: str) -> None:
        self._folder = directory / folder_of(path)
        self._folder.mkdir(parents=True)
        self._items: list[str] = []
        self._page = 0

    def add(self, item: str) -> None:
        if len(self._items) == PAGE_SIZE:
            self._write(f"{self._page + 1}")
        self._items.append(item)

    def close(self) -> None:
        self._write("")

    def _write(self, following: str) -> None:
        metadata = _text({"resourceVersion": str(LISTED_AT), "continue": following})
        page = f'{{"metadata":{metadata},"items":[{",".join(self._items)}]}}'
        (self._folder / str(self._page)).write_text(page)
        self._page, self._items = self._page + 1, []


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
    metadata = {"name": node.name, "labels": {"kubernetes.io/hostname": node.name, **labels}, **_meta("1")}
    return {"metadata": metadata, "spec": {}, "status": {"images": images, "conditions": conditions}}


def plan_object(node: RecordedNode) -> Object:
    """Its plan, followed by the node."""
    states = [GpuReport(gpu, gpu.minor) for gpu in node.gpus]
    held = sorted(str(Held(each.name, f"default/{name}")) for name, devices in node.held.items() for each in devices)
    spec = {"epoch": EPOCH, "held": held, "offers": sorted(str(each.offer) for each in node.offers)}
    status = PlanStatus(
        observed_generation=1,
        epoch=EPOCH,
        mode=PlanMode.PLANNED,
        summary=Summary(len(states), len(held), len(node.offers)),
        gpus=tuple(gpu_line(state) for state in states),
        inventory=encode_inventory(states),
    )
    told = {
        "observedGeneration": status.observed_generation,
        "epoch": status.epoch,
        "mode": status.mode.value,
        "summary": {"gpus": len(states), "held": len(held), "offered": len(node.offers)},
        "gpus": list(status.gpus),
        "inventory": status.inventory,
    }
    metadata = {"name": node.name, "generation": 1, **_meta("1")}
    return {"apiVersion": API_VERSION, "kind": "GpuNodePlan", "metadata": metadata, "spec": spec, "status": told}


def slices_of(node: RecordedNode) -> Iterator[Object]:
    """The ResourceSlices that the node publishes."""
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
        yield {"metadata": {**item["metadata"], **_meta("1")}, "spec": item["spec"]}


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
