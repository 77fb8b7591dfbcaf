"""What a device says of itself: attributes and capacity, by the pinned public names.

Partitions carry what people select by, not all there is: each attribute costs the scheduler time for
every device it looks at. ``profile`` is on every device, so that a selector never meets its absence.
"""

from __future__ import annotations

from typing import Any

from driver.model.device import Device, DeviceKind
from driver.model.gpu import Gpu, Placement, Profile

Attributes = dict[str, dict[str, Any]]

NO_PROFILE = "none"

STRING_LIMIT = 64
"""Characters of a string attribute (KEP-4381)."""


def attributes(device: Device) -> Attributes:
    gpu = device.gpu
    own = _full(gpu) if device.kind is DeviceKind.FULL else _partition(device)
    return {**own, **_standard(gpu)}


def capacity(device: Device) -> dict[str, dict[str, str]]:
    """``memory`` in bytes and, where NVML tells, ``multiprocessors``."""
    source = device.profile or device.gpu
    found = {"memory": {"value": quantity(source.memory_bytes)}}
    if source.multiprocessors is not None:
        found["multiprocessors"] = {"value": quantity(source.multiprocessors)}
    return found


def quantity(number: int) -> str:
    """The canonical form of a Kubernetes quantity, so that what comes back equals what was sent."""
    suffixes = ("", "Ki", "Mi", "Gi", "Ti", "Pi")
    power = 0
    while number and number % 1024 == 0 and power < len(suffixes) - 1:
        number, power = number // 1024, power + 1
    return f"{number}{suffixes[power]}"


def _full(gpu: Gpu) -> Attributes:
    return {
        "type": _string(DeviceKind.FULL.value),
        "uuid": _string(gpu.uuid),
        "profile": _string(NO_PROFILE),
        **_product(gpu),
        "brand": _string(gpu.brand),
        "driverVersion": {"version": gpu.driver_version},
        "cudaDriverVersion": {"version": gpu.cuda_driver_version},
        "migCapable": {"bool": gpu.mig_capable},
        "memorySlices": {"int": gpu.memory_slices},
        "simulated": {"bool": gpu.simulated},
    }


def _partition(device: Device) -> Attributes:
    profile, placement = required(device)
    return {
        "type": _string(DeviceKind.PARTITION.value),
        "parentUUID": _string(device.gpu.uuid),
        "profile": _string(profile.name),
        **_product(device.gpu),
        "memorySlices": {"int": placement.size},
        "computeSlices": {"int": profile.compute_slices},
        "placementStart": {"int": placement.start},
        "placementSize": {"int": placement.size},
        "simulated": {"bool": device.gpu.simulated},
    }


def required(device: Device) -> tuple[Profile, Placement]:
    """Profile and placement of a partition device. Raises ValueError for a full one."""
    if device.profile is None or device.placement is None:
        raise ValueError(f"{device.name} is no partition: it has no profile and placement")
    return device.profile, device.placement


def _product(gpu: Gpu) -> Attributes:
    return {
        "productName": _string(gpu.product_name),
        "architecture": _string(gpu.architecture),
        "cudaComputeCapability": {"version": gpu.cuda_compute_capability},
    }


def _standard(gpu: Gpu) -> Attributes:
    found: Attributes = {"resource.kubernetes.io/pciBusID": _string(gpu.pci_bus_id)}
    if gpu.pcie_root is not None:
        found["resource.kubernetes.io/pcieRoot"] = _string(gpu.pcie_root)
    if gpu.numa_node is not None:
        found["resource.kubernetes.io/numaNode"] = {"int": gpu.numa_node}
    return found


def _string(value: str) -> dict[str, str]:
    return {"string": value[:STRING_LIMIT]}
