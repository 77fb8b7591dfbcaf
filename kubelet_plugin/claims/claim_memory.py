"""What holds the claims of shared GPUs to their memory. Methods can be repeated; the caller holds the GPU's lock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from driver.errors import HardwareError, RecoverableError, StateError
from driver.hardware.cgroups.memory_limits import CgroupMemoryLimits
from driver.hardware.cgroups.pod_cgroups import PodCgroups
from driver.hardware.host import Host
from driver.model.gpu import Gpu
from driver.model.shared_memory import GIB, MemoryLimit, SharingStrategy
from kubelet_plugin.checkpoint.records import Checkpoint, ClaimRecord, DeviceRecord
from kubelet_plugin.claims.compute_modes import ComputeModes
from kubelet_plugin.claims.memory_limits import PodMemory, PodMemoryLimits, memory_by_pod
from kubelet_plugin.claims.mps_shares import MpsShares
from kubelet_plugin.claims.time_slices import TimeSlices
from kubelet_plugin.mps.client import MpsAccess, MpsClient
from kubelet_plugin.mps.protocol import DIRECTORY
from kubelet_plugin.step_names import StepRunner

log = logging.getLogger(__name__)


CONTEXT_BYTES = 1 << 29
"""What the context of a CUDA process takes of its claim's memory, before a framework allocates (about 500 MiB)."""

InContainer = tuple[int | None, float | None]
UNSAID: InContainer = (None, None)


LimitNow = tuple[MemoryLimit, str]
"""What holds claims to their memory, and why nothing is known to."""


class LimitProbe:
    """What can hold claims to their memory of a GPU, which leaves MIG mode before they are prepared.

    Asked at each scan. While NVML gives no answer, the last one counts: a prepare fails if the limit can't be set.
    """

    def __init__(self, limits: CgroupMemoryLimits) -> None:
        self._limits = limits
        self._last: dict[str, MemoryLimit] = {}
        self._silent: set[str] = set()

    def __call__(self, gpu: Gpu, strategy: SharingStrategy) -> MemoryLimit:
        is_mps = strategy is SharingStrategy.MPS
        try:
            why = self._limits.unsupported(gpu, outside_mig_mode=gpu.toggles_freely)
        except RecoverableError as error:
            if gpu.uuid not in self._silent:
                extra = {"gpu": gpu.uuid, "error": str(error)}
                log.warning("it is unknown whether GPU memory can be limited", extra=extra)
            self._silent.add(gpu.uuid)
            return self._last.get(gpu.uuid, MemoryLimit.MPS if is_mps else MemoryLimit.UNKNOWN)
        self._silent.discard(gpu.uuid)
        without_cgroup = MemoryLimit.MPS if is_mps else MemoryLimit.NONE
        self._last[gpu.uuid] = MemoryLimit.CGROUP if why is None else without_cgroup
        return self._last[gpu.uuid]


