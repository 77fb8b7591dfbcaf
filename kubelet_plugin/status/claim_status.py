"""The entries of prepared claims' ``status.devices``, written after the answer to the kubelet.

Fields of ``data`` in an entry, for people and tools; the scheduler ignores them:

    uuid        of the GPU; of the MIG device if the device is a partition
    parentUUID  of the GPU, for partitions and shares
    sharing     for shares: {shares, inUse, timeSlice}: number of shares of the GPU, number of shares that
                prepared claims hold now, and the time-slice interval in force
    memory      for parts of shared devices: {request, limit, strategy}: the claim's memory, what holds it to
                that, and how claims share the compute of the GPU
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from driver.clock import seconds_time
from driver.errors import CONFLICT, FORBIDDEN, INVALID, NOT_FOUND, ApiError, RecoverableError
from driver.kube.client import OBJECT, KubeClient, Object
from driver.kube.get_and_list import RESOURCE_GROUP, read_object
from driver.kube.tolerant_json import decode
from driver.kube.types import Claim, ClaimStatus, Consumer, Metadata, ReportedDevice
from driver.kube.work_loop import Backoff, GiveWay, Loop, at_once
from driver.model.gpu_settings import TimeSlice, time_slice_in_force
from driver.model.offer import DeviceKind, compute_instances
from driver.model.shared_memory import MemoryLimit, SharingStrategy
from driver.placement.occupancy import PARTITION_KINDS
from kubelet_plugin.checkpoint.records import ClaimRecord, DeviceRecord, device_key
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.status.events import EventReason, PluginEvents
from kubelet_plugin.step_names import NodeStep, StepRunner

log = logging.getLogger(__name__)

READY_CONDITION = "Ready"
PREPARED_REASON = "Prepared"
UNHEALTHY_REASON = "Unhealthy"
UNHEALTHY_WAY_OUT = "its programs may fail: if they do, delete the pod, so that its next one gets another device"
CONDITION_MESSAGE_LIMIT = 32768
"""Maximum length of a condition's message (``metav1.Condition``)."""

CLAIM_STATUS_COALESCE_SECONDS = 0.25
"""Time to collect changes: a share that is prepared or released changes the status of every claim on its GPU."""

FORBIDDEN_RETRY_SECONDS = (5.0, 300.0)
"""First and longest retry delay if RBAC forbids the write: an API server that has just started may forbid it briefly;
afterwards an operator has to change a role."""

DRIVER_PERMISSION = "resourceclaims/driver"
"""If it is missing, the answer is 422 with this text (Kubernetes 1.36 and newer), not 403 as for other permissions."""

BYTES_DIFFER = "field cannot be modified once set"
WHY_BYTES = (
    "its opaque parameters are JSON with blanks or with keys in another order than kubectl writes, and the API "
    "server (seen on 1.37.1) takes its own reformatting of them for a change of the allocation"
)

ROLE = (
    "resourceclaims/status: patch; from Kubernetes 1.36 also resourceclaims/driver: associated-node:patch for "
    "resourceNames [%s], with a token that names the node (a pod's own does)"
)


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """An entry of ``status.devices`` without driver and time; an equal one is not written again.

    ``ready``: whether the device can be used; otherwise ``message`` is the reason.
    """

    pool: str
    device: str
    message: str
    data: Mapping[str, Any]
    ready: bool = True
    share_id: str = ""

    @property
    def key(self) -> str:
        """The device among those of the claim, which may have several parts of a shared one."""
        return device_key(self.device, self.share_id)


HELD_BY = {
    MemoryLimit.CGROUP: "the driver holds its programs to that",
    MemoryLimit.MPS: "the MPS server holds each of its programs to that",
    MemoryLimit.NONE: "nothing holds its programs to that at run time",
    MemoryLimit.UNKNOWN: "it is unknown whether anything holds its programs to that at run time",
}
SHARES_MEMORY = "whose memory its claims share: nothing holds its programs to a part of that"
NOT_ISOLATED = "; MPS does not isolate: an illegal address in a program of one claim ends the programs of all claims"

