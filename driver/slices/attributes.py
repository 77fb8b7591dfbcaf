"""Attributes and capacity of a device, by their public names.

``docs/attributes.md`` describes the same table for people; a test compares the two. Partitions carry what
people select by, not all there is: each attribute costs the scheduler time for every device it looks at.
``type`` and ``profile`` are on every device, so that a selector which asks for them first never fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from driver.model.device import MONITOR_TYPE, Device, Monitor, full_device
from driver.model.gpu import NvLink
from driver.model.offer import DeviceKind
from driver.model.shared_memory import CLIENTS_CAPACITY, COMPUTE_CAPACITY, MEMORY_CAPACITY

Value = str | int | bool | None
Attributes = dict[str, dict[str, Any]]

NO_PROFILE = "none"
STANDARD = "resource.kubernetes.io/"
STRING_LIMIT = 64
"""Characters of a string attribute (KEP-4381)."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One attribute: its name, its type in the API, and its value (None: not published)."""

    name: str
    kind: Literal["string", "int", "bool", "version"]
    of: Callable[[Device], Value]


def _link(read: Callable[[NvLink], Value]) -> Callable[[Device], Value]:
    return lambda device: read(device.gpu.nvlink) if device.gpu.nvlink is not None else None


COMMON = (
    Fact("type", "string", lambda device: device.kind.value),
    Fact("profile", "string", lambda device: device.profile.name if device.profile else NO_PROFILE),
    Fact("productName", "string", lambda device: device.gpu.product_name),
    Fact("architecture", "string", lambda device: device.gpu.architecture),
    Fact("cudaComputeCapability", "version", lambda device: device.gpu.cuda_compute_capability),
    Fact("simulated", "bool", lambda device: device.gpu.simulated),
    Fact(f"{STANDARD}pciBusID", "string", lambda device: device.gpu.pci_bus_id),
    Fact(f"{STANDARD}pcieRoot", "string", lambda device: device.gpu.pcie_root),
    Fact(f"{STANDARD}numaNode", "int", lambda device: device.gpu.numa_node),
)
"""On every device."""

MEMORY_SLICES = Fact("memorySlices", "int", lambda d: d.placement.size if d.placement else d.gpu.memory_slices)
"""On full GPUs and on partitions: a share has no memory of its own."""

PARENT = Fact("parentUUID", "string", lambda device: device.gpu.uuid)
"""On partitions, shares and shared devices."""

DRIVER_VERSION = Fact("driverVersion", "version", lambda device: device.gpu.driver_version)
MEMORY_TYPE = Fact("memoryType", "string", lambda device: device.gpu.memory_type)
"""On full GPUs and on shared devices, which are few. Partitions go without: see the module."""

FULL_ONLY = (
    MEMORY_SLICES,
    Fact("uuid", "string", lambda device: device.gpu.uuid),
    Fact("brand", "string", lambda device: device.gpu.brand),
    DRIVER_VERSION,
    Fact("cudaDriverVersion", "version", lambda device: device.gpu.cuda_driver_version),
    MEMORY_TYPE,
    Fact("memoryBandwidth", "int", lambda device: device.gpu.memory_bandwidth),
    Fact("nvlinkClique", "string", lambda device: device.gpu.nvlink_clique),
    Fact("nvlinkGeneration", "int", _link(lambda link: link.generation)),
    Fact("nvlinkLinks", "int", _link(lambda link: link.links)),
    Fact("nvlinkBandwidth", "int", _link(lambda link: link.bandwidth)),
    Fact("fabricClique", "string", lambda device: device.gpu.fabric_clique),
    Fact("pcieGeneration", "int", lambda device: device.gpu.pcie_generation),
    Fact("pcieWidth", "int", lambda device: device.gpu.pcie_width),
    Fact("migCapable", "bool", lambda device: device.gpu.mig_capable),
    Fact("migMode", "string", lambda device: device.gpu.mig_mode.value),
    Fact("ecc", "bool", lambda device: device.gpu.ecc),
)

