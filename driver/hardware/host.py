"""What the node plugin asks of a node's hardware, and nothing more."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol

from driver.model.gpu import Gpu, Partition, Placement, Profile
from driver.model.health import GpuEvent
from driver.model.sharing import TimeSlice


@dataclass(frozen=True, slots=True)
class GpuFault:
    """A GPU that discovery had to leave out, and why."""

    index: int
    reason: str

    def __str__(self) -> str:
        return f"GPU index {self.index}"


@dataclass(frozen=True, slots=True)
class Discovery:
    """Every GPU that answered, by index, and those that did not."""

    gpus: tuple[Gpu, ...]
    faults: tuple[GpuFault, ...]


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A character device for a container.

    ``path`` is the path inside the container. ``host_path`` is where the runtime finds the node; it is
    None for a node that need not exist on the host, and then ``major`` and ``minor`` are set.
    """

    path: str
    host_path: str | None = None
    major: int | None = None
    minor: int | None = None


class ComputeMode(IntEnum):
    """How many processes may use a GPU, by NVML's numbers (``nvmlComputeMode_t``); only DEFAULT lets several."""

    DEFAULT = 0
    EXCLUSIVE_THREAD = 1
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3


class Host(Protocol):
    """A node with GPUs. Every method raises HardwareError; none keeps a lock between calls.

    Callers serialise the methods that change a GPU (the ones that return a Partition or None) for each
    GPU; different GPUs may be used from different threads at once.
    """

    def discover(self) -> Discovery:
        """Ask every GPU what it is. One that fails is reported; the others are unaffected."""
        ...

    def partitions(self, gpu: Gpu) -> Sequence[Partition]:
        """All MIG instances that exist on ``gpu``, whoever made them; empty with MIG mode off."""
        ...

    def find_partition(self, gpu: Gpu, profile: Profile, placement: Placement) -> Partition | None:
        """The instance of ``profile`` at exactly ``placement``, complete or not."""
        ...

    def mig_enabled(self, gpu: Gpu) -> bool:
        """Whether MIG mode is in force now."""
        ...

    def set_mig_mode(self, gpu: Gpu, *, enabled: bool) -> None:
        """Switch MIG mode; returns only once it is in force, else raises (in use, reset required)."""
        ...

    def request_mig_mode(self, gpu: Gpu, *, enabled: bool) -> bool:
        """Ask for MIG mode; False where it comes into force only with a reset of the GPU."""
        ...

    def compute_mode(self, gpu: Gpu) -> ComputeMode:
        """Whether several processes may use ``gpu``. An administrator sets it; a reboot sets it to DEFAULT."""
        ...

    def processes(self, gpu: Gpu) -> int:
        """How many compute processes run on ``gpu`` itself; those on its partitions are not counted."""
        ...

    def set_time_slice(self, gpu: Gpu, interval: TimeSlice) -> None:
        """How long each process on ``gpu`` runs before the next; a GPU reset and a reboot set it to DEFAULT.

        Without effect on partitions. Not every product has it (before Volta: NOT_SUPPORTED), so that nobody
        should set DEFAULT on a GPU that has it already.
        """
        ...

    def wait_for_event(self, timeout_s: float) -> GpuEvent | None:
        """Wait for news from the hardware; None when none came in time. For one thread.

        None is lost between two calls; one may be told twice.
        """
        ...

    def recovery_action(self, gpu: Gpu) -> int | None:
        """What NVML says ``gpu`` needs to recover, by its numbers (0: nothing); None where the driver can't tell."""
        ...

    def create_gpu_instance(self, gpu: Gpu, profile: Profile, placement: Placement) -> Partition:
        """Cut the GPU instance at exactly ``placement``; the result has no compute instance yet."""
        ...

    def create_compute_instance(self, gpu: Gpu, partition: Partition) -> Partition:
        """Give ``partition`` the one compute instance that spans it; the result is complete."""
        ...

    def destroy_compute_instance(self, gpu: Gpu, partition: Partition) -> None:
        """Remove the compute instance; one that is gone already is no error."""
        ...

    def destroy_gpu_instance(self, gpu: Gpu, partition: Partition) -> None:
        """Remove the GPU instance; one that is gone already is no error."""
        ...

    def gpu_nodes(self, gpu: Gpu) -> Sequence[DeviceNode]:
        """The device nodes a container needs to use ``gpu``, the control nodes included."""
        ...

    def partition_nodes(self, gpu: Gpu, partition: Partition) -> Sequence[DeviceNode]:
        """What a container needs to use ``partition``: the GPU's nodes plus both capability nodes."""
        ...


@dataclass(frozen=True, slots=True)
class HostPaths:
    """Where the host's files are.

    ``root`` is where this process sees the host's root directory. ``runtime_root`` is what the container
    runtime has to put in front of the same path: "/" for a real host, the simulated node's directory else.
    """

    root: Path
    runtime_root: Path

    def here(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def for_runtime(self, path: str) -> str:
        return _joined(self.runtime_root, path)

    def has(self, path: str) -> bool:
        """Whether it is there."""
        return os.access(_joined(self.root, path), os.F_OK)

    def read(self, path: str) -> str:
        """What is in the file. Raises OSError."""
        with open(_joined(self.root, path), encoding="utf-8") as file:  # noqa: PTH123
            return file.read()


def _joined(root: Path, path: str) -> str:
    """As a string: ten of them in every prepare, and a Path costs more than to look at what is there."""
    return os.path.join(root, path.lstrip("/"))  # noqa: PTH118
