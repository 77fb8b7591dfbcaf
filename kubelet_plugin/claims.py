"""From an allocated ResourceClaim to the devices this node has to prepare (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from driver.config.opaque import AnyParameters, GpuConfig, MigDeviceConfig, parse_parameters
from driver.errors import ClaimError
from driver.kube.claims import Claim, Configuration, Result
from driver.model.device import Device, DeviceKind
from driver.slices.names import Pool
from kubelet_plugin.inventory import Inventory

FITTING: Mapping[type[AnyParameters], DeviceKind] = {
    GpuConfig: DeviceKind.FULL,
    MigDeviceConfig: DeviceKind.PARTITION,
}
"""Which kind of device each kind of parameters is for."""


@dataclass(frozen=True, slots=True)
class ClaimReference:
    """How the kubelet names a claim. ``str()`` is what logs and errors show."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Allocated:
    """One device allocated to the claim, and the requests it serves (base names, without subrequest)."""

    device: Device
    requests: tuple[str, ...]


def resolve(reference: ClaimReference, claim: Claim, pool: Pool, inventory: Inventory) -> list[Allocated]:
    """The devices of ``claim`` that are this node's to prepare. Raises ClaimError."""
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
    found = [(result, _device(reference, result, pool, inventory)) for result in ours]
    for result, device in found:
        _check_parameters(reference, result, device, allocation.config, pool.driver)
    return _grouped(found)


def _device(reference: ClaimReference, result: Result, pool: Pool, inventory: Inventory) -> Device:
    where = f"claim {reference}, request {result.request}"
    if result.pool != pool.name:
        raise ClaimError(f"{where}: allocated from pool {result.pool}, this node's pool is {pool.name}")
    if result.admin_access:
        raise ClaimError(f"{where}: adminAccess is true; this version prepares devices for exclusive use only")
    device = inventory.device(result.device)
    if device is None:
        known = ", ".join(sorted(f"gpu-{inventory.number(gpu)}" for gpu in inventory.gpus)) or "none"
        raise ClaimError(f"{where}: device {result.device} is unknown on this node, which has GPUs {known}")
    return device


def _check_parameters(
    reference: ClaimReference, result: Result, device: Device, entries: Iterable[Configuration], driver: str
) -> None:
    """Parse what class and claim say about this device; parameters of the other kind must not name it."""
    for entry in entries:
        if entry.opaque is None or entry.opaque.driver != driver or not _applies(entry, result.request):
            continue
        where = f"claim {reference}, request {result.request}, {entry.source}"
        parameters = parse_parameters(entry.opaque.parameters, where)
        if entry.requests and FITTING[type(parameters)] is not device.kind:
            raise ClaimError(
                f"{where}: {parameters.kind} is for devices of type {FITTING[type(parameters)].value}, "
                f"{device.name} has type {device.kind.value}"
            )


def _applies(entry: Configuration, request: str) -> bool:
    """No requests means all; a base name covers its subrequests (``base/sub``)."""
    return not entry.requests or request in entry.requests or base_name(request) in entry.requests


def base_name(request: str) -> str:
    """The kubelet knows requests by their base name: ``gpu/small`` was chosen for ``gpu``."""
    return request.split("/", 1)[0]


def _grouped(found: Iterable[tuple[Result, Device]]) -> list[Allocated]:
    requests: dict[str, list[str]] = {}
    devices: dict[str, Device] = {}
    for result, device in found:
        devices[device.name] = device
        requests.setdefault(device.name, []).append(base_name(result.request))
    return [Allocated(device, tuple(dict.fromkeys(requests[name]))) for name, device in devices.items()]
