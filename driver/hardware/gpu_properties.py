"""Read the properties of one GPU through the pynvml functions and sysfs.

NVML reports neither type nor bandwidth of the memory. Bandwidth follows from clock and bus width (checked against
NVIDIA's data sheets for A100, H100, B200, L40S, T4); the type is known by product, and None for other products.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from ctypes import byref, c_uint
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pynvml

from driver.hardware.nvlink import nvlink_cliques, read_fabric_clique, read_nvlink
from driver.hardware.nvml_errors import UNKNOWN_NUMBER, fact, text
from driver.hardware.pci_distance import numa_node, pci_address, pcie_root
from driver.model.gpu import Gpu, MigMode, Placement, Profile

TRANSFERS_PER_CLOCK = 2
"""Double data rate: NVML's memory clock counts full cycles."""


class KnownMemory(NamedTuple):
    """Type and data-sheet bandwidth in GB/s of the products whose name matches ``pattern``.

    ``over_gib`` distinguishes two memory sizes of one product name.
    """

    pattern: str
    kind: str
    bandwidth: int
    over_gib: int = 0


PRODUCTS = (
    KnownMemory(r"Tesla T4\b", "GDDR6", 320),
    KnownMemory(r"V100", "HBM2", 900),
    KnownMemory(r"\bA10\b", "GDDR6", 600),
    KnownMemory(r"\bL4\b", "GDDR6", 300),
    KnownMemory(r"\bL40S\b", "GDDR6", 864),
    KnownMemory(r"\bA30\b", "HBM2", 933),
    KnownMemory(r"A[18]00.*40GB", "HBM2", 1555),
    KnownMemory(r"A[18]00-SXM4-80GB", "HBM2e", 2039),
    KnownMemory(r"A[18]00 80GB PCIe", "HBM2e", 1935),
    KnownMemory(r"GH200 144G", "HBM3e", 4900),
    KnownMemory(r"GH200", "HBM3", 4000),
    KnownMemory(r"H[18]00 PCIe", "HBM2e", 2039),
    KnownMemory(r"H[18]00 NVL", "HBM3", 3938),
    KnownMemory(r"H[18]00", "HBM3", 3352),
    KnownMemory(r"H200", "HBM3e", 4800),
    KnownMemory(r"\bH20\b", "HBM3e", 4800, over_gib=100),  # the later H20 has the memory of an H200
    KnownMemory(r"\bH20\b", "HBM3", 4000),
    KnownMemory(r"G?B[23]00\b", "HBM3e", 8000),
    KnownMemory(r"RTX PRO 6000 Blackwell", "GDDR7", 1597),
    KnownMemory(r"RTX PRO 5000 Blackwell", "GDDR7", 1344),
)
"""First match wins: narrower names stand in front of wider ones."""


def read_memory_bandwidth(nvml: Any, handle: Any, product: str, memory_bytes: int) -> int | None:
    """GB/s: 2 x highest memory clock x bus width / 8, else the product's data sheet, else None."""
    clock_mhz = fact(nvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_MEM)
    width_bits = fact(nvml.nvmlDeviceGetMemoryBusWidth, handle)
    if clock_mhz and width_bits:
        bandwidth: int = round(TRANSFERS_PER_CLOCK * clock_mhz * width_bits / 8 / 1000)
        return bandwidth
    memory = known_memory(product, memory_bytes)
    return memory.bandwidth if memory else None


def known_memory(product: str, memory_bytes: int) -> KnownMemory | None:
    rows = (memory for memory in PRODUCTS if re.search(memory.pattern, product))
    return next((memory for memory in rows if memory_bytes > memory.over_gib << 30), None)


MIB = 1 << 20

ARCHITECTURES = {
    value: name.removeprefix("NVML_DEVICE_ARCH_").capitalize()
    for name, value in vars(pynvml).items()
    if name.startswith("NVML_DEVICE_ARCH_") and name != "NVML_DEVICE_ARCH_UNKNOWN"
}

BRANDS = {
    pynvml.NVML_BRAND_QUADRO: "Quadro",
    pynvml.NVML_BRAND_TESLA: "Tesla",
    pynvml.NVML_BRAND_GEFORCE: "GeForce",
    pynvml.NVML_BRAND_TITAN: "Titan",
    pynvml.NVML_BRAND_QUADRO_RTX: "QuadroRTX",
    pynvml.NVML_BRAND_NVIDIA_RTX: "NvidiaRTX",
    pynvml.NVML_BRAND_NVIDIA: "Nvidia",
    pynvml.NVML_BRAND_GEFORCE_RTX: "GeForceRTX",
    pynvml.NVML_BRAND_TITAN_RTX: "TitanRTX",
}
"""Brand names in the form that users of NVIDIA's driver know."""


