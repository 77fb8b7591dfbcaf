"""What NVML and sysfs show of a node, for reports about hardware: how calls answer, and a description to simulate it.

A description has the fields of ``driver.simulator.description``. It contains no serial numbers and no UUIDs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from driver.hardware.gpu_properties import MIB
from driver.hardware.nvlink import SWITCH
from driver.hardware.nvml_errors import NAMES, UNKNOWN_NUMBER, fact, text
from driver.hardware.pci_distance import Place, find_nics, pci_address, place_of
from driver.model.gpu import Gpu

Description = dict[str, Any]
"""An object of a node description, as YAML or JSON has it."""

CALL_REPETITIONS = 3

READING_CALLS: Mapping[str, Callable[[Any, Any], Any]] = {
    "nvmlDeviceGetArchitecture": lambda nvml, gpu: nvml.nvmlDeviceGetArchitecture(gpu),
    "nvmlDeviceGetBrand": lambda nvml, gpu: nvml.nvmlDeviceGetBrand(gpu),
    "nvmlDeviceGetComputeMode": lambda nvml, gpu: nvml.nvmlDeviceGetComputeMode(gpu),
    "nvmlDeviceGetComputeRunningProcesses": lambda nvml, gpu: nvml.nvmlDeviceGetComputeRunningProcesses(gpu),
    "nvmlDeviceGetCudaComputeCapability": lambda nvml, gpu: nvml.nvmlDeviceGetCudaComputeCapability(gpu),
    "nvmlDeviceGetEccMode": lambda nvml, gpu: nvml.nvmlDeviceGetEccMode(gpu),
    "nvmlDeviceGetFieldValues": lambda nvml, gpu: nvml.nvmlDeviceGetFieldValues(
        gpu, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
    ),
    "nvmlDeviceGetGpuInstanceProfileInfo": lambda nvml, gpu: nvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, 0),
    "nvmlDeviceGetMaxClockInfo": lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_MEM),
    "nvmlDeviceGetMaxPcieLinkGeneration": lambda nvml, gpu: nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu),
    "nvmlDeviceGetMaxPcieLinkWidth": lambda nvml, gpu: nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu),
    "nvmlDeviceGetMemoryBusWidth": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryBusWidth(gpu),
    "nvmlDeviceGetMemoryInfo": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu, pynvml.nvmlMemory_v2),
    "nvmlDeviceGetMigMode": lambda nvml, gpu: nvml.nvmlDeviceGetMigMode(gpu),
    "nvmlDeviceGetMinorNumber": lambda nvml, gpu: nvml.nvmlDeviceGetMinorNumber(gpu),
    "nvmlDeviceGetName": lambda nvml, gpu: nvml.nvmlDeviceGetName(gpu),
    "nvmlDeviceGetNvLinkState": lambda nvml, gpu: nvml.nvmlDeviceGetNvLinkState(gpu, 0),
    "nvmlDeviceGetPciInfo": lambda nvml, gpu: nvml.nvmlDeviceGetPciInfo(gpu),
    "nvmlDeviceGetSupportedEventTypes": lambda nvml, gpu: nvml.nvmlDeviceGetSupportedEventTypes(gpu),
    "nvmlDeviceGetUUID": lambda nvml, gpu: nvml.nvmlDeviceGetUUID(gpu),
    "nvmlGpmQueryDeviceSupport": lambda nvml, gpu: nvml.nvmlGpmQueryDeviceSupport(gpu),
}
"""The reading functions of NVML that the node plugin needs or can use."""


@dataclass(frozen=True, slots=True)
class NvmlAnswer:
    """How a function answered: the fastest of CALL_REPETITIONS calls; ``error`` is NVML's code, None: success."""

    function: str
    microseconds: float
    error: int | None

    @property
    def is_missing(self) -> bool:
        """Whether the driver does not have the function."""
        return bool(self.error == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    def __str__(self) -> str:
        answer = "" if self.error is None else f" {NAMES.get(self.error, self.error)}"
        return f"{self.function}{answer} {self.microseconds:.0f} us"


def reading_answers(nvml: Any, handle: Any) -> Iterator[NvmlAnswer]:
    """Call each of READING_CALLS."""
    for function, call in READING_CALLS.items():
        fastest, error = float("inf"), None
        for _ in range(CALL_REPETITIONS):
            started = time.perf_counter()
            try:
                call(nvml, handle)
            except pynvml.NVMLError as refused:
                error = refused.value
            fastest = min(fastest, time.perf_counter() - started)
        yield NvmlAnswer(function, fastest * 1e6, error)


def describe_node(nvml: Any, root: Path, gpus: Sequence[tuple[Gpu, Any]]) -> Description:
    """Describe a node whose ``gpus`` (each with its NVML handle) are of one product. Raises NVMLError."""
    gpu, handle = gpus[0]
    nvlink = _nvlink(nvml, [(gpu, handle) for gpu, handle in gpus if gpu.nvlink_clique is not None])
    fabric = next((gpu.fabric_clique for gpu, _ in gpus if gpu.fabric_clique is not None), None)
    return {
        "name": f"{re.sub('[^a-z0-9]+', '-', gpu.product_name.lower()).strip('-')[:50]}-{len(gpus)}",
        "summary": f"{len(gpus)} x {gpu.product_name}, as tessera acceptance found them",
        "product": gpu.product_name,
        "productFacts": _product(nvml, handle, gpu),
        "driverVersion": text(nvml.nvmlSystemGetDriverVersion()),
        "cudaDriverVersion": gpu.cuda_driver_version.rpartition(".")[0],
        "ecc": bool(gpu.ecc),
        **({"nvlink": nvlink} if nvlink else {}),
        **({"fabric": {"clusterUuid": PSEUDONYM, "cliqueId": int(fabric.rpartition(".")[2])}} if fabric else {}),
        "gpus": [_gpu(root, gpu) for gpu, _ in gpus],
        "nics": [
            {**place, "rdmaDevice": nic.name} for nic in find_nics(root) if (place := _place(nic.place)) is not None
        ],
    }


PSEUDONYM = "00000000-0000-4000-8000-000000000001"
"""Replaces the UUID of an NVLink domain, which identifies the rack."""


def _gpu(root: Path, gpu: Gpu) -> Description:
    place = place_of(root, gpu.pci_bus_id)
    clique = {} if gpu.nvlink_clique is None else {"nvlinkClique": int(gpu.nvlink_clique.rpartition("-")[2])}
    unknown = {"pciBusId": place.address, "pcieRoot": f"pci{place.address.rpartition(':')[0]}"}
    return {**(_place(place) or unknown), **clique}


def _place(place: Place) -> Description | None:
    """None for a device whose root complex is unknown."""
    if place.root is None:
        return None
    return {
        "pciBusId": place.address,
        "pcieRoot": place.root,
        "bridges": list(place.path[:-1]),
        "numaNode": -1 if place.numa_node is None else place.numa_node,
        "cpus": place.cpus or "",
    }


def _nvlink(nvml: Any, gpus: Sequence[tuple[Gpu, Any]]) -> Description | None:
    """The links of the GPUs that have peers, and the switches at their ends."""
    nvlink, handle = next(((gpu.nvlink, handle) for gpu, handle in gpus), (None, None))
    if nvlink is None:
        return None
    if SWITCH not in nvlink.peers:
        return {"links": nvlink.links}
    ends = (fact(nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link) for link in range(nvlink.links))
    switches = sorted({pci_address(text(end.busId)) for end in ends if end is not None})
    return {"links": nvlink.links, **({"switches": switches} if switches else {"rackSwitches": True})}


def _product(nvml: Any, handle: Any, gpu: Gpu) -> Description:
    """The facts of ``driver.simulator.products.Product``. What NVML does not have is 0."""
    return {
        "name": gpu.product_name,
        "brand": BRAND_NAMES.get(fact(nvml.nvmlDeviceGetBrand, handle), "UNKNOWN"),
        "architecture": gpu.architecture,
        "computeCapability": [int(number) for number in gpu.cuda_compute_capability.split(".")[:2]],
        "pciDeviceId": nvml.nvmlDeviceGetPciInfo(handle).pciDeviceId,
        "memoryMib": gpu.memory_bytes // MIB,
        "multiprocessors": gpu.multiprocessors or 0,
        "memoryBusBits": fact(nvml.nvmlDeviceGetMemoryBusWidth, handle) or 0,
        "memoryClockMhz": fact(nvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_MEM) or 0,
        "pcieGeneration": gpu.pcie_generation or 0,
        "nvlinkGeneration": (gpu.nvlink.generation if gpu.nvlink else None) or 0,
        "memoryBandwidth": gpu.memory_bandwidth or 0,
        "migCapable": gpu.mig_capable,
        "togglesWithoutReset": gpu.toggles_freely,
        "memorySlices": gpu.memory_slices,
        "profiles": list(_profiles(nvml, handle, gpu)),
        "estimates": ["wholeCiProfile"] if gpu.profiles else [],
    }


BRAND_NAMES = {
    value: name.removeprefix("NVML_BRAND_") for name, value in vars(pynvml).items() if name.startswith("NVML_BRAND_")
}

COMPUTE_PROFILES = {1: 0, 2: 1, 3: 2, 4: 3, 6: 6, 7: 4, 8: 5}
"""NVML_COMPUTE_INSTANCE_PROFILE_* of the compute instance with all slices, by slices."""

ONE_SLICE_REVISION = 7
"""NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1: of one slice with more multiprocessors than the smallest profile has."""


def _profiles(nvml: Any, handle: Any, gpu: Gpu) -> Iterator[Description]:
    fewest = min((profile.multiprocessors for profile in gpu.profiles), default=0)
    by_id = {profile.id: profile for profile in gpu.profiles}
    for index in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT if by_id else 0):
        info = fact(nvml.nvmlDeviceGetGpuInstanceProfileInfo, handle, index, absent=UNKNOWN_NUMBER)
        if info is None or (profile := by_id.get(info.id)) is None:
            continue
        is_revision = profile.compute_slices == 1 and profile.multiprocessors > fewest
        yield {
            "name": profile.name,
            "id": profile.id,
            "enum": index,
            "slices": profile.compute_slices,
            "memoryMib": profile.memory_bytes // MIB,
            "multiprocessors": profile.multiprocessors,
            "copyEngines": info.copyEngineCount,
            "decoders": info.decoderCount,
            "encoders": info.encoderCount,
            "jpeg": info.jpegCount,
            "ofa": info.ofaCount,
            "maxInstances": profile.max_instances,
            "starts": [place.start for place in profile.placements],
            "size": profile.placements[0].size,
            "wholeCiProfile": ONE_SLICE_REVISION if is_revision else COMPUTE_PROFILES.get(profile.compute_slices, 0),
        }
