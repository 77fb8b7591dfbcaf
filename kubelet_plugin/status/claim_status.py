"""The entries of a prepared claim's ``status.devices`` (pure).

Fields of ``data`` in an entry, for people and tools; the scheduler ignores them:

    uuid        of the GPU; of the MIG device if the device is a partition
    parentUUID  of the GPU, for partitions and shares
    sharing     for shares: {shares, inUse, timeSlice}: number of shares of the GPU, number of shares that
                prepared claims hold now, and the time-slice interval in force
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from driver.kube.decoding import decode
from driver.kube.reads import RESOURCE_GROUP
from driver.model.device import DeviceKind
from driver.model.sharing import TimeSlice, in_force
from kubelet_plugin.checkpoint.records import ClaimRecord
from kubelet_plugin.claims.allocation import ClaimReference

Object = dict[str, Any]

READY = "Ready"
PREPARED = "Prepared"
UNHEALTHY = "Unhealthy"
MESSAGE_LIMIT = 32768
"""Maximum length of a condition's message (``metav1.Condition``)."""


@dataclass(frozen=True, slots=True)
class PreparedShare:
    """One of ``shares`` shares of a GPU, with the time-slice interval that its claim requests."""

    shares: int
    requested: TimeSlice | None = None


@dataclass(frozen=True, slots=True)
class ReadyDevice:
    """One device of a prepared claim. ``partition_uuid`` and ``instances`` (GPU instance, compute instance) are set for
    MIG devices."""

    claim: ClaimReference
    pool: str
    device: str
    gpu_uuid: str
    partition_uuid: str | None = None
    share: PreparedShare | None = None
    share_id: str | None = None
    instances: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """An entry of ``status.devices`` without driver and time; an equal one is not written again.

    ``ready``: whether the device can be used; otherwise ``message`` is the reason.
    """

    pool: str
    device: str
    message: str
    data: Mapping[str, Any]
    share_id: str | None = None
    ready: bool = True


def prepared_devices(records: Iterable[ClaimRecord]) -> Iterator[ReadyDevice]:
    """Every device of a prepared claim in the checkpoint's records."""
    for record in records:
        claim = record.reference
        for device in record.devices if record.phase == "prepared" else ():
            share = PreparedShare(device.shares, device.time_slice) if device.kind is DeviceKind.SHARE else None
            ids = device.gpu_instance_id, device.compute_instance_id
            instances = None if ids[0] is None or ids[1] is None else (ids[0], ids[1])
            yield ReadyDevice(
                claim, device.pool, device.device, device.gpu_uuid, device.uuid, share, instances=instances
            )


Statuses = Mapping[ClaimReference, Sequence[DeviceStatus]]


UnhealthyReason = Callable[[str], str | None]
"""Why the device with this name can't be used at present, or None."""


def device_statuses(prepared: Iterable[ReadyDevice], unhealthy_reason: UnhealthyReason = lambda _: None) -> Statuses:
    """The device status of each claim, from all prepared devices of the node and their health."""
    devices = list(prepared)
    shares: dict[str, list[PreparedShare]] = defaultdict(list)
    for device in devices:
        if device.share is not None:
            shares[device.gpu_uuid].append(device.share)
    found: dict[ClaimReference, list[DeviceStatus]] = defaultdict(list)
    for device in devices:
        status = _status(device, shares[device.gpu_uuid])
        reason = unhealthy_reason(device.device)
        found[device.claim].append(status if reason is None else replace(status, message=reason, ready=False))
    return found


def _status(device: ReadyDevice, on_same_gpu: Sequence[PreparedShare]) -> DeviceStatus:
    data: Object = {"uuid": device.partition_uuid or device.gpu_uuid}
    message = "the whole GPU"
    if device.partition_uuid is not None:
        data["parentUUID"] = device.gpu_uuid
        message = "a partition of the GPU, isolated by hardware"
        if device.instances is not None:
            data["gpuInstanceID"], data["computeInstanceID"] = device.instances
    elif device.share is not None:
        data["parentUUID"] = device.gpu_uuid
        data["sharing"] = {
            "shares": device.share.shares,
            "inUse": len(on_same_gpu),
            "timeSlice": str(in_force(share.requested for share in on_same_gpu)),
        }
        message = f"one of {device.share.shares} time-sliced shares of the GPU, not isolated from the others"
    return DeviceStatus(device.pool, device.device, message, data, device.share_id)


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
        "status": {"devices": [_entry(driver, device, since[device.device]) for device in devices]},
    }


def _entry(driver: str, device: DeviceStatus, since: str) -> Object:
    condition = {
        "type": READY,
        "status": "True" if device.ready else "False",
        "reason": PREPARED if device.ready else UNHEALTHY,
        "message": device.message[:MESSAGE_LIMIT],
        "lastTransitionTime": since,
    }
    entry: Object = {"driver": driver, "pool": device.pool, "device": device.device}
    if device.share_id is not None:
        entry["shareID"] = device.share_id
    return {**entry, "conditions": [condition], "data": dict(device.data)}


class StoredClaim(msgspec.Struct, frozen=True):
    """The status of a claim at the API server."""

    class Metadata(msgspec.Struct, frozen=True):
        uid: str

    class Status(msgspec.Struct, frozen=True):
        """``devices`` stay undecoded: entries of other drivers may contain anything."""

        allocation: msgspec.Raw = msgspec.Raw(b"null")
        devices: tuple[msgspec.Raw, ...] = ()

    metadata: Metadata
    status: Status = Status()

    @property
    def allocated(self) -> bool:
        return bytes(self.status.allocation) != b"null"

    def entries(self, driver: str) -> list[Object]:
        """The entries of ``status.devices`` of ``driver``."""
        return [decode(entry, ENTRY) for entry in self.status.devices if decode(entry, STATUS_ENTRY).driver == driver]


class StatusEntry(msgspec.Struct, frozen=True):
    """An entry of ``status.devices``."""

    driver: str


STORED, STATUS_ENTRY, ENTRY = (
    msgspec.json.Decoder(StoredClaim),
    msgspec.json.Decoder(StatusEntry),
    msgspec.json.Decoder(Object),
)


def unchanged_since(entries: Iterable[Object], devices: Iterable[DeviceStatus]) -> dict[str, str]:
    """The transition time in ``entries`` of each device whose readiness is as in ``devices``."""
    stored = {
        (entry.get("device"), condition.get("status")): condition["lastTransitionTime"]
        for entry in entries
        for condition in entry.get("conditions") or ()
        if condition.get("type") == READY
    }
    wanted = {each.device: (each.device, "True" if each.ready else "False") for each in devices}
    return {device: stored[key] for device, key in wanted.items() if key in stored}


def contains(entries: Collection[Object], body: Object) -> bool:
    """Whether ``entries`` contain all entries of ``body``."""
    return all(entry in entries for entry in body["status"]["devices"])
