"""Limits on the memory that pods use of shared GPUs. Every method can be repeated; the caller holds the GPU's lock."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from driver.errors import HardwareError, RecoverableError, StateError
from driver.hardware.cgroups.memory_limits import CgroupMemoryLimits
from driver.hardware.cgroups.pod_cgroups import CGROUPS, PodCgroups
from driver.model.gpu import Gpu
from driver.model.shared_memory import GIB
from kubelet_plugin.checkpoint.records import ClaimRecord
from kubelet_plugin.step_names import NodeStep, StepRunner

log = logging.getLogger(__name__)


PodMemory = Mapping[str, int]
"""Bytes of one GPU that each pod may use, by the pod's UID."""


def memory_by_pod(gpu_uuid: str, records: Iterable[ClaimRecord]) -> dict[str, int]:
    """The bytes of a GPU that each pod may use: the sum over all its claims."""
    sums: dict[str, int] = defaultdict(int)
    for record in records:
        for entry in record.devices:
            if entry.gpu_uuid == gpu_uuid and entry.gib:
                for pod in record.pods:
                    sums[pod] += entry.gib * GIB
    return dict(sums)


class PodMemoryLimits:
    """Hard limits on the cgroups of pods, so that the containers of a pod share what its claims give it.

    Nothing is remembered: what a pod may use follows from the checkpoint, and a limit ends with its pod's cgroup.
    """

    def __init__(self, limits: CgroupMemoryLimits, cgroups: PodCgroups, steps: StepRunner) -> None:
        self._limits, self._cgroups, self._step = limits, cgroups, steps

    def unenforced(self, gpu: Gpu) -> str | None:
        """Why nothing can hold pods to their memory of a GPU; None if limits can. Raises HardwareError."""
        return self._limits.unsupported(gpu)

    def container_limit(self, gpu: Gpu, memory: int) -> int | None:
        """Bytes to which a CDI spec may limit each container's own cgroup: programs see them as the GPU's size.

        None where limits do not nest: each container could use as much as its pod; it sees the pod's limit anyway.
        """
        return memory if self._limits.is_enforced_by_kernel(gpu) else None

    def apply(self, gpu: Gpu, pods: PodMemory) -> None:
        """Hold pods to their memory of ``gpu``, before the containers of one of them start.

        That one has a cgroup; the others may have ended, or start later and are limited by ``check``. Raises
        HardwareError; StateError: no pod has a cgroup, or one has no controller of the kernel.
        """
        present = self.running(pods)
        if pods and not present:
            self._cgroups.find(min(pods))  # searches the parents of pods again
            present = self.running(pods)
        if pods and not present:
            raise StateError(
                f"limiting the memory of pod {', '.join(pods)} on {gpu.uuid}: no cgroup of this pod is below {CGROUPS} "
                "of the host, where the kubelet makes one for each pod (kubepods, kubepods.slice)"
            )
        for pod_uid, cgroup in present.items():
            self._hold(gpu, pod_uid, cgroup, pods[pod_uid])

    def check(self, gpu: Gpu, pods: PodMemory) -> tuple[dict[str, int], dict[str, RecoverableError]]:
        """Set lost limits again, as after a reload of the driver.

        Returns the bytes of ``gpu`` that each pod uses, and the error of each pod that can't be limited. Pods without a
        cgroup have ended, and are in neither.
        """
        used: dict[str, int] = {}
        failures: dict[str, RecoverableError] = {}
        for pod_uid, cgroup in self.running(pods).items():
            try:
                used[pod_uid] = self._hold(gpu, pod_uid, cgroup, pods[pod_uid])
            except RecoverableError as error:
                if cgroup.exists():
                    failures[pod_uid] = error
        return used, failures

    def lift(self, gpu: Gpu, pod_uids: Iterable[str]) -> None:
        """Remove the limits of pods that hold nothing of ``gpu`` any more. Raises HardwareError."""
        for pod_uid, cgroup in self.running(pod_uids).items():
            try:
                if self._limits.read(gpu, cgroup).limit is None:
                    continue
                with self._step(NodeStep.LIFT_MEMORY_LIMIT, gpu=gpu.uuid, podUID=pod_uid):
                    self._limits.clear(gpu, cgroup)
            except HardwareError:
                if cgroup.exists():
                    raise
            else:
                log.info("removed the limit on GPU memory", extra={"gpu": gpu.uuid, "podUID": pod_uid})

    def all_running(self) -> set[str]:
        """The UIDs of all pods that have a cgroup, whether they use a GPU or not."""
        return self._cgroups.uids()

    def running(self, pod_uids: Iterable[str]) -> dict[str, Path]:
        """The cgroups of the pods that have one."""
        paths = ((pod_uid, self._cgroups.find(pod_uid, expected=False)) for pod_uid in pod_uids)
        return {pod_uid: path for pod_uid, path in paths if path is not None}

    def _hold(self, gpu: Gpu, pod_uid: str, cgroup: Path, memory: int) -> int:
        """Set the limit of a pod unless it is in force; return the bytes that the pod uses."""
        present = self._limits.read(gpu, cgroup)
        if present.limit != memory:
            with self._step(NodeStep.SET_MEMORY_LIMIT, gpu=gpu.uuid, podUID=pod_uid):
                self._limits.set(gpu, cgroup, memory)
            log.info("limited GPU memory", extra={"gpu": gpu.uuid, "podUID": pod_uid, "memory": memory})
        return present.used
