"""Content of the ResourceSlices of one node (pure; KEP-4381, KEP-4815).

Shared counters keep full GPU, partitions and shares of one GPU from being allocated twice: one counter set per GPU with
``memory-slice-<i>`` of SLICE_VALUE each. A share consumes its part of every slice, so the number of shares may change
while some are held. Other counters exist only where memory slices are not sufficient (media engines; see
:func:`driver.model.gpu.limits_of`). ``memory`` keeps nothing apart: it is there for programs that add up what devices
take in bytes, such as Kueue's quota by counter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from driver.clock import written_time
from driver.model.device import SLICE_VALUE, Device, Monitor
from driver.model.gpu import Gpu, Limit, MigMode, Profile, heaviest, limits_of
from driver.model.gpu_events_and_conditions import DeviceCondition
from driver.model.offer import OF_SEVERAL, DeviceKind
from driver.model.shared_memory import SHARING_FIELD
from driver.placement.ranking import full_first, order_offers
from driver.slices.attributes import attributes, capacity, monitor_attributes, quantity
from driver.slices.slice_names import DEVICES_PER_GPU, Pool, counter_set

Content = dict[str, Any]
"""The variable part of a slice's spec: ``sharedCounters`` or ``devices``."""


UNAVAILABLE = {"key": "gpu.tessera.dev/unavailable", "effect": "NoSchedule"}
"""The taint of a device whose GPU cannot be used at present (KEP-5055); running pods are not affected."""

UNHEALTHY = "gpu.tessera.dev/unhealthy"
"""Key of the taint of a device that reported a fault: its value is what, such as ``xid-48``, its time when."""

CORDONED = {"key": "gpu.tessera.dev/cordoned", "effect": "NoSchedule"}
"""The taint of every device of a cordoned GPU."""

CLOSED = {"key": "gpu.tessera.dev/not-offered", "effect": "NoSchedule"}
"""The taint of a device that is published without being offered: held, or about to leave the slices."""


@dataclass(frozen=True, slots=True)
class PublishedGpu:
    """The devices of one GPU in the pool: its number, held devices, and offers.

    Together at most ``DEVICES_PER_GPU`` (see :func:`limited`).

    ``foreign`` is the mask of memory slices under partitions that Tessera did not make, ``fault`` why the GPU
    can't be used at present: its devices stay, tainted, since one of them may have been given out just now.
    ``closed`` are names of devices that are there to be counted, and not to be given to anybody new; ``conditions`` why
    some of its devices are not, though the GPU answers. ``divided``: the node's settings let several claims have it.
    ``unpublished``: its slices contain neither its devices nor its counter set, because nothing of it is offered.
    ``counted``: its devices consume shared counters, because they overlap or may do so. ``keeps_taints``: False: the
    API server drops taints, so free devices that no new claim may get at present are left out of the slices.
    ``constant``: the slices must not show what is held, so that equal nodes have equal slices. ``mig_uuids``: the UUIDs
    of held partitions that were cut, by device: dcgm-exporter finds the pods of its metrics by them.
    """

    gpu: Gpu
    number: int
    held: tuple[Device, ...]
    offers: tuple[Device, ...]
    foreign: int = 0
    fault: str | None = None
    closed: frozenset[str] = frozenset()
    conditions: tuple[DeviceCondition, ...] = ()
    divided: bool = False
    unpublished: bool = False
    counted: bool = True
    keeps_taints: bool = True
    constant: bool = False
    mig_uuids: Mapping[str, str] = field(default_factory=dict)

    @property
    def shared(self) -> Iterable[Device]:
        """The devices that claims have, and of which others can get a part."""
        return (d for d in self.held if d.kind in OF_SEVERAL and d.name not in self.closed)

    @property
    def visible_offers(self) -> int:
        """The number of devices in its slice that are offered, or leave it."""
        return 0 if self.unpublished else len((*self.offers, *self.shared))

    @property
    def is_offering(self) -> bool:
        """Whether its slice has devices that new claims can get, but for faults."""
        return not self.unpublished and any(device.name not in self.closed for device in (*self.shared, *self.offers))

    @property
    def occupied(self) -> int:
        """Bit mask of memory slices that no offer can use."""
        mask = self.foreign
        for device in () if self.constant else self.held:
            mask |= device.mask
        return mask


