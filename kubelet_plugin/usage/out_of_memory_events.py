"""Events about containers that failed while the memory of their partition was full."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec

from driver.clock import Clock, seconds_time
from driver.errors import ApiError
from driver.kube.client import KubeClient
from driver.kube.get_and_list import read_object
from driver.kube.types import PodDetails, Terminated
from driver.model.gpu import Gpu
from driver.model.shared_memory import GIB
from driver.model.usage import UsageReading
from kubelet_plugin.checkpoint.records import DeviceRecord
from kubelet_plugin.inventory.inventory import Inventory
from kubelet_plugin.status.events import EventReason, PluginEvents
from kubelet_plugin.usage.sampler import Key, MeasuredDevice

log = logging.getLogger(__name__)

SUSPECT_SECONDS = 30.0
"""How long to look for a failed container after processes of a full partition have ended: the kubelet writes the pod's
status later."""

POD_CHECK_INTERVAL_SECONDS = 2.0

LARGER = 3
"""Number of larger profiles that an Event names."""

POD_DECODER = msgspec.json.Decoder(PodDetails)


@dataclass(frozen=True, slots=True)
class _Suspect:
    """A device whose processes have ended while it was full. ``full`` is the last reading before."""

    usage: MeasuredDevice
    full: UsageReading
    since: str
    until: float


class PodReader:
    """Reads pods from the API server."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    def read(self, namespace: str, name: str) -> PodDetails:
        """Read a pod; a cached answer is sufficient. Raises ApiError."""
        return read_object(self._client, f"/api/v1/namespaces/{namespace}/pods/{name}", POD_DECODER, any_age=True)


class FullPartitions:
    """Records an Event on a claim and its pods when a container failed while the claim's partition was full."""

    def __init__(self, pods: PodReader, events: PluginEvents, inventory: Inventory, clock: Clock) -> None:
        self._pods, self._events, self._inventory, self._clock = pods, events, inventory, clock
        self._full: dict[Key, tuple[UsageReading, datetime]] = {}
        self._suspects: dict[Key, _Suspect] = {}

    def check(self, devices: Mapping[Key, MeasuredDevice]) -> float | None:
        """Handle the devices of one round. Returns the seconds until the next check; None: none is needed."""
        now, today = self._clock.monotonic(), self._clock.now()
        for key, (full, at) in list(self._full.items()):
            usage = devices.get(key)
            if usage is None or _changed(full, usage.reading):
                del self._full[key]
            if usage is not None and _changed(full, usage.reading):
                self._suspects[key] = _Suspect(usage, full, seconds_time(at), now + SUSPECT_SECONDS)
        for key, usage in devices.items():
            if usage.reading is not None and usage.reading.full and usage.labels is not None:
                self._full[key] = (usage.reading, today)
        for key, suspect in list(self._suspects.items()):
            if self._has_failed(suspect) or now > suspect.until:
                del self._suspects[key]
        return POD_CHECK_INTERVAL_SECONDS if self._suspects else None

    def _has_failed(self, suspect: _Suspect) -> bool:
        """Report the failed containers of the claim's pods; whether there are any."""
        has_failed, usage = False, suspect.usage
        for pod in usage.labels.pods if usage.labels is not None else ():
            try:
                failures = list(self._pods.read(usage.record.namespace, pod.name).failures(suspect.since))
            except ApiError as error:
                log.debug("pod of a full partition was not read", extra={"pod": pod.name, "error": str(error)})
                continue
            for container, end in failures:
                has_failed = True
                message = self._message(suspect, container, end)
                self._events.claim(usage.record.reference, EventReason.PARTITION_FULL, message)
        return has_failed

    def _message(self, suspect: _Suspect, container: str, end: Terminated) -> str:
        device, full = suspect.usage.device, suspect.full
        used, total = ((number or 0) / GIB for number in (full.memory_used, full.memory_total))
        what = f"partition {device.profile}" if device.profile else f"GPU {device.device}"
        gpu = self._inventory.gpu(device.gpu_uuid)
        larger = larger_profiles(gpu, device) if gpu is not None else []
        advice = f"next larger profiles: {', '.join(larger)}" if larger else "no profile of this GPU is larger"
        if device.gib:
            what, advice = f"the claim's part of {device.device}", "request more memory of it"
        ended = f"when container {container} ended with code {end.exit_code}"
        return f"{what} was full ({used:.3g} of {total:.3g} GiB) {ended}; {advice}"


def _changed(full: UsageReading, now: UsageReading | None) -> bool:
    """Whether processes have ended since the reading ``full``, or may have."""
    if now is None or not now.full or full.processes is None or now.processes is None:
        return now is None or not now.full
    return not {process.pid for process in full.processes} <= {process.pid for process in now.processes}


def larger_profiles(gpu: Gpu, device: DeviceRecord) -> Sequence[str]:
    """The next profiles with more memory than a partition, smallest first."""
    current = gpu.profile_with_id(device.profile_id) if device.profile_id is not None else None
    if current is None:
        return []
    plain = (profile for profile in gpu.profiles if not set("+-") & set(profile.name))
    larger = [profile for profile in plain if profile.memory_bytes > current.memory_bytes]
    larger.sort(key=lambda profile: (profile.memory_bytes, profile.compute_slices))
    return [profile.name for profile in larger[:LARGER]]
