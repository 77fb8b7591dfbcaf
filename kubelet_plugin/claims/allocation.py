"""The devices that this node has to prepare for an allocated ResourceClaim (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

import msgspec

from driver.config.opaque_parameters import FITTING, AnyParameters, SharedConfig, parse_parameters
from driver.errors import ClaimError, HardwareError
from driver.kube.tolerant_json import decode
from driver.kube.types import Claim, Configuration, Result
from driver.model.device import Device, merged
from driver.model.gpu_settings import TimeSlice
from driver.model.offer import OF_SEVERAL, SHARED, DeviceKind, Spot
from driver.model.shared_memory import MEMORY_CAPACITY, MemoryLimit, SharedMemory, SharingStrategy, gib_of
from driver.placement.occupancy import overlap
from driver.slices.slice_names import Pool
from kubelet_plugin.checkpoint.records import MonitorRecord, device_key
from kubelet_plugin.inventory.inventory import ClaimReference, Inventory

FROM_CLASS = "FromClass"

STRATEGIES = {SharingStrategy.MPS: "MPS", SharingStrategy.TIME_SLICING: "TimeSlicing"}
"""How parameters write them."""

JSON_DECODER = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True)
class AllocatedDevice:
    """One device allocated to the claim, and the requests it serves (base names, without subrequest).

    ``time_slice`` is the interval that its effective parameters request, ``threads`` the percentage of threads; None:
    they request none. ``share_id`` is the scheduler's name of the part of a shared device that this is; empty for other
    devices. ``key`` is as in its record.
    """

    device: Device
    requests: tuple[str, ...]
    time_slice: TimeSlice | None = None
    share_id: str = ""
    key: str = ""
    threads: int | None = None


class ResolvedClaim(NamedTuple):
    """The devices that a claim gets, and its monitor devices, which hold nothing of their GPUs.

    ``pods``: the UIDs of the pods that use it, if it shares a GPU by memory; ``of_one_pod``: it says that it was made
    for one pod.
    """

    devices: Sequence[AllocatedDevice]
    monitors: tuple[MonitorRecord, ...]
    pods: tuple[str, ...] = ()
    of_one_pod: bool = False


def resolve(reference: ClaimReference, claim: Claim, pool: Pool, inventory: Inventory) -> ResolvedClaim:
    """Return the devices of ``claim`` that this node has to prepare. Raises ClaimError."""
    if claim.metadata.uid != reference.uid:
        raise ClaimError(
            f"claim {reference}: the API server has uid {claim.metadata.uid}, the kubelet asked for {reference.uid}: "
            "the claim was deleted and created again; the kubelet must ask for the new one"
        )
    if claim.status.allocation is None:
        raise ClaimError(f"claim {reference} is not allocated: status.allocation is empty; the scheduler allocates it")
    allocation = claim.status.allocation.devices
    results = [result for result in allocation.results if result.driver == pool.driver]
    if not results:
        drivers = ", ".join(sorted({result.driver for result in allocation.results})) or "none"
        raise ClaimError(f"claim {reference} has no device of driver {pool.driver}: it is allocated from {drivers}")
    monitoring = [result for result in results if result.admin_access]
    exclusive = [result for result in results if not result.admin_access] if monitoring else results
    requests = [(result.request, _device(reference, result, pool, inventory)) for result in exclusive]
    share_ids = [result.share_id or "" for result in exclusive]
    config = [entry for entry in allocation.config if entry.opaque is not None and entry.opaque.driver == pool.driver]
    parameters = _parameters(reference, requests, config) if config else {}
    allocated: dict[str, AllocatedDevice] = {}
    for (request, device), share_id in zip(requests, share_ids, strict=True):
        effective = parameters.get((request, device.name))
        key = device_key(device.name, share_id) if share_id else device.name
        served = allocated[key].requests if key in allocated else ()
        base = request.split("/", 1)[0]
        allocated[key] = AllocatedDevice(
            device,
            served if base in served else (*served, base),
            effective.time_slice if effective else None,
            share_id,
            key,
        )
        if isinstance(effective, SharedConfig):
            where = f"claim {reference}, request {request}"
            allocated[key] = _with_shared_config(allocated[key], effective, where)
    if len(allocated) > 1:
        _refuse_shares_of_one_gpu(reference, allocated.values(), pool.driver)
        _refuse_mps_of_several_gpus(reference, allocated.values(), pool.driver)
    monitors = _monitors(reference, monitoring, pool, inventory) if monitoring else ()
    if not any(share_ids):
        return ResolvedClaim(list(allocated.values()), monitors)
    of_one_pod = any(owner.kind == "Pod" and owner.controller for owner in claim.metadata.owner_references)
    pods, devices = pods_of(claim), list(allocated.values())
    # A claim that is reserved for something else than pods, such as a PodGroup, does not say whose cgroups to limit.
    limited = devices if pods else [replace(item, device=_without_limit(item.device)) for item in devices]
    return ResolvedClaim(limited, monitors, pods, of_one_pod)


def _without_limit(device: Device) -> Device:
    if device.shared is None or device.shared.limit is MemoryLimit.MPS:
        return device
    return replace(device, shared=replace(device.shared, limit=MemoryLimit.NONE))


def pods_of(claim: Claim) -> tuple[str, ...]:
    """The UIDs of the pods that use ``claim``, sorted."""
    return tuple(sorted(user.uid for user in claim.status.reserved_for if user.resource == "pods" and user.uid))


def _monitors(
    reference: ClaimReference, results: Iterable[Result], pool: Pool, inventory: Inventory
) -> tuple[MonitorRecord, ...]:
    """The monitor devices of ``results``, which have adminAccess. Raises ClaimError for any other device."""
    monitors: dict[str, MonitorRecord] = {}
    for result in results:
        where = f"claim {reference}, request {result.request}"
        if result.pool != pool.of_monitors.name:
            raise ClaimError(
                f"{where}: adminAccess is true, and {result.device} of pool {result.pool} is no monitor device of this "
                "node: requests with adminAccess must have DeviceClass gpu-monitor (docs/workloads.md)"
            )
        gpu = inventory.monitored_gpu(result.device)
        if gpu is None:
            raise ClaimError(f"{where}: {_unknown(result.device, inventory)}")
        earlier = monitors[result.device].requests if result.device in monitors else ()
        requests = tuple(dict.fromkeys((*earlier, result.request)))
        monitors[result.device] = MonitorRecord(requests, result.pool, result.device, gpu.uuid)
    return tuple(monitors.values())


def _device(reference: ClaimReference, result: Result, pool: Pool, inventory: Inventory) -> Device:
    where = f"claim {reference}, request {result.request}"
    if result.pool != pool.name:
        if result.pool == pool.of_monitors.name:
            raise ClaimError(
                f"{where}: {result.device} is a monitor device, which only requests with adminAccess: true can have: "
                "add adminAccess, or request a DeviceClass of GPUs, partitions or shares"
            )
        raise ClaimError(
            f"{where}: allocated from pool {result.pool}, this node's pool is {pool.name}: another driver of this name "
            "published that; delete the pod, so that the scheduler chooses again"
        )
    device = inventory.device(result.device)
    if device is None:
        raise ClaimError(f"{where}: {_unknown(result.device, inventory)}")
    if device.kind in OF_SEVERAL and result.share_id is None:
        setting = "--compute-instances" if device.shared is None else "--shared"
        raise ClaimError(
            f"{where}: {device.name} was allocated without a shareID, as if no other claim could have it: the "
            f"scheduler lacks the feature gate DRAConsumableCapacity; delete the pod, and remove {setting}"
        )
    return device if device.shared is None else _part(where, result, device, device.shared)


def _part(where: str, result: Result, device: Device, shared: SharedMemory) -> Device:
    """The part of a shared device that ``result`` gives the claim."""
    gib = gib_of(result.consumed_capacity, shared.gib)
    if gib is None:
        amount = (result.consumed_capacity or {}).get(MEMORY_CAPACITY)
        raise ClaimError(f"{where}: {device.name}: consumedCapacity memory {amount!r} is no positive quantity like 6Gi")
    return replace(device, spot=Spot(SHARED, gib))


def _unknown(name: str, inventory: Inventory) -> str:
    names = {f"gpu-{inventory.number(gpu)}": gpu for gpu in inventory.gpus}
    shared = name.removesuffix("-shared")
    if shared != name and shared in names:
        return f"{name} does not exist any more: the settings share {shared} no longer; delete the pod"
    gpu, part, _ = name.partition("-share-")
    if part and gpu in names:
        now = sum(device.kind is DeviceKind.SHARE for device in inventory.devices_on(names[gpu]))
        return (
            f"{name} does not exist any more: {gpu} is divided into {now} shares since the settings changed; "
            "delete the pod, so that the scheduler chooses again"
        )
    return f"device {name} is unknown on this node, which has GPUs {', '.join(sorted(names)) or 'none'}"


def _parameters(
    reference: ClaimReference, requests: Sequence[tuple[str, Device]], config: Iterable[Configuration]
) -> dict[tuple[str, str], AnyParameters]:
    """The effective parameters of each request and device: the last entry of ``config`` that fits, class before claim.

    Nothing is merged. An entry of the claim itself that names a request in full must fit all devices of it; any other
    must fit one of the devices that it covers, unless a device was allocated through ``firstAvailable``.
    """
    effective: dict[tuple[str, str], AnyParameters] = {}
    for entry in sorted(config, key=lambda entry: entry.source != FROM_CLASS):
        # Some parameters mean different types for different kinds of device, so parse them once per kind.
        parsed: dict[DeviceKind, AnyParameters] = {}
        # No requests means all; a base name covers its subrequests (``base/sub``) of any kind.
        named = set(entry.requests)
        covered = [item for item in requests if not named or not named.isdisjoint((item[0], item[0].split("/", 1)[0]))]
        for request, device in covered:
            where = f"claim {reference}, request {request}, {entry.source}"
            if device.kind not in parsed:
                parsed[device.kind] = _parsed(entry, where, device.kind)
            parameters = parsed[device.kind]
            if FITTING[type(parameters)] is device.kind:
                effective[request, device.name] = parameters
            elif request in entry.requests and entry.source != FROM_CLASS:
                # Entries of a class need not fit: it may have one for each kind, and newer schedulers name the request.
                raise ClaimError(
                    f"{where}: {type(parameters).__name__} is for devices of type {FITTING[type(parameters)].value}, "
                    f"{device.name} has type {device.kind.value}"
                )
        fits_some_device = any(FITTING[type(parameters)] is kind for kind, parameters in parsed.items())
        from_alternative = any("/" in request for request, _ in requests)
        if covered and not fits_some_device and not from_alternative and entry.source != FROM_CLASS:
            kind = min(FITTING[type(parameters)] for parameters in parsed.values())
            names = ", ".join(f"{device.name} (type {device.kind.value})" for _, device in covered)
            where = f"claim {reference}, {entry.source}"
            raise ClaimError(f"{where}: the parameters are for devices of type {kind.value}, not for {names}")
    return effective


def _parsed(entry: Configuration, where: str, kind: DeviceKind) -> AnyParameters:
    try:
        raw = None if entry.opaque is None else decode(entry.opaque.parameters, JSON_DECODER)
    except msgspec.MsgspecError as error:
        raise ClaimError(f"{where}: the opaque parameters can't be read: {error}") from error
    return parse_parameters(raw, where, kind)


def _refuse_shares_of_one_gpu(reference: ClaimReference, devices: Iterable[AllocatedDevice], driver: str) -> None:
    """Two shares of a GPU give one claim no more than one share does."""
    first: dict[str, AllocatedDevice] = {}
    for allocated in devices:
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


def _with_shared_config(allocated: AllocatedDevice, config: SharedConfig, where: str) -> AllocatedDevice:
    """``allocated`` with what ``config`` says for the way in which its GPU is shared. Raises ClaimError."""
    shared = allocated.device.shared
    if shared is None:
        return allocated
    if config.strategy not in (None, STRATEGIES[shared.strategy]):
        raise ClaimError(
            f"{where}: SharedConfig strategy is {config.strategy}, and claims share {allocated.device.name} by "
            f"{STRATEGIES[shared.strategy]}: leave strategy out, or select a GPU that the node's setting shared has as "
            "the claim needs it"
        )
    if shared.strategy is SharingStrategy.MPS:
        return replace(allocated, time_slice=None, threads=config.mps.active_thread_percentage if config.mps else None)
    return allocated


def _refuse_mps_of_several_gpus(reference: ClaimReference, devices: Iterable[AllocatedDevice], driver: str) -> None:
    """A program has one MPS daemon, which serves one GPU."""
    by_mps = [d for d in devices if d.device.shared is not None and d.device.shared.strategy is SharingStrategy.MPS]
    if len({allocated.device.gpu.uuid for allocated in by_mps}) > 1:
        names = " and ".join(dict.fromkeys(allocated.device.name for allocated in by_mps))
        raise ClaimError(
            f"claim {reference}: {names} are shared by MPS, through which a program can use one GPU: request one "
            "device, with the sum of the memory; for several GPUs use full GPUs or partitions; for two parts of one "
            f"GPU add the constraint matchAttribute: {driver}/parentUUID"
        )


def refuse_unusable(reference: ClaimReference, allocated: Sequence[AllocatedDevice], inventory: Inventory) -> None:
    """Refuse devices that overlap, that another driver has, or whose GPU can't be used at present.

    This is the last check against allocating memory twice, as may happen after a pod was force-deleted. Raises
    ClaimError, and HardwareError if a GPU can't be used.
    """
    for item, other in combinations(allocated, 2):
        if overlap(item.device, other.device):
            raise ClaimError(
                f"claim {reference}: its own devices {item.device} and {other.device} overlap; "
                "the scheduler allocates only devices whose memory slices are disjoint"
            )
    devices = [item.device for item in allocated]
    for device in merged(devices) if len(devices) > 1 else devices:
        fault = inventory.fault(device.gpu)
        if fault is not None:
            raise HardwareError(f"claim {reference}: {device} can't be used at present: {fault}")
        owner = inventory.reserved_reason(reference.uid, device.gpu)
        if owner is not None:
            raise ClaimError(f"claim {reference}: {device} is reserved for another driver: {owner}; delete the pod")
        if device.shared is not None:
            overdrawn = inventory.overdrawn_reason(reference.uid, device, device.shared)
            if overdrawn is not None:
                raise ClaimError(f"claim {reference}: {overdrawn}")
        conflict = inventory.conflict(reference.uid, device)
        if conflict is not None:
            holder, held = conflict
            raise ClaimError(
                f"claim {reference}: {device} overlaps {held}, which {holder.as_holder()} still holds on this "
                "node; it is prepared once that claim is unprepared"
            )