class SliceBuilder:
    """Content of the slices of one pool.

    Remembers what it built last: a change on one GPU costs the building of one slice, not of the node's, and a device
    that is published again is not built again.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._built: dict[str, tuple[Sequence[PublishedGpu], Content]] = {}
        self._contents: dict[str, tuple[Device, str, Content]] = {}
        """By name of the device: it, the counter set that it consumes, and its content without taints."""

    def build(self, gpus: Iterable[PublishedGpu]) -> dict[str, Content]:
        """Content of every slice by slice name, in the order in which to write them. Treat it as read-only.

        Counter slices come first. Slices with offers come last, so that what is held on a node is published before
        anything of it is offered.
        """
        ordered = sorted(gpus, key=lambda entry: entry.number)
        pool = self._pool
        counters = _grouped(ordered, lambda entry: pool.counter_slice(entry.number))
        devices = _grouped(ordered, lambda entry: pool.device_slice(entry.number, divided=entry.divided))
        built = {name: self._once(name, group, _counter_sets) for name, group in counters.items()}
        built |= {name: self._once(name, group, self._devices) for name, group in devices.items()}
        self._built = {name: self._built[name] for name in built}
        offering = {name for name, group in devices.items() if any(gpu.is_offering for gpu in group)}
        return {name: built[name] for name in sorted(built, key=lambda name: (name in offering, name))}

    def _devices(self, group: Sequence[PublishedGpu]) -> Content:
        """Held and closed devices first, which the scheduler skips without evaluating them; then the best offers."""
        group = [gpu for gpu in group if not gpu.unpublished]
        occupied = {gpu.gpu.uuid: gpu.occupied for gpu in group}
        by_uuid = {gpu.gpu.uuid: gpu for gpu in group}
        closed = frozenset().union(*(gpu.closed for gpu in group))
        offers = order_offers((device for gpu in group for device in _published_offers(gpu)), occupied)
        # Held and closed devices have one order, so that a slice need not change when a device is released.
        going = [device for device in offers if device.name in closed]
        held = [device for gpu in group if not gpu.constant for device in gpu.held]
        counted = sorted((*held, *going), key=lambda device: device.name)
        new = [device for device in offers if device.name not in closed]
        return {"devices": [self._device(device, by_uuid[device.gpu.uuid]) for device in (*counted, *new)]}

    def _device(self, device: Device, gpu: PublishedGpu) -> Content:
        counters = counter_set(gpu.number) if gpu.counted else ""
        last = self._contents.get(device.name)
        if last is None or last[:2] != (device, counters):
            last = self._contents[device.name] = (device, counters, _without_taints(device, counters))
        content = dict(last[2])
        if device.name in gpu.mig_uuids and not gpu.constant:
            content["attributes"] = {**content["attributes"], "uuid": {"string": gpu.mig_uuids[device.name]}}
        if gpu.keeps_taints and (taints := taints_of(device, gpu)):
            content["taints"] = taints
        return content

    def monitors(self, monitors: Iterable[Monitor]) -> dict[str, Content]:
        """Content of the slice of the monitor devices by its name: of one object, so that no claim gets a part of them.

        Empty without monitor devices.
        """
        devices = [{"name": monitor.name, "attributes": monitor_attributes(monitor)} for monitor in monitors]
        return {self._pool.monitor_slice: {"devices": devices}} if devices else {}

    def _once(
        self, name: str, group: Sequence[PublishedGpu], make: Callable[[Sequence[PublishedGpu]], Content]
    ) -> Content:
        built = self._built.get(name)
        if built is None or built[0] != group:
            built = self._built[name] = (group, make(group))
        return built[1]


def _grouped(gpus: Iterable[PublishedGpu], slice_of: Callable[[PublishedGpu], str]) -> dict[str, list[PublishedGpu]]:
    groups: dict[str, list[PublishedGpu]] = {}
    for entry in gpus:
        groups.setdefault(slice_of(entry), []).append(entry)
    return groups


def _counter_sets(group: Sequence[PublishedGpu]) -> Content:
    """The counter sets, or an empty slice: the slices of a pool stay the same, so that its generation does, too."""
    published = (entry for entry in group if entry.counted and not entry.unpublished)
    sets = [{"name": counter_set(entry.number), "counters": counters_of_gpu(entry.gpu)} for entry in published]
    return {"sharedCounters": sets} if sets else {"devices": []}


def _published_offers(entry: PublishedGpu) -> Iterable[Device]:
    if entry.constant:
        return map(_as_idle, (*entry.held, *entry.offers))
    if entry.keeps_taints:
        return entry.offers
    return [device for device in entry.offers if all(taint == CLOSED for taint in taints_of(device, entry))]


def _as_idle(device: Device) -> Device:
    """``device`` with the MIG mode that its GPU has without partitions, if that mode follows them."""
    gpu = device.gpu
    if not (gpu.toggles_freely and gpu.mig_mode.in_force):
        return device
    return replace(device, gpu=replace(gpu, mig_mode=MigMode.DISABLED))


def taints_of(device: Device, entry: PublishedGpu) -> list[Content]:
    """Return the taints of ``device``. They keep new pods away and do not affect running ones."""
    taints: list[Content] = [UNAVAILABLE] if entry.fault is not None else []
    concerned = [condition for condition in entry.conditions if condition.affects(device)]
    ill = [condition for condition in concerned if not condition.cordon]
    if ill:
        # The first condition is the cause of the later ones. The time covers all, because an operator clears them all.
        found_at = written_time(max(condition.stamp for condition in ill))
        taints.append({"key": UNHEALTHY, "value": ill[0].value, "effect": "NoSchedule", "timeAdded": found_at})
    if len(ill) < len(concerned):
        taints.append(CORDONED)
    return [*taints, CLOSED] if device.name in entry.closed else taints


def _without_taints(device: Device, counters: str) -> Content:
    """The content of ``device``; ``counters``: the counter set that it consumes, "" if none."""
    content: Content = {"name": device.name, "attributes": attributes(device)}
    if counters:
        content["consumesCounters"] = consumption(device, counters, limits_of(device.gpu.profiles))
    if amounts := capacity(device):
        content["capacity"] = amounts
    if device.kind in OF_SEVERAL:
        content[SHARING_FIELD] = True
    return content


def slice_spec(content: Content, pool: Pool, generation: int, count: int) -> Content:
    of_pool = {"name": pool.name, "generation": generation, "resourceSliceCount": count}
    return {"driver": pool.driver, "nodeName": pool.node, "pool": of_pool, **content}


def slice_object(
    name: str, content: Content, pool: Pool, generation: int, count: int, owner: Mapping[str, Any] | None
) -> dict[str, Any]:
    """A complete ResourceSlice. ``owner`` is the Node, so that its slices are deleted with it."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name, "ownerReferences": [dict(owner)] if owner else []},
        "spec": slice_spec(content, pool, generation, count),
    }


