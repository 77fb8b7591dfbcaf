"""Limits on the GPU memory that the processes of a cgroup use, through NVML (driver R615 and newer).

Sources: NVIDIA's MPS manual, "MPS v3 Memory Partitioning" (release 615), and nvml.h. The kernel enforces them where its
controller dmem accounts for the GPU (limits nest), else the driver (misc: the nearest limited ancestor counts). Only
hard limits are set: a soft limit above 0 is added to all ancestors, and stays there when the cgroup is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from driver.errors import HardwareError, StateError
from driver.hardware.cgroups.pod_cgroups import CGROUPS
from driver.hardware.host_paths import HOST, HostPaths
from driver.hardware.nvml_errors import ABSENT, nvml_call, refused
from driver.model.gpu import Gpu

NO_LIMIT = int(pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX)

CAPACITY = f"{CGROUPS}/dmem.capacity"
"""Has a line nvidia/<PCI address>/... for each GPU whose memory the kernel accounts for."""


UNLIMITED_ROOT = frozenset({pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT})
"""What a driver with limits may say of the root cgroup, which can't have any."""


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """Bytes of a GPU's memory that a cgroup's processes may use, None without a limit; and the bytes that they use."""

    limit: int | None
    used: int


class CgroupMemoryLimits:
    """The limits of cgroups on one node's GPUs. A cgroup is the path of its directory as this process sees it.

    Methods raise HardwareError with NVML's code, and StateError for a cgroup that lacks the kernel's controller.
    """

    def __init__(self, nvml: Any, paths: HostPaths, handle: Callable[[Gpu], Any]) -> None:
        """``handle``: NVML's handle of a GPU."""
        self._nvml, self._paths, self._handle = nvml, paths, handle

    def unsupported(self, gpu: Gpu, *, outside_mig: bool = False) -> str | None:
        """Why no limit can be set on a GPU; None if it can. ``outside_mig``: once it has left MIG mode."""
        code = pynvml.NVML_SUCCESS
        try:
            self._read(gpu, self._paths.here(CGROUPS))
        except pynvml.NVMLError as error:
            code = error.value
            if code not in ABSENT | UNLIMITED_ROOT:
                raise refused(f"reading the memory limits of {gpu.uuid}", error) from error
        if code == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            return f"driver {gpu.driver_version} can't limit GPU memory by cgroup; 615 and newer can"
        if not self._paths.has(f"{CGROUPS}/cgroup.controllers"):
            return (
                f"{self._paths.here(CGROUPS)} is not cgroup v2, which limits on GPU memory need: boot the node with "
                "systemd.unified_cgroup_hierarchy=1"
            )
        if code == pynvml.NVML_ERROR_NOT_SUPPORTED and not (outside_mig and gpu.mig_mode.in_force):
            is_mig = " in MIG mode" if gpu.mig_mode.in_force else ""
            return f"the driver does not limit the memory of {gpu.uuid}{is_mig} by cgroup"
        return None

    def is_enforced_by_kernel(self, gpu: Gpu) -> bool:
        """Whether limits nest: the kernel's controller dmem enforces them. With the driver's own they do not."""
        try:
            lines = self._paths.read(CAPACITY).lower().splitlines()
        except OSError:
            return False
        address = gpu.pci_bus_id.partition(".")[0].lower()
        return any(line.startswith("nvidia/") and address in line for line in lines)

    def read(self, gpu: Gpu, cgroup: Path) -> CgroupMemory:
        """The limit of a cgroup and what its processes use."""
        with nvml_call(f"reading the memory limit of {cgroup} on {gpu.uuid}"):
            limits = self._read(gpu, cgroup)
        hard = int(limits.hardLimit)
        return CgroupMemory(None if hard == NO_LIMIT else hard, int(limits.currentUsed))

    def set(self, gpu: Gpu, cgroup: Path, memory: int) -> None:
        """Limit the processes of a cgroup and below it to ``memory`` bytes together."""
        self._set(gpu, cgroup, memory)

    def clear(self, gpu: Gpu, cgroup: Path) -> None:
        self._set(gpu, cgroup, NO_LIMIT)

    @contextmanager
    def trial_cgroup(self) -> Iterator[Path]:
        """A cgroup without processes for the block. A kill leaves it there, and the next trial removes it."""
        cgroup = self._paths.here(f"{CGROUPS}/tessera-trial")
        try:
            cgroup.mkdir(exist_ok=True)
        except OSError as error:
            raise HardwareError(f"{cgroup} can't be created for the trial: {error.strerror}") from error
        try:
            yield cgroup
        finally:
            cgroup.rmdir()

    def _set(self, gpu: Gpu, cgroup: Path, hard: int) -> None:
        limits = pynvml.c_nvmlSetMemoryLimits_v1_t()
        limits.nameSpace, limits.softLimit, limits.hardLimit = self._name(cgroup), 0, hard
        try:
            self._nvml.nvmlDeviceSetMemoryLimits_v1(self._handle(gpu), limits)
        except pynvml.NVMLError as error:
            failure = refused(f"setting the memory limit of {cgroup} on {gpu.uuid}", error)
            if error.value == pynvml.NVML_ERROR_NOT_FOUND and cgroup.is_dir():
                missing = "the cgroup has no dmem.max: write +dmem to cgroup.subtree_control of each cgroup above it"
                raise StateError(f"{failure}; {missing}") from error
            raise failure from error

    def _read(self, gpu: Gpu, cgroup: Path) -> Any:
        """Raises NVMLError."""
        limits = pynvml.c_nvmlGetMemoryLimits_v1_t()
        limits.nameSpace = self._name(cgroup)
        self._nvml.nvmlDeviceGetMemoryLimits_v1(self._handle(gpu), limits)
        return limits

    def _name(self, cgroup: Path) -> bytes:
        """The path for NVML: below /sys/fs/cgroup, where it expects cgroups, if this process sees the same there."""
        usual = HOST / cgroup.relative_to(self._paths.root)
        try:
            return bytes(usual if usual.samefile(cgroup) else cgroup)
        except OSError:
            return bytes(cgroup)
