"""State and services that all work on claims shares."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from driver.errors import StateError
from driver.hardware.node_gpus import Host
from driver.model.device import Device, devices_of, share_index
from driver.model.offer import SHARE, DeviceKind, Spot
from driver.slices.pool_names import Pool
from kubelet_plugin.cdi.spec import CdiDirectory, DriverFiles
from kubelet_plugin.checkpoint.gpu_and_claim_locks import KeyedLocks
from kubelet_plugin.checkpoint.records import Checkpoint, DeviceRecord
from kubelet_plugin.claims.partitions import Partitions, TimeSlices
from kubelet_plugin.claims.steps import Steps
from kubelet_plugin.inventory.inventory import Inventory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginContext:
    """``boot`` is the machine's boot id: partitions do not outlive a boot. ``existing_published``: partitions that
    Tessera did not create are published, so a partition without a record may be one of them."""

    pool: Pool
    host: Host
    inventory: Inventory
    checkpoint: Checkpoint
    cdi: CdiDirectory
    files: DriverFiles
    partitions: Partitions
    time_slices: TimeSlices
    step: Steps
    locks: KeyedLocks
    boot: str = ""
    existing_published: bool = False

    def recorded_device(self, entry: DeviceRecord) -> Device | None:
        """Return the device as it was allocated, even if its profile or number of shares has changed since.

        None if its GPU is unknown or has no such device any more.
        """
        known = self.inventory.device(entry.device)
        if known is not None and known.gpu.uuid == entry.gpu_uuid and known.shares == entry.shares:
            return known
        gpu = self.inventory.gpu(entry.gpu_uuid)
        if gpu is not None and entry.kind is DeviceKind.SHARE:
            return Device(entry.device, gpu, Spot(SHARE, share_index(entry.device)), shares=entry.shares)
        for device in devices_of(gpu, entry.number) if gpu is not None else ():
            same_profile = device.profile is not None and device.profile.id == entry.profile_id
            if same_profile and device.placement == entry.placement:
                return replace(device, name=entry.device)
        return None

    def hold_unrecorded(self, uid: str) -> None:
        """Hold the known devices in the CDI spec of a claim without a checkpoint record."""
        try:
            devices = [self.inventory.device(name) for name in self.cdi.devices(uid)]
        except StateError as error:
            log.error("can't read which devices a claim has", extra={"claimUID": uid, "error": str(error)})
            return
        self.inventory.hold_unrecorded(uid, [device for device in devices if device is not None])