Counters = dict[str, dict[str, str]]

MEMORY = "memory"
MIB = 1 << 20


def counters_of_gpu(gpu: Gpu) -> Counters:
    slices = {f"memory-slice-{i}": _value(SLICE_VALUE) for i in range(gpu.memory_slices)}
    limits = {limit.name: _value(limit.total) for limit in limits_of(gpu.profiles)}
    return slices | limits | {MEMORY: _value(memory_of_gpu(gpu))}


def consumption(device: Device, set_name: str, limits: Iterable[Limit]) -> list[dict[str, Any]]:
    """The device's ``consumesCounters``; ``limits`` are those of its GPU."""
    weight = _value(device.weight)
    taken = {f"memory-slice-{i}": weight for i in range(device.gpu.memory_slices) if device.mask >> i & 1}
    if device.profile is not None:
        used = {limit.name: limit.taken_by(device.profile) for limit in limits}
        taken |= {name: _value(amount) for name, amount in used.items() if amount}
    return [{"counterSet": set_name, "counters": taken | {MEMORY: _value(_memory_taken(device))}}]


def memory_of_gpu(gpu: Gpu) -> int:
    """The bytes that its devices take at most: its memory, but NVML rounds the memory of profiles on its own."""
    return max(gpu.memory_bytes, _memory_of_partitions(gpu.profiles))


@lru_cache(maxsize=1024)
def _memory_of_partitions(profiles: tuple[Profile, ...]) -> int:
    """The bytes that partitions of one GPU take at most."""
    return heaviest(profiles, {profile.id: profile.memory_bytes for profile in profiles})


def _memory_taken(device: Device) -> int:
    """The bytes that a device takes of its GPU's, without regard to what it may use: that is its capacity."""
    if device.profile is not None:
        return device.profile.memory_bytes
    whole = memory_of_gpu(device.gpu)
    # Whole MiB have a canonical form; fractions must not depend on how many shares there were when one was published.
    return whole if device.shares == 1 else whole * device.weight // SLICE_VALUE // MIB * MIB


def _value(number: int) -> dict[str, str]:
    return {"value": quantity(number)}


def limited(published: int, new: Collection[Device], occupied: int) -> set[str]:
    """The names of those of ``new``, all of one GPU, for which there is room next to ``published`` devices.

    A published device never leaves for another: a claim may just have been allocated it. All shares but one wait behind
    the placements: once that one is allocated the placements are withdrawn, and the other shares follow. ``occupied``
    is the mask of memory slices that no offer can use.
    """
    room = max(0, DEVICES_PER_GPU - published)
    if len(new) <= room:
        return {device.name for device in new}
    ordered = full_first(new, dict.fromkeys((device.gpu.uuid for device in new), occupied))
    spare = [device for device in ordered if device.kind is DeviceKind.SHARE][1:]
    names = {device.name for device in spare}
    by_turn = [*(device for device in ordered if device.name not in names), *spare]
    return {device.name for device in by_turn[:room]}
