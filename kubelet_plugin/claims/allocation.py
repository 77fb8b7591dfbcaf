"""The devices that this node has to prepare for an allocated ResourceClaim (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import msgspec

from driver.config.opaque_parameters import FITTING, AnyParameters, parse_parameters
from driver.errors import ClaimError, HardwareError
from driver.kube.hostile_json import decode
from driver.kube.types import Claim, Configuration, OpaqueParameters, Result
from driver.model.device import Device
from driver.model.offer import DeviceKind
from driver.model.time_slice_and_compute_mode import TimeSlice
from driver.placement.occupancy import overlap
from driver.slices.pool_names import Pool
from kubelet_plugin.inventory.inventory import ClaimReference, Inventory

FROM_CLASS = "FromClass"

ANY = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True)
class Allocated:
    """One device allocated to the claim, and the requests it serves (base names, without subrequest).

    ``time_slice`` is the interval that its effective parameters request; None: they request none.
    """

    device: Device
    requests: tuple[str, ...]
    time_slice: TimeSlice | None = None


def resolve(reference: ClaimReference, claim: Claim, pool: Pool, inventory: Inventory) -> list[Allocated]:
    """Return the devices of ``claim`` that this node has to prepare. Raises ClaimError."""
    if claim.metadata.uid != reference.uid:
        raise ClaimError(
            f"claim {reference}: the API server has uid {claim.metadata.uid}, the kubelet asked for {reference.uid}: "
            "the claim was deleted and created again; the kubelet must ask for the new one"
        )
    if claim.status.allocation is None:
        raise ClaimError(f"claim {reference} is not allocated: status.allocation is empty; the scheduler allocates it")
    allocation = claim.status.allocation.devices
    ours = [result for result in allocation.results if result.driver == pool.driver]
    if not ours:
        drivers = ", ".join(sorted({result.driver for result in allocation.results})) or "none"
        raise ClaimError(f"claim {reference} has no device of driver {pool.driver}: it is allocated from {drivers}")
    entries = sorted(allocation.config, key=lambda entry: entry.source != FROM_CLASS)
    found: dict[str, Allocated] = {}
    for result in ours:
        device = _device(reference, result, pool, inventory)
        parameters = _parameters(reference, result, device, entries, pool.driver)
        served = found[device.name].requests if device.name in found else ()
        requests = tuple(dict.fromkeys((*served, base_name(result.request))))
        found[device.name] = Allocated(device, requests, parameters.time_slice if parameters else None)
    _refuse_unfit_parameters(
        reference, [(result, found[result.device].device) for result in ours], entries, pool.driver
    )
    _refuse_shares_of_one_gpu(reference, found.values(), pool.driver)
    return list(found.values())


def _device(reference: ClaimReference, result: Result, pool: Pool, inventory: Inventory) -> Device:
    where = f"claim {reference}, request {result.request}"
    if result.pool != pool.name:
        raise ClaimError(f"{where}: allocated from pool {result.pool}, this node's pool is {pool.name}")
    if result.admin_access:
        raise ClaimError(f"{where}: adminAccess is true; this version prepares devices for exclusive use only")
    device = inventory.device(result.device)
    if device is None:
        raise ClaimError(f"{where}: {_unknown(result.device, inventory)}")
    return device


def _unknown(name: str, inventory: Inventory) -> str:
    names = {f"gpu-{inventory.number(gpu)}": gpu for gpu in inventory.gpus}
    gpu, part, _ = name.partition("-share-")
    if part and gpu in names:
        now = sum(device.kind is DeviceKind.SHARE for device in inventory.devices_on(names[gpu]))
        return (
            f"{name} does not exist any more: {gpu} is divided into {now} shares since the settings changed; "
            "delete the pod, so that the scheduler chooses again"
        )
    return f"device {name} is unknown on this node, which has GPUs {', '.join(sorted(names)) or 'none'}"


def _parameters(
    reference: ClaimReference, result: Result, device: Device, entries: Sequence[Configuration], driver: str
) -> AnyParameters | None:
    """The last of ``entries`` (class before claim) for this device; nothing is merged. None where there is none."""
    effective = None
    for entry in entries:
        if entry.opaque is None or entry.opaque.driver != driver or not _applies(entry, result.request):
            continue
        where = f"claim {reference}, request {result.request}, {entry.source}"
        parameters = _parsed(entry.opaque, where, device.kind)
        if FITTING[type(parameters)] is device.kind:
            effective = parameters
        elif result.request in entry.requests and entry.source != FROM_CLASS:
            # A class's entries are given the request's name by newer schedulers; it may have one for each kind.
            raise ClaimError(
                f"{where}: {type(parameters).__name__} is for devices of type {FITTING[type(parameters)].value}, "
                f"{device.name} has type {device.kind.value}"
            )
    return effective


def _parsed(opaque: OpaqueParameters, where: str, kind: DeviceKind) -> AnyParameters:
    try:
        raw = decode(opaque.parameters, ANY)
    except msgspec.MsgspecError as error:
        raise ClaimError(f"{where}: the opaque parameters can't be read: {error}") from error
    return parse_parameters(raw, where, kind)


def _refuse_unfit_parameters(
    reference: ClaimReference,
    allocated: Sequence[tuple[Result, Device]],
    entries: Iterable[Configuration],
    driver: str,
) -> None:
    """Parameters of the claim itself must fit one of its devices, or be for an alternative that was not chosen."""
    for entry in entries:
        if entry.source == FROM_CLASS or entry.opaque is None or entry.opaque.driver != driver:
            continue
        devices = [device for result, device in allocated if _applies(entry, result.request)]
        if not devices or any("/" in result.request for result, _ in allocated):
            continue
        where = f"claim {reference}, {entry.source}"
        kinds = {FITTING[type(_parsed(entry.opaque, where, device.kind))] for device in devices}
        if not kinds & {device.kind for device in devices}:
            names = ", ".join(f"{device.name} (type {device.kind.value})" for device in devices)
            raise ClaimError(f"{where}: the parameters are for devices of type {min(kinds).value}, not for {names}")


def _applies(entry: Configuration, request: str) -> bool:
    """No requests means all; a base name covers its subrequests (``base/sub``) of any kind."""
    return not entry.requests or request in entry.requests or base_name(request) in entry.requests


def _refuse_shares_of_one_gpu(reference: ClaimReference, found: Iterable[Allocated], driver: str) -> None:
    """Two shares of a GPU give one claim no more than one share does."""
    first: dict[str, Allocated] = {}
    for allocated in found:
        if allocated.device.kind is not DeviceKind.SHARE:
            continue
        other = first.setdefault(allocated.device.gpu.uuid, allocated)
        if other is not allocated:
            requests = ", ".join(dict.fromkeys((*other.requests, *allocated.requests)))
            raise ClaimError(
                f"claim {reference}, request {requests}: {other.device.name} and {allocated.device.name} are shares of "
                "one GPU, which give a claim no more than one of them does: ask for one share (of a GPU with fewer "
                "shares, if that is too little), a partition or a full GPU; for shares of different GPUs add the "
                f"constraint distinctAttribute: {driver}/parentUUID"
            )


def refuse_overlap(reference: ClaimReference, allocated: Sequence[Allocated], inventory: Inventory) -> None:
    """The last check against allocating memory twice, as may happen after a pod was force-deleted.

    Raises ClaimError if devices overlap each other or a device of another claim, or belong to another driver, and
    HardwareError if a GPU can't be used at present.
    """
    for item, other in combinations(allocated, 2):
        if overlap(item.device, other.device):
            raise ClaimError(
                f"claim {reference}: its own devices {item.device} and {other.device} overlap; "
                "the scheduler allocates only devices whose memory slices are disjoint"
            )
    for item in allocated:
        fault = inventory.fault(item.device.gpu)
        if fault is not None:
            raise HardwareError(f"claim {reference}: {item.device} can't be used at present: {fault}")
        owner = inventory.reserved_reason(reference.uid, item.device.gpu)
        if owner is not None:
            raise ClaimError(f"claim {reference}: {item.device} is not ours to give: {owner}; delete the pod")
        conflict = inventory.conflict(reference.uid, item.device)
        if conflict is not None:
            holder, held = conflict
            raise ClaimError(
                f"claim {reference}: {item.device} overlaps {held}, which {holder.as_holder()} still holds on this "
                "node; it is prepared once that claim is unprepared"
            )


def base_name(request: str) -> str:
    """The name by which the kubelet knows a request: ``gpu`` for the subrequest ``gpu/small``."""
    return request.split("/", 1)[0]
