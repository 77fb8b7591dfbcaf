"""The labels of a claim's metrics, and which processes belong to its pods."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from driver.errors import NOT_FOUND, ApiError
from driver.hardware.host_paths import HostPaths
from driver.kube.types import Claim, Consumer
from driver.model.shared_memory import GIB
from driver.model.usage import UsageReading
from kubelet_plugin.checkpoint.records import ClaimRecord
from kubelet_plugin.claims.preparer import ClaimReader

CGROUP_POD_UID = re.compile(r"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})")
"""Uid of a pod in the name of its cgroup; the systemd driver has "_" for "-" (kubelet, cgroup_manager_linux.go)."""


class ClaimLabels(NamedTuple):
    """``classes`` is the DeviceClass of each request, by ``request`` or ``request/alternative``."""

    pods: tuple[Consumer, ...]
    classes: Mapping[str, str]

    @property
    def pod(self) -> str:
        """The pod, if it is only one."""
        return self.pods[0].name if len(self.pods) == 1 else ""

    def class_of(self, requests: tuple[str, ...]) -> str:
        return next((self.classes[name] for name in requests if name in self.classes), "")


def labels_of(claim: Claim) -> ClaimLabels:
    classes = {
        request.name_of(alternative): alternative.device_class_name
        for request in claim.spec.devices.requests
        for alternative in request.alternatives
    }
    return ClaimLabels(tuple(user for user in claim.status.reserved_for if user.resource == "pods"), classes)


class ClaimsAndPods:
    """Claims by the API server, and the pods of the processes of ``machine``."""

    def __init__(self, claims: ClaimReader, machine: HostPaths) -> None:
        self._claims, self._machine = claims, machine

    def read_labels(self, record: ClaimRecord) -> ClaimLabels:
        """Read the claim of ``record``. Raises ApiError."""
        claim = self._claims.read(record.namespace, record.name, any_age=True)
        if claim.metadata.uid != record.uid:
            raise ApiError(f"claim {record}: another claim has its name now", NOT_FOUND)
        return labels_of(claim)

    def pod_of_process(self, pid: int) -> str | None:
        """The uid of the pod in whose cgroup the process is; None without one, or if the process has ended."""
        try:
            match = CGROUP_POD_UID.search(self._machine.read(f"/proc/{pid}/cgroup"))
        except (OSError, ValueError):
            return None
        return None if match is None else match[1].replace("_", "-")


def reading_of_share(
    reading: UsageReading, labels: ClaimLabels | None, pod_of_process: Callable[[int], str | None], gib: int = 0
) -> UsageReading:
    """``reading`` of a whole GPU, with memory and processes of the claim's pods only; None where they are unknown.

    ``gib``: what the claim has of a GPU that is shared by memory.
    """
    reading = replace(reading, memory_total=gib * GIB) if gib else reading
    if labels is None or reading.processes is None:
        return replace(reading, memory_used=None, processes=None)
    uids = {pod.uid for pod in labels.pods}
    mine = [process for process in reading.processes if pod_of_process(process.pid) in uids]
    used = [process.memory for process in mine if process.memory is not None]
    return replace(reading, memory_used=sum(used) if len(used) == len(mine) else None, processes=mine)
