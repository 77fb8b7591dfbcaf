"""ResourceSlices for one node, from its GPUs and the devices to publish (pure; KEP-4381, KEP-4815)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from driver.model.device import Device
from driver.model.gpu import Gpu
from driver.model.limits import limits_of
from driver.placement import order_offers
from driver.slices.attributes import attributes, capacity
from driver.slices.counters import consumption, counters_of_gpu
from driver.slices.names import DEVICES_PER_GPU, Pool, counter_set

Content = dict[str, Any]
"""The part of a slice's spec that is ours to decide: ``sharedCounters`` or ``devices``."""


UNAVAILABLE = {"key": "gpu.tessera.dev/unavailable", "effect": "NoSchedule"}
"""The taint of a device whose GPU can't be used at present (KEP-5055); pods that run are left alone."""


@dataclass(frozen=True, slots=True)
class PublishedGpu:
    """One GPU's share of the pool: its number, what is held on it, and what is offered beside that.

    ``foreign`` is the mask of memory slices under partitions that Tessera did not make, ``fault`` why the GPU
    can't be used at present: its devices stay, tainted, since one of them may have been given out just now.
    """

    gpu: Gpu
    number: int
    held: tuple[Device, ...]
    offers: tuple[Device, ...]
    foreign: int = 0
    fault: str | None = None

    @property
    def occupied(self) -> int:
        """Bit mask of memory slices that nothing offered can use."""
        mask = self.foreign
        for device in self.held:
            mask |= device.mask
        return mask


class SliceBuilder:
    """Content of the slices of one pool.

    Remembers what it built last: a change on one GPU costs the building of one slice, not of the node's.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._built: dict[str, tuple[Sequence[PublishedGpu], Content]] = {}

    def build(self, gpus: Iterable[PublishedGpu]) -> dict[str, Content]:
        """Content of every slice by slice name; counter slices sort first. Treat it as read-only."""
        ordered = sorted(gpus, key=lambda entry: entry.number)
        counters = _grouped(ordered, self._pool.counter_slice)
        devices = _grouped(ordered, self._pool.device_slice)
        built = {name: self._once(name, group, _counter_sets) for name, group in counters.items()}
        built |= {name: self._once(name, group, _devices) for name, group in devices.items()}
        self._built = {name: self._built[name] for name in built}
        return dict(sorted(built.items()))

    def _once(
        self, name: str, group: Sequence[PublishedGpu], make: Callable[[Sequence[PublishedGpu]], Content]
    ) -> Content:
        known = self._built.get(name)
        if known is None or known[0] != group:
            known = self._built[name] = (group, make(group))
        return known[1]


def build_slices(pool: Pool, gpus: Iterable[PublishedGpu]) -> dict[str, Content]:
    """Content of every slice of the pool by slice name, built from nothing."""
    return SliceBuilder(pool).build(gpus)


def _grouped(gpus: Iterable[PublishedGpu], slice_of: Callable[[int], str]) -> dict[str, list[PublishedGpu]]:
    groups: dict[str, list[PublishedGpu]] = {}
    for entry in gpus:
        groups.setdefault(slice_of(entry.number), []).append(entry)
    return groups


def _counter_sets(group: Sequence[PublishedGpu]) -> Content:
    sets = [{"name": counter_set(entry.number), "counters": counters_of_gpu(entry.gpu)} for entry in group]
    return {"sharedCounters": sets}


def _devices(group: Sequence[PublishedGpu]) -> Content:
    """Held devices first: the scheduler skips those before it looks at them. Then the best offers."""
    sets = {entry.gpu.uuid: counter_set(entry.number) for entry in group}
    occupied = {entry.gpu.uuid: entry.occupied for entry in group}
    faulty = {entry.gpu.uuid for entry in group if entry.fault is not None}
    held = [device for entry in group for device in sorted(entry.held, key=lambda device: device.name)]
    offers = order_offers((device for entry in group for device in entry.offers), occupied)
    limits = {entry.gpu.uuid: limits_of(entry.gpu.profiles) for entry in group}
    return {
        "devices": [
            _device(d, consumption(d, sets[d.gpu.uuid], limits[d.gpu.uuid]), tainted=d.gpu.uuid in faulty)
            for d in _limited([*held, *offers])
        ]
    }


def _limited(devices: Iterable[Device]) -> Iterable[Device]:
    """At most DEVICES_PER_GPU of one GPU, the first ones."""
    count: dict[str, int] = {}
    for device in devices:
        count[device.gpu.uuid] = count.get(device.gpu.uuid, 0) + 1
        if count[device.gpu.uuid] <= DEVICES_PER_GPU:
            yield device


def _device(device: Device, counters: list[Content], *, tainted: bool) -> Content:
    content = {
        "name": device.name,
        "attributes": attributes(device),
        "capacity": capacity(device),
        "consumesCounters": counters,
    }
    return {**content, "taints": [UNAVAILABLE]} if tainted else content


def slice_object(
    name: str, content: Content, pool: Pool, generation: int, count: int, owner: Mapping[str, Any] | None
) -> dict[str, Any]:
    """A complete ResourceSlice. ``owner`` is the Node, so that slices go when the node goes."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name, "ownerReferences": [dict(owner)] if owner else []},
        "spec": {
            "driver": pool.driver,
            "nodeName": pool.node,
            "pool": {"name": pool.name, "generation": generation, "resourceSliceCount": count},
            **content,
        },
    }
