"""What NVIDIA's driver would publish with MIG on demand: every placement of every profile, always.

Written after what is known of it (names, attributes, capacities and counters of its devices), not after its code. A
GPU of an H100 node has 26 devices and 14 counters; a slice has as many devices as the API allows, GPU after GPU, the
full GPU first and each profile's lowest start first. Driver, pool and device names are ours, so that the same classes
and the same allocated claims serve both layouts; one expression a class is kinder to the scheduler than its own two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from controller.cluster.fleet import FleetGpu
from driver.model.device import Device
from driver.model.gpu import Gpu, Profile
from driver.model.offer import DeviceKind
from driver.slices.attributes import STANDARD, quantity
from driver.slices.build import Content
from driver.slices.slice_names import COUNTER_SETS_PER_SLICE, Pool, counter_set

DEVICES_PER_SLICE = 64
"""The API's limit for devices that consume counters (KEP-4815)."""

GPU_ENGINES = {"copy-engines": 8, "decoders": 7, "jpeg-engines": 7, "ofa-engines": 1}
"""Of an H100, which has no encoders."""

Amounts = Mapping[str, int]


def peer_slices(pool: Pool, gpus: Sequence[FleetGpu]) -> dict[str, Content]:
    """Content of every slice by name; counter slices sort first."""
    counters = _chunks((_counter_set(entry) for entry in gpus), COUNTER_SETS_PER_SLICE)
    devices = _chunks((_device(device, entry) for entry in gpus for device in entry.devices), DEVICES_PER_SLICE)
    contents = [*({"sharedCounters": sets} for sets in counters), *({"devices": each} for each in devices)]
    return {f"{index:05d}-{pool.node}-{pool.driver}": content for index, content in enumerate(contents)}


def _counter_set(entry: FleetGpu) -> Content:
    return {"name": counter_set(entry.number), "counters": _values(_of_gpu(entry.gpu) | _slices(entry.gpu, None))}


def _device(device: Device, entry: FleetGpu) -> Content:
    profile, gpu = device.profile, device.gpu
    amounts = _of_gpu(gpu) if profile is None else _of_profile(profile)
    taken = amounts | _slices(gpu, device)
    return {
        "name": device.name,
        "attributes": _attributes(device),
        "capacity": _capacity(amounts) if profile else {"memory": {"value": quantity(gpu.memory_bytes)}},
        "consumesCounters": [{"counterSet": counter_set(entry.number), "counters": _values(taken)}],
    }


def _attributes(device: Device) -> dict[str, Any]:
    gpu = device.gpu
    own = {"uuid": gpu.uuid} if device.kind is DeviceKind.FULL else {"parentUUID": gpu.uuid}
    profile = device.profile.name if device.profile else "none"  # on full GPUs too: our classes ask for it unguarded
    texts = {"type": device.kind.value, **own, "profile": profile, "productName": gpu.product_name}
    texts |= {"brand": gpu.brand, "architecture": gpu.architecture}
    texts |= {f"{STANDARD}pciBusID": gpu.pci_bus_id, f"{STANDARD}pcieRoot": gpu.pcie_root or ""}
    versions = {"cudaComputeCapability": gpu.cuda_compute_capability, "driverVersion": gpu.driver_version}
    versions["cudaDriverVersion"] = gpu.cuda_driver_version
    found: dict[str, Any] = {name: {"string": text} for name, text in texts.items() if text}
    found |= {name: {"version": text} for name, text in versions.items()}
    return found | ({} if gpu.numa_node is None else {f"{STANDARD}numaNode": {"int": gpu.numa_node}})


def _of_gpu(gpu: Gpu) -> dict[str, int]:
    return {"multiprocessors": gpu.multiprocessors or 0, "memory": gpu.memory_bytes, **GPU_ENGINES}


def _of_profile(profile: Profile) -> dict[str, int]:
    """Engines as NVML counts them: one of most kinds for each compute slice, OFA for ``+me`` and the whole GPU."""
    whole = profile.compute_slices == GPU_ENGINES["decoders"]
    engines = {"copy-engines": 8 if whole else profile.compute_slices, "decoders": profile.compute_slices}
    engines |= {"jpeg-engines": profile.jpeg_engines, "ofa-engines": profile.ofa_engines}
    return {"multiprocessors": profile.multiprocessors, "memory": profile.memory_bytes, **engines}


def _slices(gpu: Gpu, device: Device | None) -> dict[str, int]:
    mask = gpu.all_slices if device is None else device.mask
    return {f"memory-slice-{i}": 1 for i in range(gpu.memory_slices) if mask >> i & 1}


def _values(amounts: Amounts) -> dict[str, Any]:
    return {name: {"value": quantity(amount)} for name, amount in amounts.items() if amount}


def _capacity(amounts: Amounts) -> dict[str, Any]:
    names = {name: "".join(w.capitalize() if i else w for i, w in enumerate(name.split("-"))) for name in amounts}
    return {names[name]: {"value": quantity(amount)} for name, amount in amounts.items()}


def _chunks(items: Iterable[Content], size: int) -> Iterator[list[Content]]:
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk
