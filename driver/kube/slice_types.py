"""ResourceSlices in two projections (``driver.kube.types`` has all other objects, also DeviceTaintRules).

ResourceSlice has the few fields that are read of Tessera's own devices, DetailedSlice all that decide an allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import msgspec

from driver.kube.types import NodeSelector, ObjectMeta, Struct, Taint

T = TypeVar("T")
P = TypeVar("P", bound=Hashable)

Quantity = str | int
"""A quantity as written."""


class DeviceAttribute(Struct, frozen=True):
    """The value of an attribute; at most one field is set."""

    integer: int | None = msgspec.field(default=None, name="int")
    string: str | None = None
    boolean: bool | None = msgspec.field(default=None, name="bool")


class DeviceAttributes(Struct, frozen=True):
    """The attributes that are read from slices; each is None if the device does not have it."""

    uuid: DeviceAttribute | None = None
    parent_uuid: DeviceAttribute | None = msgspec.field(default=None, name="parentUUID")
    shares: DeviceAttribute | None = None
    simulated: DeviceAttribute | None = None
    pcie_root: DeviceAttribute | None = msgspec.field(default=None, name="resource.kubernetes.io/pcieRoot")
    pci_bus_id: DeviceAttribute | None = msgspec.field(default=None, name="resource.kubernetes.io/pciBusID")


class DeviceTaint(Struct, frozen=True):
    key: str
    value: str = ""
    time_added: str = ""


class SliceDevice(Struct, frozen=True):
    name: str
    attributes: DeviceAttributes = DeviceAttributes()
    taints: tuple[DeviceTaint, ...] = ()

    @property
    def gpu_uuid(self) -> str | None:
        """The UUID of the GPU that the device is or is a part of."""
        attribute = self.attributes.parent_uuid or self.attributes.uuid
        return attribute.string if attribute is not None else None

    @property
    def is_simulated(self) -> bool:
        return self.attributes.simulated is not None and self.attributes.simulated.boolean is True


class ResourcePool(Struct, frozen=True):
    name: str
    generation: int = 0
    resource_slice_count: int = 1


class SliceSpec(Struct, frozen=True):
    driver: str
    pool: ResourcePool
    node_name: str = ""
    written_devices: tuple[SliceDevice, ...] | None = msgspec.field(default=(), name="devices")
    """None: an empty list, as Kubernetes 1.34 writes it."""

    @property
    def devices(self) -> tuple[SliceDevice, ...]:
        return self.written_devices or ()

    @property
    def gpu_uuids(self) -> frozenset[str]:
        """The UUIDs of the GPUs that the devices are or are parts of."""
        attributes = (
            attribute
            for device in self.devices
            for attribute in (device.attributes.uuid, device.attributes.parent_uuid)
        )
        uuids = (attribute.string for attribute in attributes if attribute is not None)
        return frozenset(uuid for uuid in uuids if uuid is not None and uuid.startswith("GPU-"))


class ResourceSlice(Struct, frozen=True):
    metadata: ObjectMeta
    spec: SliceSpec


class Counter(Struct, frozen=True):
    value: Quantity


class CounterSet(Struct, frozen=True):
    name: str
    counters: dict[str, Counter] = msgspec.field(default_factory=dict)


class ConsumedCounters(Struct, frozen=True):
    """What a device takes of one counter set."""

    counter_set: str
    counters: dict[str, Counter] = msgspec.field(default_factory=dict)


class AmountRange(Struct, frozen=True):
    """The amounts that requests are rounded up to: ``min`` and, with ``step``, multiples of it from there."""

    min: Quantity
    max: Quantity | None = None
    step: Quantity | None = None


class RequestPolicy(Struct, frozen=True):
    """The amounts of a capacity that a claim can get; ``default`` is for claims that request none."""

    default: Quantity | None = None
    valid_values: tuple[Quantity, ...] = ()
    valid_range: AmountRange | None = None


class DeviceCapacity(Struct, frozen=True):
    value: Quantity
    request_policy: RequestPolicy | None = None


class DetailedDevice(Struct, frozen=True):
    """A device in a DetailedSlice. ``attributes`` have one field each, which names the type of the value."""

    name: str
    attributes: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    capacity: dict[str, DeviceCapacity] = msgspec.field(default_factory=dict)
    consumes_counters: tuple[ConsumedCounters, ...] = ()
    node_name: str = ""
    node_selector: NodeSelector | None = None
    all_nodes: bool = False
    taints: tuple[Taint, ...] = ()
    binds_to_node: bool = False
    binding_conditions: tuple[str, ...] = ()
    allow_multiple_allocations: bool = False

    def attribute(self, driver: str, name: str) -> tuple[str, Any] | None:
        """Type and value of the attribute with this full name, of a device of ``driver``; None if it has none."""
        value = self.attributes.get(name)
        if value is None and name.startswith(f"{driver}/"):
            value = self.attributes.get(name.removeprefix(f"{driver}/"))
        return next(iter(value.items())) if value else None


class DetailedSliceSpec(Struct, frozen=True):
    driver: str
    pool: ResourcePool
    node_name: str = ""
    node_selector: NodeSelector | None = None
    all_nodes: bool = False
    per_device_node_selection: bool = False
    written_devices: tuple[DetailedDevice, ...] | None = msgspec.field(default=(), name="devices")
    """None: an empty list, as Kubernetes 1.34 writes it."""
    shared_counters: tuple[CounterSet, ...] = ()

    @property
    def devices(self) -> tuple[DetailedDevice, ...]:
        return self.written_devices or ()


class DetailedSlice(Struct, frozen=True):
    """A ResourceSlice with every field that decides an allocation.

    Only the simulation of the scheduler reads it: decoding takes up to six times as long as that of ResourceSlice, and
    the controller and ``tessera status`` decode the slices of thousands of nodes.
    """

    metadata: ObjectMeta
    spec: DetailedSliceSpec


def newest_generation(slices: Iterable[T], pool_of: Callable[[T], tuple[P, int]]) -> dict[P, list[T]]:
    """The slices that count, by pool: those of its newest generation. ``pool_of``: a slice's pool and generation."""
    newest: dict[P, list[T]] = {}
    generations: dict[P, int] = {}
    for item in slices:
        pool, generation = pool_of(item)
        if pool not in generations or generation > generations[pool]:
            generations[pool], newest[pool] = generation, []
        if generation == generations[pool]:
            newest[pool].append(item)
    return newest
