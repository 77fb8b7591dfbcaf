"""The devices that records are about, as this node knows them now."""

from __future__ import annotations

from dataclasses import replace

from driver.model.device import Device, DeviceKind, devices_of
from kubelet_plugin.inventory import Inventory
from kubelet_plugin.records import DeviceRecord


def device_of(inventory: Inventory, entry: DeviceRecord) -> Device | None:
    """The device of a record, as it was given out: a profile may have another name now, a GPU other shares.

    None where its GPU is not known, or has no such device any more.
    """
    known = inventory.device(entry.device)
    if known is not None and known.gpu.uuid == entry.gpu_uuid and known.shares == entry.shares:
        return known
    gpu = inventory.gpu(entry.gpu_uuid)
    if gpu is not None and entry.kind is DeviceKind.SHARE:
        return Device(entry.device, gpu, DeviceKind.SHARE, shares=entry.shares)
    for device in devices_of(gpu, entry.number) if gpu is not None else ():
        if device.profile is not None and device.profile.id == entry.profile_id and device.placement == entry.placement:
            return replace(device, name=entry.device)
    return None