class ClaimMemory:
    """The limits of pods follow from the records alone, so a kill at any instruction leaves nothing to remember.

    The record of a claim is written before the limits of its pods are set, and removed after they are lifted.
    """

    def __init__(self, limits: PodMemoryLimits, checkpoint: Checkpoint) -> None:
        self._limits, self._checkpoint = limits, checkpoint

    def apply(self, gpu: Gpu, record: ClaimRecord) -> None:
        """Hold the pods of ``record`` to the memory that they have of ``gpu``. Raises HardwareError, StateError."""
        if MemoryLimit.CGROUP in _limits_of(gpu, record):
            memory = self.of_pods(gpu, record)
            self._limits.apply(gpu, {pod: memory[pod] for pod in record.pods if pod in memory})

    def release(self, gpu: Gpu, record: ClaimRecord) -> None:
        """Hold the pods of ``record`` to what they have of ``gpu`` without it. Raises HardwareError, StateError."""
        if _limits_of(gpu, record).isdisjoint({MemoryLimit.CGROUP, MemoryLimit.UNKNOWN}):
            return
        others = memory_by_pod(gpu.uuid, self._records(record.uid))
        try:
            _, failures = self._limits.check(gpu, {pod: others[pod] for pod in record.pods if pod in others})
            for failure in failures.values():
                raise failure
            self._limits.lift(gpu, [pod for pod in record.pods if pod not in others])
        except HardwareError as error:
            unenforced = self._limits.unenforced(gpu)
            if unenforced is None:
                raise
            # Another driver or MIG mode since the prepare has ended all limits.
            log.warning("no limits to remove", extra={"gpu": gpu.uuid, "why": unenforced, "error": str(error)})

    def check(self, gpu: Gpu) -> tuple[dict[str, int], dict[str, LimitNow]]:
        """Set lost limits again, and those of claims that could not be limited before.

        Returns the bytes of ``gpu`` that each pod uses, and for pods without a limit what is known of them.
        """
        used, failures = self._limits.check(gpu, self.of_pods(gpu))
        unlimited = {
            # Of a cgroup without the kernel's controller it is known that it has no limit.
            pod: (MemoryLimit.NONE if isinstance(error, StateError) else MemoryLimit.UNKNOWN, str(error))
            for pod, error in failures.items()
        }
        return used, unlimited

    def running(self) -> set[str]:
        """The UIDs of all pods that have a cgroup, whether they use a GPU or not."""
        return self._limits.all_running()

    def limit_now(self, gpu: Gpu) -> LimitNow:
        """CGROUP if pods can be held to their memory of ``gpu`` as it is now, else NONE or UNKNOWN."""
        try:
            why = self._limits.unenforced(gpu)
        except RecoverableError as error:
            return MemoryLimit.UNKNOWN, str(error)
        return (MemoryLimit.CGROUP, "") if why is None else (MemoryLimit.NONE, why)

    def in_container(self, gpu: Gpu, entry: DeviceRecord, record: ClaimRecord) -> InContainer:
        """What the CDI spec of a claim says of its part of ``gpu``: the bytes to which each container's own cgroup is
        limited, and the fraction of the GPU that frameworks may take. None: it does not say that.

        Neither where containers see the limit as the GPU's size, nor for a pod with several claims of shared GPUs: a
        container has one value of each variable.
        """
        is_limited = entry.limit is MemoryLimit.CGROUP
        limit = self._limits.container_limit(gpu, entry.gib * GIB) if is_limited else None
        if (is_limited and limit is None) or self.claims_of_same_pods(record):
            return UNSAID
        return limit, (entry.gib * GIB - CONTEXT_BYTES) / (gpu.memory_bytes - gpu.memory_reserved)

    def claims_of_same_pods(self, record: ClaimRecord) -> list[str]:
        """The UIDs of other claims of shared GPUs that a pod of ``record`` uses, as far as they are recorded."""
        pods, records = set(record.pods), self._records(record.uid)
        return [other.uid for other in records if not pods.isdisjoint(other.pods)]

    def of_pods(self, gpu: Gpu, record: ClaimRecord | None = None) -> PodMemory:
        """Bytes of ``gpu`` that each pod may use, with ``record`` as it is and not as it is stored."""
        records = self._records(record.uid if record else "")
        return memory_by_pod(gpu.uuid, [*records, record] if record else records)

    def _records(self, without: str) -> list[ClaimRecord]:
        return [r for r in self._checkpoint.records() if r.uid != without and not r.releasing]


def _limits_of(gpu: Gpu, record: ClaimRecord) -> set[MemoryLimit]:
    """What holds a claim to its memory of ``gpu``, by its record."""
    return {entry.limit for entry in record.devices if entry.gpu_uuid == gpu.uuid}


@dataclass(frozen=True, slots=True)
class GpuSettingsOfClaims:
    """What claims change on a GPU that they share, besides its partitions."""

    time_slices: TimeSlices
    memory: ClaimMemory
    mps: MpsShares

    @classmethod
    def of(
        cls, host: Host, checkpoint: Checkpoint, steps: StepRunner, mps_directory: Path = Path(DIRECTORY)
    ) -> GpuSettingsOfClaims:
        """``checkpoint`` has the records of all claims; ``mps_directory`` the socket of the MPS daemons' process."""
        limits = PodMemoryLimits(host.memory_limits, PodCgroups(host.paths), steps)
        client = MpsClient(mps_directory, host.driver_root, needs_library=not host.simulated)
        mps = MpsShares(ComputeModes(host), client, checkpoint, steps)
        return cls(TimeSlices(host, checkpoint, steps), ClaimMemory(limits, checkpoint), mps)

    def apply(self, gpu: Gpu, record: ClaimRecord) -> Mapping[str, MpsAccess]:
        """Set on ``gpu`` what ``record`` needs; returns what containers get of MPS, by key of the device.

        Raises HardwareError, MpsError, StateError.
        """
        self.time_slices.apply(gpu, record)
        self.memory.apply(gpu, record)
        return self.mps.apply(gpu, record)

    @property
    def releases(self) -> Sequence[Callable[[Gpu, ClaimRecord], None]]:
        """What sets a GPU as it is without a claim: to be called in this order, each even if another fails.

        They raise HardwareError, StateError.
        """
        return self.mps.release, self.memory.release, self.time_slices.release
