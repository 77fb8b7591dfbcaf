"""Preparing and unpreparing one claim, step by step.

The order makes a kill at any instruction harmless: intent on disk, partitions, CDI spec, "prepared" on disk, answer.
Undoing goes the other way, and the record goes last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from msgspec.structs import replace

from driver.errors import ClaimError, HardwareError, RecoverableError, StateError
from driver.kube.client import KubeClient
from driver.kube.get_and_list import list_claims, read_claim
from driver.kube.types import Claim
from driver.model.device import Device
from driver.model.gpu import Partition
from kubelet_plugin.cdi.spec_format import CdiDevice
from kubelet_plugin.changes import ChangeNotifier, NodeChange
from kubelet_plugin.checkpoint.gpu_and_claim_locks import claim_key
from kubelet_plugin.checkpoint.records import Adoption, ClaimRecord, DeviceRecord, MonitorRecord, device_record
from kubelet_plugin.claims.allocation import AllocatedDevice, ResolvedClaim, refuse_unusable, resolve
from kubelet_plugin.claims.claim_memory import UNSAID, GpuSettingsOfClaims
from kubelet_plugin.claims.claim_stores import ClaimStores
from kubelet_plugin.claims.cleanup import ClaimCleanup
from kubelet_plugin.claims.partitions import Partitions
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.step_names import NodeStep, StepRunner

log = logging.getLogger(__name__)

ENTRIES_OF_MONITOR = 4
"""Space reserved for a monitor device in the CDI spec, counted in entries of other devices."""


@dataclass(frozen=True, slots=True)
class PreparedDevice:
    """Answer to the kubelet about one device."""

    requests: tuple[str, ...]
    pool: str
    device: str
    cdi_device_ids: tuple[str, ...]
    share_id: str = ""


class ClaimReader:
    """Reads ResourceClaims from the API server; ``observe`` receives each claim that ``read`` returns."""

    def __init__(self, client: KubeClient, observe: Callable[[Claim], None]) -> None:
        self._client, self._observe = client, observe

    def read(self, namespace: str, name: str, *, any_age: bool = False) -> Claim:
        """Read a claim; ``any_age``: a cached answer is sufficient. Raises ApiError, with status 404 if it is gone."""
        claim = read_claim(self._client, namespace, name, any_age=any_age)
        self._observe(claim)
        return claim

    def read_all(self) -> Iterable[Claim]:
        """Read all claims of the cluster. Raises ApiError."""
        return list_claims(self._client)


class Preparer:
    """Thread-safe: claims that share no GPU never wait for each other. All methods raise RecoverableError.

    ``repaired`` receives the record of a prepared claim that got back what it had lost, and a description of that.
    """

    def __init__(
        self,
        claims: ClaimReader,
        stores: ClaimStores,
        partitions: Partitions,
        gpu_settings: GpuSettingsOfClaims,
        changes: ChangeNotifier,
        repaired: Callable[[ClaimRecord, str], None],
        steps: StepRunner,
    ) -> None:
        self.cleanup = ClaimCleanup(stores, partitions, gpu_settings, changes, steps)
        self._claims, self._stores, self._partitions, self.gpu_settings = claims, stores, partitions, gpu_settings
        self._changes, self._repaired, self._step = changes, repaired, steps

    def prepare(self, reference: ClaimReference) -> Sequence[PreparedDevice]:
        """Make the claim's devices usable. Idempotent: a repeat verifies and repairs.

        A repeat reads the claim, too, as Kubernetes' own library for drivers does. If a pod was deleted by force while
        its kubelet was down, the claim may have been allocated anew, and the kubelet, which does not compare
        allocations, asks for the same UID.

        If it fails, a claim that was not prepared before leaves nothing behind. What could not be undone is recorded: a
        repeat for the same allocation continues from there; unprepare, ClaimReconciler and the next start undo it.
        """
        stores, name = self._stores, str(reference)
        with stores.locks.hold([claim_key(reference.uid)], f"preparing claim {name}"):
            with self._step(NodeStep.READ_CLAIM, claim=reference):
                claim = self._claims.read(reference.namespace, reference.name)
            record = stores.checkpoint.get(reference.uid)
            if record is not None and record.adopted is not None and claim.metadata.uid == record.uid:
                if claim.results_in(stores.pool.driver, record.pools):
                    return self._adopted_answer(record, record.adopted)
                with stores.locks.hold(record.gpu_uuids, f"claim {name}"):
                    self.cleanup.release(record)  # the claim was allocated anew
                record = None
            with self._step(NodeStep.RESOLVE_ALLOCATION, claim=reference):
                allocated = resolve(reference, claim, stores.pool, stores.inventory)
            gpu_uuids = {item.device.gpu.uuid for item in allocated.devices}
            if record is not None:
                gpu_uuids |= record.gpu_uuids
            with stores.locks.hold(gpu_uuids, f"claim {name}"):
                record = self._prepare_allocated(reference, record, allocated)
        for uid in self.gpu_settings.memory.claims_of_same_pods(record) if record.pods else ():
            self.repair(uid)  # a pod with several claims: their CDI specs say no limit of a container
        entries: tuple[DeviceRecord | MonitorRecord, ...] = (*record.devices, *record.monitors)
        log.info(
            "prepared claim",
            extra={
                "claim": name,
                "pod": ",".join(user.name for user in claim.status.reserved_for if user.resource == "pods"),
                "devices": ",".join(entry.device for entry in entries),
                "gpus": ",".join(sorted({entry.gpu_uuid for entry in entries})),
            },
        )
        device_id = stores.cdi.specs.device_id
        named = [(e, device_id(record.uid, e.key if e.share_id else e.device)) for e in entries]
        return [PreparedDevice(e.requests, e.pool, e.device, (name,), e.share_id) for e, name in named]

    def _adopted_answer(self, record: ClaimRecord, adopted: Adoption) -> Sequence[PreparedDevice]:
        """The answer of NVIDIA's driver, whose CDI spec the claim's running containers have."""
        if adopted.unfinished or record.releasing:
            raise ClaimError(f"claim {record}: {adopted.must_end or 'it is being released'}; delete the pod")
        ids = adopted.cdi_device_ids
        if any("/claim=" in name for name in chain(*ids.values())) and not self._stores.cdi.has_adopted(record.uid):
            raise ClaimError(f"claim {record}: its CDI spec, of NVIDIA's DRA driver, is gone; delete the pod")
        log.info("a prepared claim of NVIDIA's DRA driver was asked for again", extra={"claim": str(record)})
        entries: tuple[DeviceRecord | MonitorRecord, ...] = (*record.devices, *record.monitors)
        return [PreparedDevice(entry.requests, entry.pool, entry.device, ids[entry.device]) for entry in entries]

    def unprepare(self, reference: ClaimReference) -> None:
        """Release the claim's devices. Idempotent: an unknown claim counts as released.

        From the first call on, the claim needs release: what can't be removed now, ClaimReconciler removes later.
        """
        stores = self._stores
        if stores.checkpoint.is_unrecorded(reference.uid):
            if not stores.cdi.has(reference.uid):
                raise StateError(
                    f"claim {reference}: its checkpoint record is unreadable or missing, and so is its CDI spec; it is "
                    "released once its record has been rebuilt, or the API server has reported that the claim is gone; "
                    "if its GPU is gone for good, force-delete the pod"
                )
            self.cleanup.write_release_record(reference)
        with stores.locks.hold([claim_key(reference.uid)], f"unpreparing claim {reference}"):
            record = stores.checkpoint.get(reference.uid)
            if record is None:
                return
            with stores.locks.hold(record.gpu_uuids, f"claim {reference}"):
                self.cleanup.release(record)
        log.info("unprepared claim", extra={"claim": str(reference)})

    def losses(self) -> Iterator[tuple[ClaimRecord, Sequence[str]]]:
        """The prepared claims, and what each has lost. A claim that changes meanwhile is checked again before a
        repair."""
        records = self._stores.prepared()
        try:
            specs = set(self._stores.cdi.claim_uids())
        except RecoverableError as error:
            log.warning("can't list the CDI specs", extra={"error": str(error)})
            specs = {record.uid for record in records}
        partitions_by_gpu = {uuid: self._partitions_on(uuid) for record in records for uuid in record.gpu_uuids}
        for record in records:
            answering = all(partitions_by_gpu[uuid] is not None for uuid in record.gpu_uuids)
            missing = record.uid not in specs or (answering and not self._stores.cdi.is_current(record.uid))
            lost = ["its CDI spec"] if missing else []
            for entry in record.devices:
                partitions = partitions_by_gpu[entry.gpu_uuid]
                if entry.profile is not None and partitions is not None and entry.partition not in partitions:
                    lost.append(entry.device)
            yield record, lost

    def _partitions_on(self, uuid: str) -> Sequence[Partition] | None:
        """The partitions of a GPU; None if it does not answer: then none of its partitions counts as lost."""
        gpu = self._stores.inventory.gpu(uuid)
        if gpu is None or self._stores.inventory.fault(gpu) is not None:
            return None
        try:
            return self._partitions.host.partitions(gpu)
        except RecoverableError:
            return None

    def repair(self, uid: str) -> bool:
        """Make again what a prepared claim has lost; False if it is not prepared any more.

        A partition that is created again has another UUID: only containers that start afterwards get it.
        """
        stores = self._stores
        with stores.locks.hold([claim_key(uid)], f"repairing claim {uid}"):
            record = stores.checkpoint.get(uid)
            if record is None or not record.prepared_in_this_boot(stores.boot):
                return False
            with stores.locks.hold(record.gpu_uuids, f"repairing claim {record}"):
                devices = [self._as_recorded(record, entry) for entry in record.devices]
                self._ensure_prepared(record, devices, {})
        self._changes.report(NodeChange.PREPARED)
        return True

    def _as_recorded(self, record: ClaimRecord, entry: DeviceRecord) -> AllocatedDevice:
        device = self._stores.recorded_device(entry)
        fault = None if device is None else self._stores.inventory.fault(device.gpu)
        if device is None or fault is not None:
            raise HardwareError(f"claim {record}: {entry.device} can't be used at present: {fault or 'no such device'}")
        return AllocatedDevice(device, entry.requests, entry.time_slice, entry.share_id, entry.key)

    # The caller holds the locks of the claim and of its GPUs

    def _prepare_allocated(
        self, reference: ClaimReference, record: ClaimRecord | None, allocated: ResolvedClaim
    ) -> ClaimRecord:
        """Prepare ``allocated``. If ``record`` is of an earlier allocation of the claim, that one is released first."""
        stores = self._stores
        if record is not None and {entry.key for entry in record.devices} != {item.key for item in allocated.devices}:
            extra = {"claim": str(record), "devices": ",".join(sorted(record.names))}
            log.warning("a prepared claim was allocated anew: releasing the earlier devices", extra=extra)
            self.cleanup.release(record)
            record = None
        pods = tuple(sorted({*(record.pods if record else ()), *allocated.pods}))
        if record is not None and (record.monitors, record.pods) != (allocated.monitors, pods):
            # The record is of a version or an allocation without these monitor devices, or other pods use the claim:
            # the limits of earlier ones are lifted with it.
            record = replace(record, monitors=allocated.monitors, pods=pods)
            stores.checkpoint.put(record)
        refuse_unusable(reference, allocated.devices, stores.inventory)
        # Held before the intent is on disk: concurrent work must find the devices taken.
        stores.inventory.hold(reference, [item.device for item in allocated.devices])
        # A claim that was prepared, even one without its record, may be in use: a failure here undoes nothing.
        if record is None and stores.checkpoint.is_unrecorded(reference.uid):
            prepared = self._ensure_prepared(self._rebuild_record(reference, allocated), allocated.devices, {})
        elif record is not None and record.prepared_in_this_boot(stores.boot):
            prepared = self._ensure_prepared(record, allocated.devices, {})
        else:
            if record is not None and record.is_of_earlier_boot(stores.boot):
                record = None  # nothing of it exists: what is at its placements now is somebody else's
            prepared = self._prepare_first(reference, record, allocated)
        if prepared is not record:
            self._changes.report(NodeChange.PREPARED)
        return prepared

    def _prepare_first(
        self, reference: ClaimReference, record: ClaimRecord | None, allocated: ResolvedClaim
    ) -> ClaimRecord:
        """Prepare a claim that is not prepared, and undo a failure.

        ``record``: that of a prepare or a release that did not finish; None: there was none.
        """
        stores = self._stores
        mig_modes: dict[str, bool | None] = {}
        try:
            # Refuse the claim before anything is created if the CDI directory has no space for its spec.
            with self._step(NodeStep.RESERVE_CDI_SPEC, claim=reference):
                entries = len(allocated.devices) + ENTRIES_OF_MONITOR * len(allocated.monitors)
                stores.cdi.reserve(reference.uid, entries)
            if record is None:
                with self._step(NodeStep.CHECK_FREE, claim=reference):
                    for item in allocated.devices:
                        if not stores.inventory.is_preexisting(item.device):
                            mig_modes[item.device.gpu.uuid] = self._partitions.check_free(item.device, reference.uid)
                record = self._new_record(reference, allocated, "preparing")
                # Unless a partition, MIG mode or a time slice is changed, a power cut leaves nothing to undo.
                changes_gpu = any(
                    mig_modes.get(entry.gpu_uuid) or entry.profile or entry.time_slice for entry in record.devices
                )
                with self._step(NodeStep.WRITE_INTENT, claim=reference):
                    stores.checkpoint.put(record, durable=changes_gpu)
            return self._ensure_prepared(record, allocated.devices, mig_modes)
        except RecoverableError:
            self._undo_quietly(reference)
            raise

    def _new_record(
        self, reference: ClaimReference, allocated: ResolvedClaim, phase: Literal["preparing", "prepared"]
    ) -> ClaimRecord:
        stores = self._stores
        entries = [
            device_record(
                item.device,
                stores.pool.name,
                item.requests,
                stores.inventory.number(item.device.gpu),
                preexisting=stores.inventory.is_preexisting(item.device),
                time_slice=item.time_slice,
                share_id=item.share_id,
                threads=item.threads,
                compute_mode=self.gpu_settings.mps.mode_to_restore(item.device) if item.share_id else None,
            )
            for item in allocated.devices
        ]
        fields = {"monitors": allocated.monitors, "pods": allocated.pods, "of_one_pod": allocated.of_one_pod}
        return ClaimRecord.of(reference, phase, tuple(entries), stores.boot, **fields)

    def _rebuild_record(self, reference: ClaimReference, allocated: ResolvedClaim) -> ClaimRecord:
        """Write a record of a claim whose record was lost. It may be in use: the record never says to release it.

        A partition at the placement of a device is the claim's own; a GPU that is held as a whole must have none.
        """
        stores = self._stores
        with self._step(NodeStep.CHECK_FREE, claim=reference):
            for item in allocated.devices:
                if item.device.profile is None and not stores.inventory.is_preexisting(item.device):
                    self._partitions.check_free(item.device, reference.uid)
        record = self._new_record(reference, allocated, "prepared")
        pairs = zip(allocated.devices, record.devices, strict=True)
        uuids = stores.uuids_in_spec(reference.uid)
        devices = (self._with_found_partition(item.device, entry, uuids.get(item.key)) for item, entry in pairs)
        record = replace(record, devices=tuple(devices))
        with self._step(NodeStep.WRITE_INTENT, claim=reference):
            stores.checkpoint.put(record)
        stores.checkpoint.settle_unrecorded(reference.uid)
        return record

    def _with_found_partition(self, device: Device, entry: DeviceRecord, uuid: str | None) -> DeviceRecord:
        """``entry`` with the partition that is at its placement now."""
        partition = self._partitions.find(device, uuid)
        if partition is not None and not entry.share_id and partition.complete and self._partitions.publishes_existing:
            # It may be a partition that Tessera did not create: it is never removed.
            entry = replace(entry, preexisting=True)
        return entry.with_partition(partition)

    def _ensure_prepared(
        self, record: ClaimRecord, allocated: Sequence[AllocatedDevice], mig_modes: dict[str, bool | None]
    ) -> ClaimRecord:
        """Make the partitions, write the CDI spec, write "prepared"; each only if it is not done yet.

        ``mig_modes``: whether GPUs that were checked just now are in MIG mode, by UUID; updated here.
        """
        stores, was_prepared = self._stores, record.prepared_in_this_boot(self._stores.boot)
        entries = {(entry.device, entry.share_id): entry for entry in record.devices}
        devices: list[CdiDevice] = []
        for item in allocated:
            device, part = item.device, (item.device.name, item.share_id)
            entry = entries[part]
            if was_prepared:
                partition = self._partitions.verify(device, entry)
            else:
                partition = self._partitions.make(device, entry, mig_modes.get(device.gpu.uuid))
                if device.gpu.uuid in mig_modes:
                    # Making the device has switched the GPU: on for a partition, off otherwise.
                    mig_modes[device.gpu.uuid] = partition is not None
            uuid = device.gpu.uuid if partition is None else str(partition.uuid)
            nodes = self._partitions.nodes(device.gpu, partition)
            memory = self.gpu_settings.memory.in_container(device.gpu, entry, record) if entry.gib else UNSAID
            devices.append(CdiDevice(item.key, uuid, nodes, device.shares, entry.gib, *memory))
            entries[part] = entry.with_partition(partition)
        for monitor in record.monitors:
            nodes = self._partitions.monitor_device_nodes(monitor.gpu_uuid)
            devices.append(CdiDevice(monitor.device, monitor.gpu_uuid, nodes))
        for gpu in {item.device.gpu.uuid: item.device.gpu for item in allocated}.values():
            if any(entry.time_slice or entry.gib for entry in record.devices):
                access = self.gpu_settings.apply(gpu, record)
                devices = [device.with_mps(access.get(device.name)) for device in devices]
        with self._step(NodeStep.WRITE_CDI_SPEC, claim=record):
            spec_written = stores.cdi.write(record.uid, devices, reserved=not was_prepared)
        prepared = replace(record, phase="prepared", devices=tuple(entries.values()), boot=stores.boot, releasing=False)
        if prepared == record:
            prepared = record
        else:
            with self._step(NodeStep.WRITE_PREPARED, claim=record):
                stores.checkpoint.put(prepared)
        if was_prepared:
            self._report_repairs(record, prepared, spec_written=spec_written)
        return prepared

    def _report_repairs(self, before: ClaimRecord, now: ClaimRecord, *, spec_written: bool) -> None:
        made = [
            f"{new.device} was cut again: {new.uuid} instead of {old.uuid or 'none'}; "
            "containers that start from now on get it"
            for old, new in zip(before.devices, now.devices, strict=True)
            if old.uuid != new.uuid
        ]
        if not made and spec_written:
            made = ["its CDI spec was written again"]
        if made:
            log.warning("repaired a prepared claim", extra={"claim": str(now), "made": "; ".join(made)})
            self._repaired(now, "; ".join(made))

    def _undo_quietly(self, reference: ClaimReference) -> None:
        record = self._stores.checkpoint.get(reference.uid)
        try:
            if record is not None:
                self.cleanup.undo(record)
                return
            self._stores.inventory.release(reference.uid)
            self._stores.cdi.unreserve(reference.uid)
        except RecoverableError as error:
            extra = {"claim": str(reference), "error": str(error)}
            log.error("a failed prepare could not be undone; it stays recorded and is undone later", extra=extra)
