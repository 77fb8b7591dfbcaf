"""The labels of a claim's metrics, and which processes belong to its pods."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from driver.hardware.host_paths import HostPaths
from driver.kube.types import Claim
from driver.model.usage import UsageReading

CGROUP_POD_UID = re.compile(r"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})")
"""Uid of a pod in the name of its cgroup; the systemd driver has "_" for "-" (kubelet, cgroup_manager_linux.go)."""


class PodReference(NamedTuple):
    name: str
    uid: str


class ClaimLabels(NamedTuple):
    """``classes`` is the DeviceClass of each request, by ``request`` or ``request/alternative``."""

    pods: tuple[PodReference, ...]
    classes: Mapping[str, str]

    @property
    def pod(self) -> str:
        """The pod, if it is only one."""
        return self.pods[0].name if len(self.pods) == 1 else ""

    def class_of(self, requests: tuple[str, ...]) -> str:
        return next((self.classes[name] for name in requests if name in self.classes), "")


def labels_of(claim: Claim) -> ClaimLabels:
    pods = (PodReference(user.name, user.uid) for user in claim.status.reserved_for if user.resource == "pods")
    classes: dict[str, str] = {}
    for request in claim.spec.devices.requests:
        for each in request.first_available:
            classes[f"{request.name}/{each.name}"] = each.device_class_name
        if request.exactly is not None:
            classes[request.name] = request.exactly.device_class_name
    return ClaimLabels(tuple(pods), classes)


def pod_of(paths: HostPaths, pid: int) -> str | None:
    """The uid of the pod in whose cgroup the process is; None without one, or if the process has ended."""
    try:
        found = CGROUP_POD_UID.search(paths.read(f"/proc/{pid}/cgroup"))
    except (OSError, ValueError):
        return None
    return None if found is None else found[1].replace("_", "-")


def reading_of_share(
    reading: UsageReading, labels: ClaimLabels | None, pod_of_process: Callable[[int], str | None]
) -> UsageReading:
    """``reading`` of a whole GPU, with memory and processes of the claim's pods only; None where they are unknown."""
    if labels is None or reading.processes is None:
        return replace(reading, memory_used=None, processes=None)
    uids = {pod.uid for pod in labels.pods}
    mine = [process for process in reading.processes if pod_of_process(process.pid) in uids]
    known = [process.memory for process in mine if process.memory is not None]
    return replace(reading, memory_used=sum(known) if len(known) == len(mine) else None, processes=mine)