Statuses = Mapping[ClaimReference, Sequence[DeviceStatus]]


def device_statuses(
    records: Iterable[ClaimRecord], unhealthy_reason: Callable[[str], str | None] = lambda _: None
) -> Statuses:
    """The device status of each prepared claim, from all checkpoint records of the node and the health of devices."""
    prepared = (record for record in records if record.phase == "prepared" and record.adopted is None)
    devices = [(record.reference, device) for record in prepared for device in record.devices]
    requested: dict[str, list[TimeSlice | None]] = defaultdict(list)
    for _, device in devices:
        if device.kind is DeviceKind.SHARE:
            requested[device.gpu_uuid].append(device.time_slice)
    statuses: dict[ClaimReference, list[DeviceStatus]] = defaultdict(list)
    for claim, device in devices:
        status = _status(device, requested[device.gpu_uuid])
        reason = unhealthy_reason(device.device)
        statuses[claim].append(status if reason is None else replace(status, message=reason, ready=False))
    return statuses


def _status(device: DeviceRecord, requested: Sequence[TimeSlice | None]) -> DeviceStatus:
    """``requested``: the time-slice interval that each prepared share of the GPU requests."""
    data: Object = {"uuid": device.uuid or device.gpu_uuid}
    message = "the whole GPU"
    if device.kind is not DeviceKind.FULL:
        data["parentUUID"] = device.gpu_uuid
    if device.kind in PARTITION_KINDS:
        message = "a partition of the GPU, isolated by hardware"
        if device.kind is DeviceKind.SHARED_PARTITION:
            instances = compute_instances(device.profile)
            message = f"one of {instances} compute instances of a partition of the GPU, {SHARES_MEMORY}"
        if device.gpu_instance_id is not None and device.compute_instance_id is not None:
            data |= {"gpuInstanceID": device.gpu_instance_id, "computeInstanceID": device.compute_instance_id}
    elif device.kind is DeviceKind.SHARE:
        data["sharing"] = {
            "shares": device.shares,
            "inUse": len(requested),
            "timeSlice": str(time_slice_in_force(requested)),
        }
        message = f"one of {device.shares} time-sliced shares of the GPU, not isolated from the others"
    elif device.kind is DeviceKind.SHARED:
        data["memory"] = {"request": f"{device.gib}Gi", "limit": device.limit, "strategy": device.strategy}
        message = f"{device.gib} GiB of the GPU, shared by {device.strategy}; {HELD_BY[device.limit]}"
        message += f": {device.why_not_limited}" if device.why_not_limited else ""
        message += NOT_ISOLATED if device.strategy is SharingStrategy.MPS else ""
    return DeviceStatus(device.pool, device.device, message, data, share_id=device.share_id)


def status_path(claim: ClaimReference) -> str:
    return f"{RESOURCE_GROUP}/namespaces/{claim.namespace}/resourceclaims/{claim.name}/status"


def apply_body(claim: ClaimReference, driver: str, devices: Sequence[DeviceStatus], since: Mapping[str, str]) -> Object:
    """The body to apply to ``status_path``; the uid protects a later claim of the same name.

    ``since``: the time of the last transition of each device.
    """
    return {
        "apiVersion": RESOURCE_GROUP.removeprefix("/apis/"),
        "kind": "ResourceClaim",
        "metadata": {"namespace": claim.namespace, "name": claim.name, "uid": claim.uid},
        "status": {"devices": [_entry(driver, device, since[device.key]) for device in devices]},
    }


def _entry(driver: str, device: DeviceStatus, since: str) -> Object:
    condition = {
        "type": READY_CONDITION,
        "status": "True" if device.ready else "False",
        "reason": PREPARED_REASON if device.ready else UNHEALTHY_REASON,
        "message": device.message[:CONDITION_MESSAGE_LIMIT],
        "lastTransitionTime": since,
    }
    identity = {"driver": driver, "pool": device.pool, "device": device.device}
    if device.share_id:
        identity["shareID"] = device.share_id
    return {**identity, "conditions": [condition], "data": dict(device.data)}


