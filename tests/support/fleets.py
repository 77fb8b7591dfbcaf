"""Fleets as values: nodes of equal GPUs, written short."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from controller.cluster.fleet import Fleet, FleetGpu
from driver.model.device import Device
from driver.model.offer import DeviceKind, Offer, OfferKind
from tests.support.gpus import H100, gpu_of

SMALL = OfferKind(DeviceKind.PARTITION, "1g.10gb")


def partition(profile: str) -> OfferKind:
    return OfferKind(DeviceKind.PARTITION, profile)


def node(name: str, gpus: int = 2, product: str = H100, shares: int = 0) -> list[FleetGpu]:
    """A node of free GPUs that NVLink joins; their UUIDs are ``<name>/<number>``."""
    template = gpu_of(product)
    return [
        FleetGpu(
            name,
            replace(template, uuid=f"{name}/{number}", index=number, minor=number, nvlink_clique="0"),
            number,
            shares=shares,
        )
        for number in range(gpus)
    ]


def holding(fleet: Fleet, held: Mapping[str, str]) -> Fleet:
    """``fleet`` once the devices of these names, blanks between them, are held on the GPUs of these UUIDs.

    ``gpu-<number>-`` is left out of the names: ``mig-1g10gb-6``, ``share-0``, and ``full`` for the GPU itself.
    """
    gpus = dict(fleet.gpus)
    for uuid, names in held.items():
        for name in names.split():
            entry = gpus[uuid]
            spelled = f"gpu-{entry.number}" if name == "full" else f"gpu-{entry.number}-{name}"
            [device] = [device for device in possible(entry) if device.name == spelled]
            gpus[uuid] = replace(entry, held=(*entry.held, device))
    return Fleet.of(gpus.values())


def device_of(fleet: Fleet, offer: Offer) -> Device:
    """The device that ``offer`` stands for, which must be possible."""
    [device] = [device for device in possible(fleet.gpus[offer.gpu]) if device.offer == offer]
    return device


def take(fleet: Fleet, offer: Offer) -> Fleet:
    """``fleet`` once ``offer`` is held."""
    entry = fleet.gpus[offer.gpu]
    return Fleet.of({**fleet.gpus, offer.gpu: replace(entry, held=(*entry.held, device_of(fleet, offer)))}.values())


def possible(entry: FleetGpu) -> tuple[Device, ...]:
    """What it could offer now: what fits beside what is held, without a reset, as settings and labels allow."""
    names = {device.name for device in entry.held}
    fitting = (device for device in entry.devices if entry.state.fits(device))
    return tuple(device for device in fitting if device.kind in entry.state.kinds and device.name not in names)
