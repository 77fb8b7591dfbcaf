"""The places where this node keeps its claims."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from driver.errors import HardwareError, StateError
from driver.model.device import Device, devices_of, share_index
from driver.model.offer import SHARE, SHARED, DeviceKind, Spot
from driver.slices.slice_names import Pool
from kubelet_plugin.cdi.spec_files import CdiDirectory
from kubelet_plugin.checkpoint.gpu_and_claim_locks import KeyedLocks
from kubelet_plugin.checkpoint.records import Checkpoint, ClaimRecord, DeviceRecord, device_of
from kubelet_plugin.inventory.inventory import Inventory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimStores:
    """Where claims are kept: records on disk, devices in memory, specs for the container runtime; and their locks.

    ``pool``: of the node's devices. ``boot``: the machine's boot id, because partitions do not outlive a boot.
    ``missing_driver``: why the node's GPUs are not known yet; None: they are.
    """

    pool: Pool
    inventory: Inventory
    checkpoint: Checkpoint
    cdi: CdiDirectory
    locks: KeyedLocks
    boot: str = ""
    missing_driver: Callable[[], str | None] = lambda: None

    def require_driver(self, what: str) -> None:
        """Raise HardwareError if the node's driver is missing. ``what`` begins the message: "X can't be removed"."""
        missing = self.missing_driver()
        if missing is not None:
            raise HardwareError(f"{what} before the node's NVIDIA driver can be used: {missing}")

    def prepared(self) -> list[ClaimRecord]:
        """The claims that Tessera prepared in this boot: what they hold exists unless it was lost."""
        records = (record for record in self.checkpoint.records() if record.adopted is None)
        return [record for record in records if record.prepared_in_this_boot(self.boot)]

    def recorded_device(self, entry: DeviceRecord) -> Device | None:
        """Return the device as it was allocated, even if its profile was renamed or its GPU has other shares since.

        None if its GPU is unknown or has no such device any more.
        """
        current = self.inventory.device(entry.device)
        if current is not None and current.gpu.uuid == entry.gpu_uuid and current.shares == entry.shares:
            return current if current.shared is None else replace(current, spot=Spot(SHARED, entry.gib))
        gpu = self.inventory.gpu(entry.gpu_uuid)
        if gpu is not None and entry.kind is DeviceKind.SHARE:
            return Device(entry.device, gpu, Spot(SHARE, share_index(entry.device)), shares=entry.shares)
        for device in devices_of(gpu, entry.number) if gpu is not None else ():
            same_profile = device.profile is not None and device.profile.id == entry.profile_id
            if same_profile and device.placement == entry.placement:
                return replace(device, name=entry.device)
        return None

    def hold_record(self, record: ClaimRecord) -> None:
        """Hold the devices of ``record`` that this node still has."""
        if record.adopted is not None:
            self.inventory.hold_adopted(
                record.uid, {uuid: self._adopted_reason(record, uuid) for uuid in record.gpu_uuids}
            )
            return
        devices = []
        for entry in record.devices:
            device = self.recorded_device(entry)
            if device is not None:
                devices.append(device)
                continue
            extra = {"claim": str(record), "device": entry.device, "gpu": entry.gpu_uuid}
            log.error("a held device is not on this node any more", extra=extra)
        self.inventory.hold(record.reference, devices)

    @staticmethod
    def _adopted_reason(record: ClaimRecord, gpu_uuid: str) -> str:
        names = ", ".join(entry.device for entry in record.devices if entry.gpu_uuid == gpu_uuid)
        why = f" ({record.adopted.must_end})" if record.adopted and record.adopted.must_end else ""
        held = f"claim {record}, which NVIDIA's DRA driver prepared, holds {names} of it{why}"
        return f"{held}: nothing is offered until its pod ends"

    def hold_unrecorded(self, uid: str) -> None:
        """Hold the known devices in the CDI spec of a claim without a checkpoint record."""
        devices = [self.inventory.device(device_of(key)) for key in self.uuids_in_spec(uid)]
        self.inventory.hold_unrecorded(uid, [device for device in devices if device is not None])

    def uuids_in_spec(self, uid: str) -> dict[str, str]:
        """The UUIDs of devices in the CDI spec of a claim, by key; empty if it can't be read."""
        try:
            return self.cdi.devices(uid)
        except StateError as error:
            log.error("can't read which devices a claim has", extra={"claimUID": uid, "error": str(error)})
            return {}

    def hold_all(self) -> None:
        """Hold the devices of records and of CDI specs without a record, also on GPUs that have come back.

        May run concurrently with prepare and unprepare: a record that changes meanwhile is read again.
        """
        for uid in self.checkpoint.unrecorded:
            self.hold_unrecorded(uid)
            if uid not in self.checkpoint.unrecorded and self.checkpoint.get(uid) is None:
                self.inventory.release(uid)
        for uid in [record.uid for record in self.checkpoint.records()]:
            self._hold_current(uid)

    def _hold_current(self, uid: str) -> None:
        """Repeat until the record that was held is still the current one; without one, release."""
        record = self.checkpoint.get(uid)
        while record is not None:
            self.hold_record(record)
            before, record = record, self.checkpoint.get(uid)
            if record is before:
                return
        self.inventory.release(uid)