class StoredClaim(msgspec.Struct, frozen=True):
    """The status of a claim at the API server."""

    class Status(msgspec.Struct, frozen=True):
        """``devices`` stay undecoded: entries of other drivers may contain anything."""

        allocation: msgspec.Raw = msgspec.Raw(b"null")
        reserved_for: tuple[Consumer, ...] = msgspec.field(default=(), name="reservedFor")
        devices: tuple[msgspec.Raw, ...] = ()

    metadata: Metadata
    status: Status = Status()

    @property
    def allocated(self) -> bool:
        return bytes(self.status.allocation) != b"null"

    def entries(self, driver: str) -> list[Object]:
        """The entries of ``status.devices`` of ``driver``."""
        return [
            decode(entry, OBJECT) for entry in self.status.devices if decode(entry, REPORTED_DEVICE).driver == driver
        ]


STORED_CLAIM, REPORTED_DEVICE = msgspec.json.Decoder(StoredClaim), msgspec.json.Decoder(ReportedDevice)


def unchanged_since(entries: Iterable[Object], devices: Iterable[DeviceStatus]) -> dict[str, str]:
    """The transition time in ``entries`` of each device whose readiness is as in ``devices``."""
    stored = {
        (entry.get("device"), entry.get("shareID", ""), condition.get("status")): condition["lastTransitionTime"]
        for entry in entries
        for condition in entry.get("conditions") or ()
        if condition.get("type") == READY_CONDITION
    }
    since = {s.key: stored.get((s.device, s.share_id, "True" if s.ready else "False")) for s in devices}
    return {key: time for key, time in since.items() if time is not None}


def newly_unhealthy(devices: Iterable[DeviceStatus], before: Iterable[DeviceStatus]) -> list[str]:
    """A message for each device that has become unhealthy, or is so for another reason."""
    reported = {status.key: status.message for status in before if not status.ready}
    return [
        f"{status.device}, which the pod uses, is unhealthy: {status.message}; {UNHEALTHY_WAY_OUT}"
        for status in devices
        if not status.ready and reported.get(status.key) != status.message
    ]


@dataclass
class ClaimWriteState:
    """What is written for a claim: transition times by device, the last status, and whether the claim is over, so that
    it must not be written any more."""

    since: dict[str, str] = field(default_factory=dict)
    written: Sequence[DeviceStatus] | None = None
    over: bool = False

    def note_transitions(self, devices: Sequence[DeviceStatus], now: str) -> None:
        """Set the transition time of devices that are new or whose readiness has changed."""
        before = {status.key: status.ready for status in self.written or ()}
        for status in devices:
            if status.key not in self.since or before.get(status.key, status.ready) is not status.ready:
                self.since[status.key] = now


