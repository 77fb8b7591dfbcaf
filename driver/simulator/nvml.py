"""``SimulatedNvml``, which replaces the module ``pynvml``, and its functions about whole GPUs and their links.

Constants, struct classes and exceptions are those of pynvml. A function that is not simulated returns
FUNCTION_NOT_FOUND, like a driver that is too old, and never reaches a real library.
"""

# ruff: noqa: N802, N803
from __future__ import annotations

import ctypes
import os
import re
import time
import uuid
from types import FunctionType
from typing import Any, NoReturn

import pynvml
from msgspec.structs import replace

from driver.simulator.description import NvlinkDescription
from driver.simulator.machine import Process, SimulatedGpuState
from driver.simulator.nvml_base import (
    EventCalls,
    GpuKey,
    MigKey,
    NvmlSession,
    error,
    integer,
    plain_name,
    pointer_to,
    simulated,
    text,
)
from driver.simulator.nvml_gpm import MIB, GpmCalls
from driver.simulator.nvml_mig import MigCalls
from driver.simulator.smi_tool import CALL as SMI
from driver.simulator.smi_tool import COMPUTE_MODES

# Highest SM clock in MHz. Not published; only the memory clock matters.
_MAX_SM_CLOCK = 1980

# Memory of a GPU that the driver reserves, as measured on an H200; other products have 448 to 947 MiB.
_RESERVED_MIB = 615

_UUID = re.compile(r"^(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")

_NVSWITCH_DEVICE_ID = 0x22A310DE

# The function answers with an enum, not the generation: A100 says 5 (open-mpi/hwloc issue 658).
_VERSIONS = {
    2: pynvml.NVML_NVLINK_VERSION_2_0,
    3: pynvml.NVML_NVLINK_VERSION_3_1,
    4: pynvml.NVML_NVLINK_VERSION_4_0,
    5: pynvml.NVML_NVLINK_VERSION_5_0,
}

_FABRIC_STATES = {
    "not-started": pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED,
    "in-progress": pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS,
    "completed": pynvml.NVML_GPU_FABRIC_STATE_COMPLETED,
}

# "Degraded bandwidth: false" in a health mask whose other fields are not supported.
_FULL_BANDWIDTH = (
    pynvml.NVML_GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_FALSE << pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW
)


