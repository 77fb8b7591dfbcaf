"""Removing what was made for a claim: CDI spec, time-slice interval, partitions and, at the end, the record."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from driver.errors import ClaimError, RecoverableError, StateError
from driver.model.device import Device
from driver.model.gpu import Gpu
from driver.model.offer import DeviceKind
from kubelet_plugin.changes import ChangeNotifier, NodeChange
from kubelet_plugin.checkpoint.gpu_and_claim_locks import claim_key
from kubelet_plugin.checkpoint.records import ClaimRecord, DeviceRecord, device_of, device_record
from kubelet_plugin.claims.claim_memory import GpuSettingsOfClaims
from kubelet_plugin.claims.claim_stores import ClaimStores
from kubelet_plugin.claims.partitions import Partitions
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.step_names import NodeStep, StepRunner

log = logging.getLogger(__name__)

PARTITION_UUID_PREFIX = "MIG-"


@dataclass(frozen=True, slots=True)
class ClaimCleanup:
    """Thread-safe. Every method can be repeated after a kill at any instruction; all raise RecoverableError."""

    _stores: ClaimStores
    _partitions: Partitions
    settings: GpuSettingsOfClaims
    _changes: ChangeNotifier
    _step: StepRunner

    # The caller holds the locks of the claim and of its GPUs

    def release(self, record: ClaimRecord) -> None:
        """Undo a claim that may be prepared. From now on it needs to be released, also after a restart."""
        if not record.needs_release:
            record = msgspec.structs.replace(record, releasing=True)
            with self._step(NodeStep.MARK_RELEASING, claim=record):
                # A power cut may lose the mark, but it also removes the partitions.
                self._put(record, durable=False)
        self.undo(record)

    def undo(self, record: ClaimRecord) -> None:
        """Remove CDI spec, time-slice interval, partitions and record, in this order.

        Continues after an error: then the record stays, and the first error is raised.
        """
        try:
            self._undo(record)
        except RecoverableError:
            self._changes.report(NodeChange.RELEASE_FAILED)
            raise
        self._changes.report(NodeChange.RELEASED)

    # The caller holds no lock

    def finish_release(self, uid: str) -> bool:
        """Undo a claim that needs to be released; False if it does not, or not any more."""
        stores = self._stores
        with stores.locks.hold([claim_key(uid)], f"releasing claim {uid}"):
            record = stores.checkpoint.get(uid)
            if record is None or not record.needs_release:
                return False
            with stores.locks.hold(record.gpu_uuids, f"releasing claim {record}"):
                self.undo(record)
        log.warning("released what was left of a claim", extra={"claim": str(record)})
        return True

    def note_stray_spec(self, uid: str) -> None:
        """Count a claim that has a CDI spec and no record as unrecorded, and hold the devices in the spec."""
        stores = self._stores
        with stores.locks.hold([claim_key(uid)], f"looking at the CDI spec of claim {uid}"):
            if stores.checkpoint.get(uid) is None and stores.cdi.has(uid):
                stores.checkpoint.note_missing(uid)
                stores.hold_unrecorded(uid)

    def write_release_record(self, reference: ClaimReference) -> bool:
        """Write a record, marked for release, of the devices in the CDI spec of an unrecorded claim.

        Returns whether the claim now has a record.

        Call it only for a claim that is known to be unused: the kubelet unprepares it, or it does not exist any more.
        """
        uid, checkpoint = reference.uid, self._stores.checkpoint
        with self._stores.locks.hold([claim_key(uid)], f"rebuilding the record of claim {uid}"):
            if uid not in checkpoint.unrecorded:
                return checkpoint.get(uid) is not None
            record = self.record_of_spec(reference)
            if record is None:
                self._stores.inventory.release(uid)
            else:
                self._put(record)
            checkpoint.settle_unrecorded(uid)
        return record is not None

    def record_of_spec(self, reference: ClaimReference) -> ClaimRecord | None:
        """A record, marked for release, of the devices in the CDI spec of an unrecorded claim; None without a spec."""
        stores = self._stores
        if not stores.cdi.has(reference.uid):
            return None
        named = stores.cdi.devices(reference.uid)
        entries = [self._entry(reference, key, uuid) for key, uuid in named.items()]
        devices = tuple(entry for entry in entries if entry is not None)
        return ClaimRecord.of(reference, "prepared", devices, stores.boot, releasing=True)

    def _entry(self, reference: ClaimReference, key: str, uuid: str) -> DeviceRecord | None:
        """The record of one device to release; None if there is nothing to release.

        That is the case if the device is unknown and is not a partition, if what another claim holds overlaps it, or if
        its partition is gone, was replaced, or may be one that Tessera did not create.
        """
        stores = self._stores
        name = device_of(key) if uuid.startswith(PARTITION_UUID_PREFIX) else key
        device = stores.inventory.device(name)
        if device is None:
            if not uuid.startswith(PARTITION_UUID_PREFIX):
                return None
            stores.require_driver(f"claim {reference}: partition {uuid} ({name}) can't be removed")
            raise ClaimError(
                f"claim {reference}: its CDI spec names partition {uuid} ({name}), of a GPU that did not answer since "
                "the plugin started; the partition is removed once the GPU is back; if the GPU is gone for good, "
                "delete the CDI spec and restart the plugin"
            )
        if stores.inventory.conflict(reference.uid, device) is not None:
            return None
        entry = device_record(device, stores.pool.name, (), stores.inventory.number(device.gpu))
        if device.profile is None:
            return entry
        partition = self._partitions.find(device, uuid)
        if partition is None or partition.uuid != uuid or self._partitions.publishes_existing:
            return None
        return entry.with_partition(partition)

    def reason_not_to_release(self, record: ClaimRecord) -> str:
        """Why ``record`` must not be released; ``""`` if it may.

        Only full GPUs are checked: NVML itself refuses to destroy a partition in use. No process outlives a reboot.
        """
        if record.is_of_earlier_boot(self._stores.boot):
            return ""
        for device in record.devices:
            gpu = self._stores.inventory.gpu(device.gpu_uuid)
            if device.kind is not DeviceKind.FULL or gpu is None:
                continue
            try:
                running = self._partitions.host.processes(gpu)
            except RecoverableError as error:
                return str(error)
            if running:
                return f"{running} processes still run on {device.gpu_uuid}"
        return ""

    def partition_exists(self, uid: str, device: Device, uuid: str | None) -> bool:
        """Whether ``device`` exists as the partition with that UUID, and no claim but ``uid`` holds it."""
        if device.profile is None or self._stores.inventory.conflict(uid, device):
            return False
        try:
            partition = self._partitions.find(device, uuid)
        except RecoverableError:
            return False
        return partition is not None and partition.uuid is not None and partition.uuid == uuid

    def _put(self, record: ClaimRecord, *, durable: bool = True) -> None:
        try:
            self._stores.checkpoint.put(record, durable=durable)
        except StateError as error:
            # The mark is in memory at least. A full disk must not prevent a release: deleting needs no space.
            log.warning("can't mark a claim as being released", extra={"claim": str(record), "error": str(error)})

    def _undo(self, record: ClaimRecord) -> None:
        work = [partial(self._remove_spec, record)]
        gpus = sorted(record.gpu_uuids)
        work += [partial(self._restore, release, record, uuid) for uuid in gpus for release in self.settings.releases]
        work += [partial(self._remove_partition, record, device) for device in record.devices]
        failures: list[RecoverableError] = []
        for undo in work:
            try:
                undo()
            except RecoverableError as error:
                failures.append(error)
        for failure in failures[1:]:
            log.error("could not undo", extra={"claim": str(record), "error": str(failure)})
        if failures:
            raise failures[0]
        with self._step(NodeStep.REMOVE_RECORD, claim=record):
            self._stores.checkpoint.remove(record.uid)
            self._stores.inventory.release(record.uid)

    def _remove_spec(self, record: ClaimRecord) -> None:
        with self._step(NodeStep.REMOVE_CDI_SPEC, claim=record):
            if record.adopted is None:
                self._stores.cdi.remove(record.uid)
            else:
                self._stores.cdi.remove_adopted(record.uid)

    def _restore(self, release: Callable[[Gpu, ClaimRecord], None], record: ClaimRecord, uuid: str) -> None:
        gpu = self._stores.inventory.gpu(uuid)
        # A GPU that does not answer has lost its settings or accepts no others: the release does not wait for it.
        if gpu is not None and self._stores.inventory.fault(gpu) is None:
            release(gpu, record)

    def _remove_partition(self, record: ClaimRecord, device: DeviceRecord) -> None:
        if device.profile is None or device.preexisting:
            return
        if record.is_of_earlier_boot(self._stores.boot):
            return  # the reboot has removed it, and what is there now is somebody else's
        gpu = self._stores.inventory.gpu(device.gpu_uuid)
        if gpu is None:
            self._stores.require_driver(f"claim {record}: partition {device.device} can't be removed")
            raise ClaimError(
                f"claim {record}: {device.device} is on {device.gpu_uuid}, which did not answer since the plugin "
                "started; its partition is removed once the GPU is back; where it is gone for good, delete "
                f"{self._stores.checkpoint.path(record.uid)} and restart the plugin"
            )
        if record.adopted is None or self._is_adopted_partition(record, device, gpu):
            self._partitions.remove(gpu, device, self._of_others(record, device))

    def _of_others(self, record: ClaimRecord, device: DeviceRecord) -> list[DeviceRecord]:
        """What other claims have of the shared partition ``device``.

        Raises ClaimError while a claim without a record could have some of it: all that has no record is removed.
        """
        if device.kind is not DeviceKind.SHARED_PARTITION:
            return []
        checkpoint = self._stores.checkpoint
        if checkpoint.unrecorded - {record.uid}:
            raise ClaimError(
                f"claim {record}: the compute instance of {device.device} can't be removed while records of other "
                "claims are unreadable or missing; it is removed once they are rebuilt"
            )
        others = (other for other in checkpoint.records() if other.uid != record.uid)
        current = (other for other in others if not other.is_of_earlier_boot(self._stores.boot))
        return [item for other in current for item in other.devices if item.device == device.device]

    def _is_adopted_partition(self, record: ClaimRecord, device: DeviceRecord, gpu: Gpu) -> bool:
        """Whether the partition at the place of ``device`` is the one that NVIDIA's driver recorded for this claim.

        Without a UUID in that record it never finished; a partition without one lost its compute instance before. A
        place that several claims have, under whatever names, is emptied with the last of them.
        """
        others = (other for other in self._stores.checkpoint.records() if other.uid != record.uid)
        places = {(item.gpu_uuid, item.placement) for other in others for item in other.devices}
        if (device.gpu_uuid, device.placement) in places:
            return False
        at_place = (item for item in self._partitions.host.partitions(gpu) if item.placement == device.placement)
        return device.uuid is None or all(item.uuid in (None, device.uuid) for item in at_place)