def read_gpu(nvml: Any, handle: Any, index: int, root: Path, *, simulated: bool) -> Gpu:
    """Read all properties of one GPU. Raises NVMLError for a missing mandatory property."""
    address = pci_address(text(nvml.nvmlDeviceGetPciInfo(handle).busId))
    mig_mode = fact(nvml.nvmlDeviceGetMigMode, handle)
    profiles = tuple(read_profiles(nvml, handle)) if mig_mode is not None else ()
    product = text(nvml.nvmlDeviceGetName(handle))
    memory_bytes = nvml.nvmlDeviceGetMemoryInfo(handle).total
    with_reserve = fact(nvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    memory = known_memory(product, memory_bytes)
    capability, cuda_driver = nvml.nvmlDeviceGetCudaComputeCapability(handle), nvml.nvmlSystemGetCudaDriverVersion_v2()
    ecc_modes = fact(nvml.nvmlDeviceGetEccMode, handle)
    return Gpu(
        uuid=text(nvml.nvmlDeviceGetUUID(handle)),
        index=index,
        minor=nvml.nvmlDeviceGetMinorNumber(handle),
        product_name=product,
        brand=BRANDS.get(fact(nvml.nvmlDeviceGetBrand, handle), "Unknown"),
        architecture=ARCHITECTURES.get(fact(nvml.nvmlDeviceGetArchitecture, handle), "Unknown"),
        cuda_compute_capability=f"{capability[0]}.{capability[1]}.0",
        driver_version=semantic_version(text(nvml.nvmlSystemGetDriverVersion())),
        cuda_driver_version=f"{cuda_driver // 1000}.{cuda_driver % 1000 // 10}.0",
        pci_bus_id=address,
        pcie_root=pcie_root(root, address),
        numa_node=numa_node(root, address),
        memory_bytes=memory_bytes,
        multiprocessors=max((profile.multiprocessors for profile in profiles), default=None),
        memory_type=memory.kind if memory else None,
        memory_bandwidth=read_memory_bandwidth(nvml, handle, product, memory_bytes),
        pcie_generation=fact(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_width=fact(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        nvlink=read_nvlink(nvml, handle),
        nvlink_clique=None,  # requires all GPUs of the node
        fabric_clique=read_fabric_clique(nvml, handle),
        ecc=None if ecc_modes is None else bool(ecc_modes[0] == pynvml.NVML_FEATURE_ENABLED),
        mig_capable=bool(profiles),
        mig_mode=read_mig_mode(mig_mode, capable=bool(profiles)),
        memory_slices=max((place.start + place.size for p in profiles for place in p.placements), default=1),
        profiles=profiles,
        simulated=simulated,
        memory_reserved=0 if with_reserve is None else with_reserve.reserved,
    )


def with_cliques(gpus: Iterable[Gpu]) -> list[Gpu]:
    """Return the GPUs of one node with their NVLink cliques."""
    of_node = list(gpus)
    cliques = nvlink_cliques({gpu.pci_bus_id: gpu.nvlink for gpu in of_node})
    return [replace(gpu, nvlink_clique=cliques.get(gpu.pci_bus_id)) for gpu in of_node]


def read_mig_mode(modes: Sequence[int] | None, *, capable: bool) -> MigMode:
    """Convert NVML's current and pending MIG mode; they differ while a GPU waits for a reset."""
    if modes is None or not capable:
        return MigMode.UNSUPPORTED
    current, pending = (mode == pynvml.NVML_DEVICE_MIG_ENABLE for mode in modes)
    if current == pending:
        return MigMode.ENABLED if current else MigMode.DISABLED
    return MigMode.RESET_TO_ENABLE if pending else MigMode.RESET_TO_DISABLE


def read_profiles(nvml: Any, handle: Any) -> Iterator[Profile]:
    """The MIG profiles of one GPU that have at least one legal placement."""
    for enum_index in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info = nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, enum_index)
            placements = read_placements(nvml, handle, info.id)
        except pynvml.NVMLError as error:
            if error.value in UNKNOWN_NUMBER:
                continue
            raise
        if placements:
            yield Profile(
                name=text(info.name).removeprefix("MIG "),
                id=info.id,
                compute_slices=info.sliceCount,
                memory_bytes=info.memorySizeMB * MIB,
                multiprocessors=info.multiprocessorCount,
                max_instances=info.instanceCount,
                jpeg_engines=info.jpegCount,
                ofa_engines=info.ofaCount,
                placements=placements,
            )


def read_placements(nvml: Any, handle: Any, profile_id: int) -> tuple[Placement, ...]:
    """Every legal placement of a profile, by start; NVML reports them all, free or not."""
    count = c_uint()
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, None, byref(count))
    places = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, places, byref(count))
    return tuple(sorted(Placement(place.start, place.size) for place in places[: count.value]))


def semantic_version(version: str) -> str:
    """``580.95.05`` as a semantic version: three numbers without leading zeros (``580.95.5``)."""
    numbers = [int(part) for part in version.split(".") if part.isdigit()]
    return ".".join(str(number) for number in (*numbers, 0, 0, 0)[:3])
