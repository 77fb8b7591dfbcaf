"""Simulated NVML: the system, finding devices, and what a device is."""

# ruff: noqa: N802, N803
from __future__ import annotations

import re
from typing import Any

import pynvml

from .nvml_arguments import error, integer, text
from .nvml_keys import GpuKey, MigKey
from .nvml_session import NvmlSession, simulated

_ARCHITECTURES = {
    "Volta": pynvml.NVML_DEVICE_ARCH_VOLTA,
    "Turing": pynvml.NVML_DEVICE_ARCH_TURING,
    "Ampere": pynvml.NVML_DEVICE_ARCH_AMPERE,
    "Ada Lovelace": pynvml.NVML_DEVICE_ARCH_ADA,
    "Ada": pynvml.NVML_DEVICE_ARCH_ADA,
    "Hopper": pynvml.NVML_DEVICE_ARCH_HOPPER,
    "Blackwell": pynvml.NVML_DEVICE_ARCH_BLACKWELL,
}
_BUS_ID = re.compile(r"^(?:(?P<domain>[0-9a-f]{1,8}):)?(?P<rest>[0-9a-f]{2}:[0-9a-f]{2})(?:\.(?P<fn>[0-7]))?$")
_UUID = re.compile(r"^(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")

# nvmlErrorString, as the library words them.
_MESSAGES = {
    pynvml.NVML_SUCCESS: "Success",
    pynvml.NVML_ERROR_IN_USE: "In use by another client",
    pynvml.NVML_ERROR_NO_DATA: "No data",
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: "Insufficient Resources",
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: "Argument version mismatch",
}


def full_bus_id(bus_id: str) -> str:
    """NVML's spelling: eight digits of domain, upper case, as ``00000000:1B:00.0``."""
    domain, _, rest = bus_id.partition(":")
    return f"{domain:0>8}:{rest}".upper()


class SystemCalls(NvmlSession):
    """``nvmlSystem*``, ``nvmlDeviceGetHandle*`` and identity."""

    def nvmlErrorString(self, result: int) -> str:
        code = integer(result)
        known: dict[int, str] = pynvml.NVMLError._errcode_to_string  # noqa: SLF001 - the only list of messages
        return _MESSAGES.get(code) or known.get(code) or "Unknown Error"

    @simulated()
    def nvmlSystemGetDriverVersion(self) -> str:
        return self.machine.description.driver_version

    @simulated()
    def nvmlSystemGetNVMLVersion(self) -> str:
        major = self.machine.description.cuda_driver_version.partition(".")[0]
        return f"{major}.{self.machine.description.driver_version}"

    @simulated()
    def nvmlSystemGetCudaDriverVersion(self) -> int:
        major, minor = self.machine.description.cuda_driver_version.split(".")
        return int(major) * 1000 + int(minor) * 10

    @simulated()
    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return self.nvmlSystemGetCudaDriverVersion()

    @simulated()
    def nvmlDeviceGetCount(self) -> int:
        return len(self.machine.present)

    @simulated()
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        present, wanted = self.machine.present, integer(index)
        if not 0 <= wanted < len(present):
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self.handle(GpuKey(present[wanted]))

    @simulated()
    def nvmlDeviceGetHandleByUUID(self, uuid: str | bytes) -> Any:
        wanted = text(uuid)
        if not _UUID.match(wanted):
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        for minor in self.machine.present:
            if self.machine.uuid(minor) == wanted:
                return self.handle(GpuKey(minor))
            instances = self.machine.state(minor).instances
            if any(compute.uuid == wanted for instance in instances for compute in instance.compute):
                return self.handle(MigKey(minor, wanted))
        raise error(pynvml.NVML_ERROR_NOT_FOUND)

    @simulated()
    def nvmlDeviceGetHandleByPciBusId(self, pciBusId: str | bytes) -> Any:
        match = _BUS_ID.match(text(pciBusId).lower())
        if match is None:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        wanted = full_bus_id(f"{match['domain'] or '0'}:{match['rest']}.{match['fn'] or '0'}")
        for minor in self.machine.present:
            if full_bus_id(self.machine.gpus[minor].pci_bus_id) == wanted:
                return self.handle(GpuKey(minor))
        raise error(pynvml.NVML_ERROR_NOT_FOUND)

    @simulated()
    def nvmlDeviceGetName(self, handle: Any) -> str:
        if isinstance(self.device(handle), GpuKey):
            return self.machine.product.name
        profile = self.machine.product.by_id[self.mig_device(handle).instance.profile]
        return f"{self.machine.product.name} MIG {profile.name}"

    @simulated()
    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        key = self.device(handle)
        return self.machine.uuid(key.minor) if isinstance(key, GpuKey) else self.mig_device(handle).compute.uuid

    @simulated()
    def nvmlDeviceGetMinorNumber(self, handle: Any) -> int:
        return self.gpu(handle)

    @simulated()
    def nvmlDeviceGetIndex(self, handle: Any) -> int:
        key = self.device(handle)
        if isinstance(key, GpuKey):
            return self.machine.present.index(key.minor)
        return self.mig_device(handle).compute.index

    @simulated()
    def nvmlDeviceGetBrand(self, handle: Any) -> int:
        self.device(handle)
        brand: int = getattr(pynvml, f"NVML_BRAND_{self.machine.product.brand}")
        return brand

    @simulated()
    def nvmlDeviceGetArchitecture(self, device: Any) -> int:
        self.device(device)
        architecture: int = _ARCHITECTURES[self.machine.product.architecture]
        return architecture

    @simulated()
    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> tuple[int, int]:
        self.device(handle)
        return self.machine.product.compute_capability
