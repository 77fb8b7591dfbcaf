"""What a prepared claim's ``status.devices`` says about its devices (pure).

``data`` of an entry, all of it for people and tools to read, nothing for the scheduler:

    uuid        of the GPU; of the MIG device where the device is a partition
    parentUUID  the GPU's, for partitions and shares
    sharing     for shares: {shares, inUse, timeSlice}: how many shares the GPU is divided in, how many
                of them prepared claims hold now, and the time-slice interval in force
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from driver.kube.claims import GROUP
from driver.model.device import DeviceKind
from driver.model.sharing import TimeSlice, in_force
from kubelet_plugin.claims import ClaimReference
from kubelet_plugin.records import ClaimRecord

Object = dict[str, Any]

READY = "Ready"
PREPARED = "Prepared"
UNHEALTHY = "Unhealthy"
MESSAGE_LIMIT = 32768
"""Letters of a condition's message (``metav1.Condition``)."""


@dataclass(frozen=True, slots=True)
class Share:
    """One of ``shares`` shares of a GPU, with the interval its claim asked for."""

    shares: int
    asked: TimeSlice | None = None


@dataclass(frozen=True, slots=True)
class ReadyDevice:
    """One device of a prepared claim. ``partition_uuid`` is the MIG device's, ``instances`` the ids of its GPU instance
    and its compute instance."""

    claim: ClaimReference
    pool: str
    device: str
    gpu_uuid: str
    partition_uuid: str | None = None
    share: Share | None = None
    share_id: str | None = None
    instances: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """An entry of ``status.devices`` without driver and time. Equal ones need no second write.

    ``ready``: whether it can be used; else ``message`` says why not.
    """

    pool: str
    device: str
    message: str
    data: Mapping[str, Any]
    share_id: str | None = None
    ready: bool = True


def prepared_devices(records: Iterable[ClaimRecord]) -> Iterator[ReadyDevice]:
    """Every device of a claim that is ready, from the checkpoint's records."""
    for record in records:
        claim = record.reference
        for device in record.devices if record.phase == "prepared" else ():
            share = Share(device.shares, device.time_slice) if device.kind is DeviceKind.SHARE else None
            ids = device.gpu_instance_id, device.compute_instance_id
            instances = None if ids[0] is None or ids[1] is None else (ids[0], ids[1])
            yield ReadyDevice(
                claim, device.pool, device.device, device.gpu_uuid, device.uuid, share, instances=instances
            )


Statuses = Mapping[ClaimReference, Sequence[DeviceStatus]]


Trouble = Callable[[str], str | None]
"""Why the device of that name can't be used at present; None where it can."""


def device_statuses(prepared: Iterable[ReadyDevice], trouble: Trouble = lambda _: None) -> Statuses:
    """What each claim should say, given everything that is prepared on the node, and what is wrong with it."""
    everything = list(prepared)
    shares: dict[str, list[Share]] = defaultdict(list)
    for device in everything:
        if device.share is not None:
            shares[device.gpu_uuid].append(device.share)
    found: dict[ClaimReference, list[DeviceStatus]] = defaultdict(list)
    for device in everything:
        status = _status(device, shares[device.gpu_uuid])
        why = trouble(device.device)
        found[device.claim].append(status if why is None else replace(status, message=why, ready=False))
    return found


def _status(device: ReadyDevice, on_same_gpu: Sequence[Share]) -> DeviceStatus:
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
            "timeSlice": str(in_force(share.asked for share in on_same_gpu)),
        }
        message = f"one of {device.share.shares} time-sliced shares of the GPU, not isolated from the others"
    return DeviceStatus(device.pool, device.device, message, data, device.share_id)


def status_path(claim: ClaimReference) -> str:
    return f"{GROUP}/namespaces/{claim.namespace}/resourceclaims/{claim.name}/status"


def apply_body(claim: ClaimReference, driver: str, devices: Sequence[DeviceStatus], since: Mapping[str, str]) -> Object:
    """What to apply to ``status_path``; the uid keeps it from a later claim of the same name.

    ``since``: by device, since when it is as it is.
    """
    return {
        "apiVersion": GROUP.removeprefix("/apis/"),
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


def unchanged_since(claim: Object, driver: str, devices: Iterable[DeviceStatus]) -> dict[str, str]:
    """By device, since when ``claim``, as the API server has it, says that it is as in ``devices``."""
    stored = {
        (entry.get("device"), condition.get("status")): condition["lastTransitionTime"]
        for entry in _entries(claim)
        if entry.get("driver") == driver
        for condition in entry.get("conditions") or ()
        if condition.get("type") == READY
    }
    wanted = {each.device: (each.device, "True" if each.ready else "False") for each in devices}
    return {device: stored[key] for device, key in wanted.items() if key in stored}


def says(claim: Object, body: Object) -> bool:
    """Whether ``claim`` has every entry of ``body`` already, as it is."""
    present = list(_entries(claim))
    return all(entry in present for entry in body["status"]["devices"])


def _entries(claim: Object) -> Iterable[Object]:
    return (claim.get("status") or {}).get("devices") or ()