class StatusWriter:
    """One writer per node. ``desired`` returns the status of every prepared claim; call ``notify`` when it has changed.

    An unprepared claim keeps its last status: it is deallocated next, and the API server then removes the entries.
    """

    def __init__(
        self,
        client: KubeClient,
        driver: str,
        desired: Callable[[], Statuses],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        steps: StepRunner | None = None,
        give_way: GiveWay = at_once,
        events: PluginEvents | None = None,
    ) -> None:
        """``events``: where devices that become unhealthy are reported, to their claims and pods."""
        self._events = events
        self._client, self._driver, self._desired, self._now = client, driver, desired, now
        self._step = steps or StepRunner()
        self._states: dict[ClaimReference, ClaimWriteState] = {}
        # Prepared before this process: their status may be written already, with transition times to keep.
        self._inherited: set[ClaimReference] | None = None
        self._forbidden: Backoff | None = None
        self._loop = Loop(
            "writing claim status", self._write_changes, CLAIM_STATUS_COALESCE_SECONDS, self._retry_delay, give_way
        )
        self.notify = self._loop.notify

    def run(self, stop: threading.Event) -> None:
        """Write at the start and at every notification until ``stop`` is set (then call ``notify`` once more)."""
        self.notify()
        self._loop.run(stop)

    def _retry_delay(self, error: RecoverableError) -> float | None:
        """The retry delay of ``error``. A missing permission is logged once."""
        if not isinstance(error, ApiError) or error.status != FORBIDDEN:
            return None
        if self._forbidden is None:
            log.error("not permitted to write claim status", extra={"error": str(error), "role": ROLE % self._driver})
            self._forbidden = Backoff(*FORBIDDEN_RETRY_SECONDS)
        return self._forbidden.next_s()

    def _write_changes(self) -> None:
        desired = self._desired()
        if self._inherited is None:
            self._inherited = set(desired)
        for gone in self._states.keys() - desired.keys():
            del self._states[gone]
        failure: ApiError | None = None
        for claim, devices in desired.items():
            try:
                self._bring_up_to_date(claim, devices)
            except ApiError as error:
                if error.status is None:
                    raise
                failure = failure or error
        if failure is not None:
            raise failure
        self._forbidden = None

    def _bring_up_to_date(self, claim: ClaimReference, devices: Sequence[DeviceStatus]) -> None:
        state = self._states.get(claim) or self._load_state(claim, devices)
        self._states[claim] = state
        if not state.over and state.written != devices:
            state.note_transitions(devices, seconds_time(self._now()))
            self._write(claim, devices, state)

    def _load_state(self, claim: ClaimReference, devices: Sequence[DeviceStatus]) -> ClaimWriteState:
        if claim not in (self._inherited or ()):
            return ClaimWriteState()
        stored = self._read(claim)
        if stored is None:
            return ClaimWriteState(over=True)
        if self._events is not None:
            reserved = ClaimStatus(reserved_for=stored.status.reserved_for)
            self._events.remember_pods(Claim(stored.metadata, status=reserved))
        entries = stored.entries(self._driver)
        state = ClaimWriteState(unchanged_since(entries, devices))
        if state.since.keys() >= {status.key for status in devices}:
            body = apply_body(claim, self._driver, devices, state.since)
            if all(entry in entries for entry in body["status"]["devices"]):
                state.written = devices
        return state

    def _read(self, claim: ClaimReference) -> StoredClaim | None:
        """The claim at the API server; None if it is gone or replaced by another claim of that name."""
        try:
            stored = read_object(self._client, status_path(claim).removesuffix("/status"), STORED_CLAIM)
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise
        return stored if stored.metadata.uid == claim.uid else None

    def _write(self, claim: ClaimReference, devices: Sequence[DeviceStatus], state: ClaimWriteState) -> None:
        body = apply_body(claim, self._driver, devices, state.since)
        try:
            with self._step(NodeStep.WRITE_STATUS, claim=str(claim)):
                self._client.apply(status_path(claim), body, self._driver)
        except ApiError as error:
            if not self._is_over(claim, error):
                raise
            state.over = True
        if self._events is not None and not state.over:
            for message in newly_unhealthy(devices, state.written or ()):
                self._events.claim(claim, EventReason.UNHEALTHY, message)
        state.written = devices

    def _is_over(self, claim: ClaimReference, error: ApiError) -> bool:
        """Whether the error means that the claim is gone, replaced, or no longer allocated."""
        if error.status == INVALID and DRIVER_PERMISSION in str(error):
            raise ApiError(str(error), FORBIDDEN) from error
        if error.status == INVALID and BYTES_DIFFER in str(error):
            extra = {"claim": str(claim), "why": WHY_BYTES}
            log.error("the API server rejects every write of this claim's status", extra=extra)
            return True
        if error.status not in (NOT_FOUND, CONFLICT, INVALID):
            return False
        stored = self._read(claim) if error.status != NOT_FOUND else None
        return stored is None or not stored.allocated
