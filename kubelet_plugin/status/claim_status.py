"""The entries of a prepared claim's ``status.devices`` (pure).

Fields of ``data`` in an entry, for people and tools; the scheduler ignores them:

    uuid        of the GPU; of the MIG device if the device is a partition
    parentUUID  of the GPU, for partitions and shares
    sharing     for shares: {shares, inUse, timeSlice}: number of shares of the GPU, number of shares that
                prepared claims hold now, and the time-slice interval in force
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from driver.kube.client import OBJECT, Object
from driver.kube.decoding import decode
from driver.kube.reads import RESOURCE_GROUP
from driver.kube.types import Metadata, ReportedDevice
from driver.model.device import DeviceKind
from driver.model.sharing import TimeSlice, in_force
from kubelet_plugin.checkpoint.records import ClaimRecord, DeviceRecord
from kubelet_plugin.inventory.inventory import ClaimReference

READY = "Ready"
PREPARED = "Prepared"
UNHEALTHY = "Unhealthy"
MESSAGE_LIMIT = 32768
"""Maximum length of a condition's message (``metav1.Condition``)."""


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


Statuses = Mapping[ClaimReference, Sequence[DeviceStatus]]


UnhealthyReason = Callable[[str], str | None]
"""Why the device with this name can't be used at present, or None."""


def device_statuses(records: Iterable[ClaimRecord], unhealthy_reason: UnhealthyReason = lambda _: None) -> Statuses:
    """The device status of each prepared claim, from all checkpoint records of the node and the health of devices."""
    devices = [(each.reference, device) for each in records if each.phase == "prepared" for device in each.devices]
    requested: dict[str, list[TimeSlice | None]] = defaultdict(list)
    for _, device in devices:
        if device.kind is DeviceKind.SHARE:
            requested[device.gpu_uuid].append(device.time_slice)
    found: dict[ClaimReference, list[DeviceStatus]] = defaultdict(list)
    for claim, device in devices:
        status = _status(device, requested[device.gpu_uuid])
        reason = unhealthy_reason(device.device)
        found[claim].append(status if reason is None else replace(status, message=reason, ready=False))
    return found


def _status(device: DeviceRecord, requested: Sequence[TimeSlice | None]) -> DeviceStatus:
    """``requested``: the time-slice interval that each prepared share of the GPU requests."""
    data: Object = {"uuid": device.uuid or device.gpu_uuid}
    message = "the whole GPU"
    if device.kind is not DeviceKind.FULL:
        data["parentUUID"] = device.gpu_uuid
    if device.kind is DeviceKind.PARTITION:
        message = "a partition of the GPU, isolated by hardware"
        if device.gpu_instance_id is not None and device.compute_instance_id is not None:
            data |= {"gpuInstanceID": device.gpu_instance_id, "computeInstanceID": device.compute_instance_id}
    elif device.kind is DeviceKind.SHARE:
        data["sharing"] = {
            "shares": device.shares,
            "inUse": len(requested),
            "timeSlice": str(in_force(requested)),
        }
        message = f"one of {device.shares} time-sliced shares of the GPU, not isolated from the others"
    return DeviceStatus(device.pool, device.device, message, data)


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
    identity = {"driver": driver, "pool": device.pool, "device": device.device}
    return {**identity, "conditions": [condition], "data": dict(device.data)}


class StoredClaim(msgspec.Struct, frozen=True):
    """The status of a claim at the API server."""

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
        return [decode(entry, OBJECT) for entry in self.status.devices if decode(entry, REPORTED).driver == driver]


STORED, REPORTED = msgspec.json.Decoder(StoredClaim), msgspec.json.Decoder(ReportedDevice)


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