class DeviceCalls(NvmlSession):
    """System, identity, memory, processes, field values and links. Most refuse a MIG device: NOT_SUPPORTED."""

    @simulated
    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any:
        gpu = self.machine.gpus[self.gpu(handle)]
        return pci_info(gpu.pci_bus_id, self.machine.product.pci_device_id)

    @simulated
    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any:
        """The first version of the struct counts the driver's reserve as used."""
        if version and version != pynvml.nvmlMemory_v2:
            raise error(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        state, device = self._state_and_device(handle)
        info = pynvml.c_nvmlMemory_v2_t(version) if version else pynvml.c_nvmlMemory_t()
        info.total = self.machine.memory_mib(state, device) * MIB
        reserved = 0 if device else _RESERVED_MIB * MIB
        used = min(sum(process.memory for process in self._processes(state, device)), info.total - reserved)
        info.free = info.total - reserved - used
        if version:
            info.reserved, info.used = reserved, used
        else:
            info.used = reserved + used
        return info

    @simulated
    def nvmlDeviceGetMemoryBusWidth(self, device: Any) -> int:
        self.gpu(device)
        return self.machine.product.memory_bus_bits

    @simulated
    def nvmlDeviceGetMaxClockInfo(self, handle: Any, type: int) -> int:  # noqa: A002 - pynvml's name
        self.gpu(handle)
        clock = integer(type)
        if not 0 <= clock < pynvml.NVML_CLOCK_COUNT:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self.machine.product.memory_clock_mhz if clock == pynvml.NVML_CLOCK_MEM else _MAX_SM_CLOCK

    @simulated
    def nvmlDeviceGetEccMode(self, handle: Any) -> list[int]:
        self.gpu(handle)
        mode = int(self.machine.description.ecc)
        return [mode, mode]

    @simulated
    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Any) -> int:
        # The highest generation that both GPU and host support.
        self.gpu(handle)
        of_gpu = self.machine.product.pcie_generation
        return min(of_gpu, self.machine.description.pcie_generation or of_gpu)

    @simulated
    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Any) -> int:
        self.gpu(handle)
        return 16

    @simulated
    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        return self._running(handle, mps_clients=False)

    @simulated
    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: Any) -> list[Any]:
        return self._running(handle, mps_clients=True)

    def _running(self, handle: Any, *, mps_clients: bool) -> list[Any]:
        state, device = self._state_and_device(handle)
        processes = (process for process in self._processes(state, device) if process.mps_client is mps_clients)
        return [_process_info(process, state) for process in processes]

    def _state_and_device(self, handle: Any) -> tuple[SimulatedGpuState, str | None]:
        """The GPU's state and the UUID of its MIG device; None: the GPU. A destroyed device is INVALID_ARGUMENT."""
        key = self.device(handle)
        state, device = self.machine.gpu_state(key.minor), key.uuid if isinstance(key, MigKey) else None
        if device is not None and device not in state.mig_devices:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return state, device

    def _processes(self, state: SimulatedGpuState, device: str | None) -> list[Process]:
        processes = state.processes_at(self.machine.clock())
        return [process for process in processes if device is None or process.device == device]

    @simulated
    def nvmlDeviceGetComputeMode(self, handle: Any) -> int:
        return self.machine.gpu_state(self.gpu(handle)).compute_mode

    @simulated
    def nvmlDeviceSetComputeMode(self, handle: Any, mode: int) -> None:
        minor, number = self.gpu(handle), integer(mode)
        if number not in COMPUTE_MODES.values():
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if self.machine.gpu_state(minor).mig_enabled:
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        self.machine.change(minor, lambda state: (replace(state, compute_mode=number), None))

    @simulated
    def nvmlDeviceSetMemoryLimits_v1(self, device: Any, limits: Any) -> None:
        minor, cgroup = self._limited(device, limits)
        if os.geteuid() != 0:
            raise error(pynvml.NVML_ERROR_NO_PERMISSION)
        soft, hard, cgroups = limits.softLimit, limits.hardLimit, self.machine.cgroups

        def rule(state: SimulatedGpuState) -> tuple[SimulatedGpuState, None]:
            return replace(state, limits=cgroups.with_limit(state.limits, cgroup, soft, hard)), None

        self.machine.change(minor, rule)

    @simulated
    def nvmlDeviceGetMemoryLimits_v1(self, device: Any, limits: Any) -> None:
        minor, cgroup = self._limited(device, limits)
        state, cgroups = self.machine.gpu_state(minor), self.machine.cgroups
        limits.softLimit, limits.hardLimit = cgroups.reported(state.limits, cgroup)
        limits.currentUsed = cgroups.used(state.limits, cgroup, [*state.loads.on("")], self.machine.clock())

    def _limited(self, device: Any, limits: Any) -> tuple[int, str]:
        """The minor of a GPU and the real path of a cgroup, unless the driver, the GPU or the node has no limits."""
        if not self.machine.description.limits_memory:
            raise error(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        minor = self.gpu(device)
        if self.machine.gpu_state(minor).mig_enabled:
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return minor, self.machine.cgroups.find(text(limits.nameSpace))

    @simulated
    def nvmlSystemGetDriverVersion(self) -> str:
        return self.machine.description.driver_version

    @simulated
    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        major, minor = self.machine.description.cuda_driver_version.split(".")
        return int(major) * 1000 + int(minor) * 10

    @simulated
    def nvmlDeviceGetCount(self) -> int:
        return len(self.machine.present)

    @simulated
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        present, number = self.machine.present, integer(index)
        if not 0 <= number < len(present):
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self.handle(GpuKey(present[number]))

    @simulated
    def nvmlDeviceGetHandleByUUID(self, uuid: str | bytes) -> Any:
        plain_uuid = text(uuid)
        if not _UUID.match(plain_uuid):
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        for minor in self.machine.present:
            if self.machine.uuids[minor] == plain_uuid:
                return self.handle(GpuKey(minor))
            if plain_uuid in self.machine.gpu_state(minor).mig_devices:
                return self.handle(MigKey(minor, plain_uuid))
        raise error(pynvml.NVML_ERROR_NOT_FOUND)

    @simulated
    def nvmlDeviceGetName(self, handle: Any) -> str:
        self.gpu(handle)
        return self.machine.product.name

    @simulated
    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        _, device = self._state_and_device(handle)
        return device or self.machine.uuids[self.device(handle).minor]

    @simulated
    def nvmlDeviceGetMinorNumber(self, handle: Any) -> int:
        return self.gpu(handle)

    @simulated
    def nvmlDeviceGetBrand(self, handle: Any) -> int:
        self.device(handle)
        return int(getattr(pynvml, self.machine.product.brand_constant))

    @simulated
    def nvmlDeviceGetArchitecture(self, device: Any) -> int:
        self.device(device)
        return int(getattr(pynvml, self.machine.product.architecture_constant))

    @simulated
    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> tuple[int, int]:
        self.device(handle)
        return self.machine.product.compute_capability

    @simulated
    def nvmlDeviceGetFieldValues(self, handle: Any, fieldIds: Any) -> Any:
        self.gpu(handle)
        values = (pynvml.c_nvmlFieldValue_t * len(fieldIds))()
        if not values:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        for value, wanted in zip(values, fieldIds, strict=True):
            try:
                value.fieldId, value.scopeId = wanted
            except TypeError:
                value.fieldId = wanted
            self._fill(handle, value)
        return values

    def _fill(self, handle: Any, value: Any) -> None:
        value.timestamp = time.time_ns() // 1000
        value.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
        try:
            value.value.uiVal = self._field(handle, value.fieldId)
        except pynvml.NVMLError as failure:
            value.nvmlReturn = failure.value

    def _field(self, handle: Any, field: int) -> int:
        """The field's value, or the NVMLError for its ``nvmlReturn``."""
        if not 0 < field < pynvml.NVML_FI_MAX:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if field != pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION or not self.machine.reports_recovery_action:
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return self.machine.gpu_state(self.gpu(handle)).recovery_action

    @simulated
    def nvmlDeviceGetNvLinkState(self, device: Any, link: int) -> int:
        self.nvlink(device, link)
        return int(pynvml.NVML_FEATURE_ENABLED)

    @simulated
    def nvmlDeviceGetNvLinkVersion(self, device: Any, link: int) -> int:
        self.nvlink(device, link)
        return int(_VERSIONS[self.machine.product.nvlink_generation])

    @simulated
    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Any, link: int) -> int:
        nvlink = self.nvlink(handle, link)
        kinds = (pynvml.NVML_NVLINK_DEVICE_TYPE_GPU, pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH)
        return int(kinds[nvlink.switched])

    @simulated
    def nvmlDeviceGetNvLinkRemotePciInfo(self, device: Any, link: int) -> Any:
        nvlink = self.nvlink(device, link)
        if nvlink.switches:
            return pci_info(nvlink.switches[integer(link) % len(nvlink.switches)], _NVSWITCH_DEVICE_ID)
        if nvlink.rack_switches:
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        peers = self.machine.nvlink_peers(self.gpu(device))
        return pci_info(peers[integer(link) % len(peers)].pci_bus_id, self.machine.product.pci_device_id)

    @simulated
    def nvmlDeviceGetGpuFabricInfoV(self, device: Any, gpuFabricInfo: Any) -> int:
        self.gpu(device)
        fabric = self.machine.description.fabric
        if pointer_to(ctypes.c_uint, gpuFabricInfo)[0] != pynvml.nvmlGpuFabricInfo_v2:
            raise error(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        info = pointer_to(pynvml.c_nvmlGpuFabricInfo_v2_t, gpuFabricInfo)[0]
        if fabric is None:
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        info.clusterUuid[:] = list(uuid.UUID(fabric.cluster_uuid).bytes)
        info.status, info.cliqueId = pynvml.NVML_SUCCESS, fabric.clique_id
        info.state = _FABRIC_STATES[fabric.state]
        # Captures of HGX H100 on driver 580 report no health: zero is "not supported" in every field.
        info.healthMask = _FULL_BANDWIDTH if fabric.healthy else 0
        return int(pynvml.NVML_SUCCESS)

    def nvlink(self, handle: Any, link: int) -> NvlinkDescription:
        """Return the node's NVLink description if the GPU has that link; else INVALID_ARGUMENT or NOT_SUPPORTED."""
        nvlink = self.machine.description.nvlink
        minor, number = self.gpu(handle), integer(link)
        if not 0 <= number < pynvml.NVML_NVLINK_MAX_LINKS:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if nvlink is None or not self.machine.has_nvlink(minor):
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if number >= nvlink.links:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return nvlink


def pci_info(bus_id: str, device_id: int) -> Any:
    """Return the struct of ``nvmlDeviceGetPciInfo`` for a device at ``bus_id`` (sysfs form)."""
    info = pynvml.nvmlPciInfo_t()
    domain, bus, rest = bus_id.split(":")
    info.domain, info.bus, info.device = int(domain, 16), int(bus, 16), int(rest.partition(".")[0], 16)
    info.busId = f"{domain:0>8}:{bus}:{rest}".upper()
    info.busIdLegacy = f"{domain[-4:]}:{bus}:{rest}".upper()
    info.pciDeviceId = device_id
    return info


def _process_info(process: Process, state: SimulatedGpuState) -> Any:
    info = pynvml.c_nvmlProcessInfo_v3_t()
    info.pid, info.usedGpuMemory = process.pid, process.memory
    info.gpuInstanceId, info.computeInstanceId = pynvml.NVML_GPU_INSTANCE_ID_ANY, pynvml.NVML_COMPUTE_INSTANCE_ID_ANY
    if process.device:
        instance, compute = state.mig_devices[process.device]
        info.gpuInstanceId, info.computeInstanceId = instance.id, compute.id
    return pynvml.nvmlStructToFriendlyObject(info)


# Functions of pynvml that do not call the library.
_PURE = {"nvmlExceptionClass", "nvmlStructToFriendlyObject", "nvmlFriendlyObjectToStruct"}


class SimulatedNvml(DeviceCalls, MigCalls, GpmCalls, EventCalls):
    """The pynvml functions of one simulated node: same names, arguments, structs, results and errors."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(pynvml, name):
            raise AttributeError(f"module 'pynvml' has no attribute {name!r}")
        value = getattr(pynvml, name)
        is_call = isinstance(value, FunctionType) and name.startswith(("nvml", "c_nvml"))
        return _refuse if is_call and name not in _PURE else value


_SIMULATED = frozenset(
    form for name in dir(SimulatedNvml) if name.startswith("nvml") for form in (name, plain_name(name))
)


def is_simulated(call: str) -> bool:
    """Whether the pynvml function of that name, with or without version, is simulated; "nvidia-smi" is, too."""
    return call == SMI or call in _SIMULATED


def _refuse(*_: object, **__: object) -> NoReturn:
    raise error(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