PARTITION_ONLY = (
    PARENT,
    MEMORY_SLICES,
    Fact("computeSlices", "int", lambda device: device.profile.compute_slices if device.profile else None),
    Fact("placementStart", "int", lambda device: device.placement.start if device.placement else None),
    Fact("placementSize", "int", lambda device: device.placement.size if device.placement else None),
)

SHARE_ONLY = (PARENT, Fact("shares", "int", lambda device: device.shares))

SHARED_ONLY = (
    PARENT,
    DRIVER_VERSION,
    MEMORY_TYPE,
    Fact("memoryLimit", "string", lambda device: device.shared.limit.promised if device.shared else None),
)

MONITOR_NAMES = frozenset(fact.name for fact in COMMON) | {"uuid"}
"""On monitor devices: the full GPU's, except ``type``."""

FACTS = {
    DeviceKind.FULL: (*COMMON, *FULL_ONLY),
    DeviceKind.PARTITION: (*COMMON, *PARTITION_ONLY),
    DeviceKind.SHARE: (*COMMON, *SHARE_ONLY),
    DeviceKind.SHARED: (*COMMON, *SHARED_ONLY),
    DeviceKind.SHARED_PARTITION: (*COMMON, *PARTITION_ONLY),
}


def attributes(device: Device) -> Attributes:
    """Return the device's ``attributes``, without those that have no value."""
    values: Attributes = {}
    for fact in FACTS[device.kind]:
        value = fact.of(device)
        if value is not None:
            values[fact.name] = {fact.kind: value[:STRING_LIMIT] if isinstance(value, str) else value}
    return values


def monitor_attributes(monitor: Monitor) -> Attributes:
    """Return the ``attributes`` of a monitor device. It has no capacity."""
    of_gpu = attributes(full_device(monitor.gpu, 0))
    values = {name: value for name, value in of_gpu.items() if name in MONITOR_NAMES}
    return values | {"type": {"string": MONITOR_TYPE}}


def capacity(device: Device) -> dict[str, dict[str, Any]]:
    """``memory`` in bytes and, where NVML reports them, ``multiprocessors``.

    A share has none: whoever takes turns on a GPU may take all of its memory, so there is nothing to promise. Of a
    shared device each claim consumes a part of ``memory``, in steps of 1 GiB; all of it if it states none; and with MPS
    one of ``clients``. Of a shared partition each consumes the ``computeSlices`` of one compute instance. Neither has
    another capacity: one without a request policy is consumed whole by the first claim.
    """
    if device.profile is not None and device.kind is DeviceKind.SHARED_PARTITION:
        instance = str(device.profile.instance_slices)
        policy: dict[str, Any] = {"default": instance, "validValues": [instance]}
        return {COMPUTE_CAPACITY: {"value": str(device.profile.compute_slices), "requestPolicy": policy}}
    if device.kind is DeviceKind.SHARE:
        return {}
    if device.shared is not None:
        policy = {"default": f"{device.shared.gib}Gi", "validRange": {"min": "1Gi", "step": "1Gi"}}
        amounts = {MEMORY_CAPACITY: {"value": quantity(device.shared.memory_bytes), "requestPolicy": policy}}
        if device.clients is not None:
            each_takes_one = {"default": "1", "validRange": {"min": "1", "max": "1", "step": "1"}}
            amounts[CLIENTS_CAPACITY] = {"value": quantity(device.clients), "requestPolicy": each_takes_one}
        return amounts
    source = device.profile or device.gpu
    quantities: dict[str, dict[str, Any]] = {MEMORY_CAPACITY: {"value": quantity(source.memory_bytes)}}
    if source.multiprocessors is not None:
        quantities["multiprocessors"] = {"value": quantity(source.multiprocessors)}
    return quantities


def quantity(number: int) -> str:
    """The canonical form of a Kubernetes quantity, so that what comes back equals what was sent."""
    suffixes = ("", "Ki", "Mi", "Gi", "Ti", "Pi")
    power = 0
    while number and number % 1024 == 0 and power < len(suffixes) - 1:
        number, power = number // 1024, power + 1
    return f"{number}{suffixes[power]}"
