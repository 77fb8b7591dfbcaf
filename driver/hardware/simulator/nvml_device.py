"""Simulated NVML: memory, clocks, PCIe and processes of a device."""

# ruff: noqa: N802
from __future__ import annotations

from typing import Any

import msgspec
import pynvml

from .nvml_arguments import error, integer
from .nvml_keys import GpuKey
from .nvml_session import NvmlSession, simulated
from .nvml_system import full_bus_id
from .state import ComputeInstance, GpuInstance, GpuState, Process

MIB = 1 << 20

# Highest SM clock in MHz. No published fact; only the memory clock is used for anything.
_MAX_SM_CLOCK = 1980


_SHARED: int = pynvml.NVML_COMPUTEMODE_DEFAULT

# EXCLUSIVE_THREAD is not among them: CUDA 8 removed it.
_COMPUTE_MODES = (_SHARED, pynvml.NVML_COMPUTEMODE_PROHIBITED, pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)


def pci_info(bus_id: str, device_id: int) -> Any:
    """The struct of :func:`nvmlDeviceGetPciInfo` for a device at ``bus_id`` (sysfs spelling)."""
    info = pynvml.nvmlPciInfo_t()
    domain, bus, rest = bus_id.split(":")
    info.domain, info.bus, info.device = int(domain, 16), int(bus, 16), int(rest.partition(".")[0], 16)
    info.busId = full_bus_id(bus_id)
    info.busIdLegacy = f"{domain[-4:]}:{bus}:{rest}".upper()
    info.pciDeviceId = device_id
    return info


class DeviceCalls(NvmlSession):
    """What ``nvidia-smi -q`` would ask of a device."""

    @simulated()
    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any:
        gpu = self.machine.gpus[self.gpu(handle)]
        return pci_info(gpu.pci_bus_id, self.machine.product.pci_device_id)

    @simulated()
    def nvmlDeviceGetPciInfo_v3(self, handle: Any) -> Any:
        return self.nvmlDeviceGetPciInfo(handle)

    @simulated()
    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any:
        if version and version != pynvml.nvmlMemory_v2:
            raise error(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        total, reserved, used = self._memory(handle)
        info = pynvml.c_nvmlMemory_v2_t() if version else pynvml.c_nvmlMemory_t()
        info.total, info.free = total, total - reserved - used
        if version:
            info.version, info.reserved, info.used = version, reserved, used
        else:
            # The old struct has no place for what is reserved and counts it as used.
            info.used = used + reserved
        return info

    @simulated()
    def nvmlDeviceGetMemoryBusWidth(self, device: Any) -> int:
        self.gpu(device)
        return self.machine.product.memory_bus_bits

    @simulated()
    def nvmlDeviceGetMaxClockInfo(self, handle: Any, type: int) -> int:  # noqa: A002 - pynvml's name
        self.gpu(handle)
        clock = integer(type)
        if not 0 <= clock < pynvml.NVML_CLOCK_COUNT:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self.machine.product.memory_clock_mhz if clock == pynvml.NVML_CLOCK_MEM else _MAX_SM_CLOCK

    @simulated()
    def nvmlDeviceGetEccMode(self, handle: Any) -> list[int]:
        self.gpu(handle)
        mode = int(self.machine.description.ecc)
        return [mode, mode]

    @simulated()
    def nvmlDeviceGetGpuMaxPcieLinkGeneration(self, handle: Any) -> int:
        self.gpu(handle)
        return self.machine.product.pcie_generation

    @simulated()
    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Any) -> int:
        # What GPU and host can do together, where the GPU's own maximum is the function above.
        own = self.nvmlDeviceGetGpuMaxPcieLinkGeneration(handle)
        return min(own, self.machine.description.pcie_generation or own)

    @simulated()
    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: Any) -> int:
        return self.nvmlDeviceGetMaxPcieLinkGeneration(handle)

    @simulated()
    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Any) -> int:
        self.gpu(handle)
        return 16

    @simulated()
    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: Any) -> int:
        return self.nvmlDeviceGetMaxPcieLinkWidth(handle)

    @simulated()
    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any) -> list[Any]:
        key = self.device(handle)
        if not isinstance(key, GpuKey):
            found = self.mig_device(handle)
            return [_process_info(p, found.instance, found.compute) for p in found.compute.processes]
        state = self.machine.state(key.minor)
        whole = [_process_info(process) for process in state.processes]
        return whole + [
            _process_info(process, gi, ci) for gi in state.instances for ci in gi.compute for process in ci.processes
        ]

    @simulated()
    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        return self.nvmlDeviceGetComputeRunningProcesses_v3(handle)

    @simulated()
    def nvmlDeviceGetComputeMode(self, handle: Any) -> int:
        key = self.device(handle)
        return self.machine.state(key.minor).compute_mode if isinstance(key, GpuKey) else _SHARED

    @simulated()
    def nvmlDeviceSetComputeMode(self, handle: Any, mode: int) -> None:
        minor, wanted = self.gpu(handle), integer(mode)
        if wanted not in _COMPUTE_MODES:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        self.machine.change(minor, lambda state: (_in_compute_mode(state, wanted), None))

    def _memory(self, handle: Any) -> tuple[int, int, int]:
        """Total, reserved and used bytes of a GPU or a MIG device."""
        key = self.device(handle)
        product = self.machine.product
        if isinstance(key, GpuKey):
            used = _used_by_all(self.machine.state(key.minor))
            return product.memory_mib * MIB, product.reserved_mib * MIB, used
        found = self.mig_device(handle)
        used = sum(process.memory for ci in found.instance.compute for process in ci.processes)
        memory = product.by_id[found.instance.profile].memory_at(found.instance.start)
        return memory * MIB, 0, used


def _in_compute_mode(state: GpuState, mode: int) -> GpuState:
    """With MIG on each MIG device has a mode of its own (NVML manual); other than the default isn't simulated."""
    if state.mig_enabled:
        raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return msgspec.structs.replace(state, compute_mode=mode)


def _used_by_all(state: GpuState) -> int:
    inside = sum(p.memory for gi in state.instances for ci in gi.compute for p in ci.processes)
    return inside + sum(process.memory for process in state.processes)


def _process_info(process: Process, instance: GpuInstance | None = None, compute: ComputeInstance | None = None) -> Any:
    info = pynvml.c_nvmlProcessInfo_v3_t()
    info.pid, info.usedGpuMemory = process.pid, process.memory
    info.gpuInstanceId = instance.id if instance else pynvml.NVML_GPU_INSTANCE_ID_ANY
    info.computeInstanceId = compute.id if compute else pynvml.NVML_COMPUTE_INSTANCE_ID_ANY
    return pynvml.nvmlStructToFriendlyObject(info)
