"""ResourceSlices for one node, from its GPUs and the devices to publish (pure; KEP-4381, KEP-4815)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from driver.model.device import Device
from driver.model.gpu import Gpu
from driver.model.health import Ailment, written_time
from driver.model.limits import limits_of
from driver.placement import order_offers
from driver.slices.attributes import attributes, capacity
from driver.slices.counters import consumption, counters_of_gpu
from driver.slices.names import Pool, counter_set

Content = dict[str, Any]
"""The part of a slice's spec that is ours to decide: ``sharedCounters`` or ``devices``."""


UNAVAILABLE = {"key": "gpu.tessera.dev/unavailable", "effect": "NoSchedule"}
"""The taint of a device whose GPU can't be used at present (KEP-5055); pods that run are left alone."""

UNHEALTHY = "gpu.tessera.dev/unhealthy"
"""Key of the taint of a device that reported a fault: its value is what, such as ``xid-48``, its time when."""

CORDONED = {"key": "gpu.tessera.dev/cordoned", "effect": "NoSchedule"}
"""The taint of every device of a GPU that an operator keeps from new pods."""

CLOSED = {"key": "gpu.tessera.dev/not-offered", "effect": "NoSchedule"}
"""The taint of a device that is published without being offered: held, or about to leave the slices."""


@dataclass(frozen=True, slots=True)
class PublishedGpu:
    """One GPU's share of the pool: its number, what is held on it, and what is offered beside that.

    Together at most ``DEVICES_PER_GPU`` (``driver.slices.limit``).

    ``foreign`` is the mask of memory slices under partitions that Tessera did not make, ``fault`` why the GPU
    can't be used at present: its devices stay, tainted, since one of them may have been given out just now.
    ``closed`` are names of devices that are there to be counted, and not to be given to anybody new; ``ailments`` why
    some of its devices are not, though the GPU answers.
    """

    gpu: Gpu
    number: int
    held: tuple[Device, ...]
    offers: tuple[Device, ...]
    foreign: int = 0
    fault: str | None = None
    closed: frozenset[str] = frozenset()
    ailments: tuple[Ailment, ...] = ()

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
    """First what is held, which the scheduler skips before it looks at it, and what goes; then the best offers."""
    sets = {entry.gpu.uuid: counter_set(entry.number) for entry in group}
    occupied = {entry.gpu.uuid: entry.occupied for entry in group}
    by_uuid = {entry.gpu.uuid: entry for entry in group}
    closed = frozenset().union(*(entry.closed for entry in group))
    offers = order_offers((device for entry in group for device in entry.offers), occupied)
    # What is held and what goes has one order, so that a slice need not change where a device is let go.
    going = [device for device in offers if device.name in closed]
    counted = sorted((*(d for entry in group for d in entry.held), *going), key=lambda device: device.name)
    new = [device for device in offers if device.name not in closed]
    limits = {entry.gpu.uuid: limits_of(entry.gpu.profiles) for entry in group}

    def content(device: Device) -> Content:
        uuid = device.gpu.uuid
        return _device(device, consumption(device, sets[uuid], limits[uuid]), taints_of(device, by_uuid[uuid]))

    return {"devices": [content(device) for device in (*counted, *new)]}


def taints_of(device: Device, entry: PublishedGpu) -> list[Content]:
    """What keeps new pods off ``device`` of the GPU of ``entry``. What runs is left alone."""
    taints: list[Content] = [UNAVAILABLE] if entry.fault is not None else []
    concerned = [each for each in entry.ailments if each.concerns(device)]
    ill = [each for each in concerned if not each.cordon]
    if ill:
        # The first of several is told: later ones follow from it. The time covers all, for an operator clears them all.
        found_at = written_time(max(each.stamp for each in ill))
        taints.append({"key": UNHEALTHY, "value": ill[0].value, "effect": "NoSchedule", "timeAdded": found_at})
    if len(ill) < len(concerned):
        taints.append(CORDONED)
    return [*taints, CLOSED] if device.name in entry.closed else taints


def _device(device: Device, counters: list[Content], taints: list[Content]) -> Content:
    content: Content = {"name": device.name, "attributes": attributes(device), "consumesCounters": counters}
    if amounts := capacity(device):
        content["capacity"] = amounts
    return {**content, "taints": taints} if taints else content


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
