"""Simulated NVML: where a GPU sits - PCIe distance, NUMA, CPUs, how it shares memory with the CPU."""

# ruff: noqa: N802, N803
from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import pynvml

from .description import GpuDescription
from .nvml_arguments import error, integer
from .nvml_session import NvmlSession, simulated

_WORD_BITS = 64

# First driver branch with nvmlDeviceGetAddressingMode.
_ADDRESSING_MODE_SINCE = 580

_ADDRESSING_MODES = {
    "none": pynvml.NVML_DEVICE_ADDRESSING_MODE_NONE,
    "hmm": pynvml.NVML_DEVICE_ADDRESSING_MODE_HMM,
    "ats": pynvml.NVML_DEVICE_ADDRESSING_MODE_ATS,
}


class PlaceCalls(NvmlSession):
    """Places concern GPUs; a MIG device has none of its own: NOT_SUPPORTED."""

    @simulated()
    def nvmlDeviceGetTopologyCommonAncestor(self, device1: Any, device2: Any) -> int:
        return self.ancestor(self.gpu(device1), self.gpu(device2))

    @simulated()
    def nvmlDeviceGetNumaNodeId(self, handle: Any) -> int:
        node = self.machine.gpus[self.gpu(handle)].memory_numa_node
        if node is None:
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return node

    @simulated()
    def nvmlDeviceGetCpuAffinity(self, handle: Any, cpuSetSize: int) -> Any:
        cpus = self.machine.gpus[self.gpu(handle)].cpus
        words = integer(cpuSetSize)
        if words <= 0:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if not cpus:
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        mask = (ctypes.c_ulonglong * words)()
        # CPUs beyond the array are left out, as the manual says.
        for cpu in (number for number in cpu_numbers(cpus) if number < words * _WORD_BITS):
            mask[cpu // _WORD_BITS] |= 1 << cpu % _WORD_BITS
        return mask

    @simulated(since=_ADDRESSING_MODE_SINCE)
    def nvmlDeviceGetAddressingMode(self, device: Any) -> int:
        self.gpu(device)
        return int(_ADDRESSING_MODES[self.machine.description.addressing_mode])

    @simulated()
    def nvmlDeviceGetC2cModeInfoV1(self, handle: Any) -> Any:
        self.gpu(handle)
        if not self.machine.description.c2c:
            # nvidia-smi of an x86 host prints N/A.
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        info = pynvml.c_nvmlC2cModeInfo_v1_t()
        info.isC2cEnabled = 1
        return info

    @simulated()
    def nvmlDeviceGetC2cModeInfoV(self, handle: Any) -> Any:
        return self.nvmlDeviceGetC2cModeInfoV1(handle)

    def ancestor(self, first: int, second: int) -> int:
        """``NVML_TOPOLOGY_*`` between two GPUs."""
        return common_ancestor(self.machine.gpus[first], self.machine.gpus[second])


def cpu_numbers(cpus: str) -> Iterator[int]:
    """The numbers of a kernel CPU list, as "0-55,112-167"."""
    for part in cpus.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def common_ancestor(one: GpuDescription, other: GpuDescription) -> int:
    """``NVML_TOPOLOGY_*`` between two GPUs, from their places in the PCI tree and NUMA."""
    if one.pci_bus_id == other.pci_bus_id:
        level = pynvml.NVML_TOPOLOGY_INTERNAL
    elif one.pcie_root == other.pcie_root:
        pairs = zip(one.bridges, other.bridges, strict=False)
        shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        # Two shared bridges are a root port and one switch below it; one is a root port with several.
        by_shared = (pynvml.NVML_TOPOLOGY_HOSTBRIDGE, pynvml.NVML_TOPOLOGY_MULTIPLE, pynvml.NVML_TOPOLOGY_SINGLE)
        level = by_shared[min(shared, 2)]
    elif one.numa_node == other.numa_node:
        level = pynvml.NVML_TOPOLOGY_NODE
    else:
        level = pynvml.NVML_TOPOLOGY_SYSTEM
    return int(level)
