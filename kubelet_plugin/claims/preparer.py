"""Preparing and unpreparing one claim, step by step.

The order makes a kill at any instruction harmless: intent on disk, partitions, CDI spec, "prepared" on disk, answer.
Undoing goes the other way, and the record goes last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from driver.errors import HardwareError, RecoverableError, StateError
from driver.kube.client import KubeClient
from driver.kube.reads import list_claims, read_claim
from driver.kube.types import Claim
from driver.model.device import Device
from driver.model.gpu import Partition
from kubelet_plugin.cdi.spec import CdiDevice, build_spec, device_id, spec_room
from kubelet_plugin.checkpoint.gpu_and_claim_locks import claim_key
from kubelet_plugin.checkpoint.records import VERSION, ClaimRecord, DeviceRecord, device_record
from kubelet_plugin.claims.allocation import Allocated, refuse_overlap, resolve
from kubelet_plugin.claims.cleanup import ClaimCleanup, ClaimListeners
from kubelet_plugin.claims.context import PluginContext
from kubelet_plugin.claims.steps import Step
from kubelet_plugin.inventory.inventory import ClaimReference

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedDevice:
    """Answer to the kubelet about one device."""

    requests: tuple[str, ...]
    pool: str
    device: str
    cdi_device_ids: tuple[str, ...]


class ClaimReader:
    """Reads ResourceClaims from the API server; ``observe`` receives each claim that ``read`` returns."""

    def __init__(self, client: KubeClient, observe: Callable[[Claim], None]) -> None:
        self._client = client
        self._observe = observe

    def read(self, namespace: str, name: str, *, any_age: bool = False) -> Claim:
        """Read a claim; ``any_age``: a cached answer is sufficient. Raises ApiError, with status 404 if it is gone."""
        claim = read_claim(self._client, namespace, name, any_age=any_age)
        self._observe(claim)
        return claim

    def read_all(self) -> Iterable[Claim]:
        """Read all claims of the cluster. Raises ApiError."""
        return list_claims(self._client)


class Preparer:
    """Thread-safe: claims that share no GPU never wait for each other. All methods raise RecoverableError."""

    def __init__(
        self, context: PluginContext, claims: ClaimReader, cleanup: ClaimCleanup, listeners: ClaimListeners
    ) -> None:
        self._context = context
        self._claims = claims
        self._cleanup = cleanup
        self._listeners = listeners

    def prepare(self, reference: ClaimReference) -> Sequence[PreparedDevice]:
        """Make the claim's devices usable. Idempotent: a repeat verifies and repairs.

        If it fails, a claim that was not prepared before leaves nothing behind; what could not be undone stays
        recorded and is undone at the next call or start.
        """
        context = self._context
        with context.locks.hold([claim_key(reference.uid)], f"preparing claim {reference}"):
            with context.step(Step.READ_CLAIM, claim=str(reference)):
                claim = self._claims.read(reference.namespace, reference.name)
            with context.step(Step.RESOLVE_ALLOCATION, claim=str(reference)):
                allocated = resolve(reference, claim, context.pool, context.inventory)
            gpu_uuids = {item.device.gpu.uuid for item in allocated}
            if (known := context.checkpoint.get(reference.uid)) is not None:
                gpu_uuids |= known.gpu_uuids
            with context.locks.hold(gpu_uuids, f"claim {reference}"):
                record = self._prepare_allocated(reference, allocated)
        log.info(
            "prepared claim",
            extra={
                "claim": str(reference),
                "pod": claim.pods,
                "devices": ",".join(device.device for device in record.devices),
                "gpus": ",".join(sorted(record.gpu_uuids)),
            },
        )
        driver = context.pool.driver
        return [
            PreparedDevice(each.requests, each.pool, each.device, (device_id(driver, record.uid, each.device),))
            for each in record.devices
        ]

    def unprepare(self, reference: ClaimReference) -> None:
        """Release the claim's devices. Idempotent: an unknown claim is done.

        From the first call on the claim needs to be released: what can't be removed now, ClaimReconciler removes later.
        """
        context = self._context
        if reference.uid in context.checkpoint.unrecorded:
            if not context.cdi.has(reference.uid):
                raise StateError(
                    f"claim {reference}: its checkpoint record is unreadable or missing, and so is its CDI spec; it is "
                    "released once the record was rebuilt from the claim, or the API server has said that it is gone; "
                    "if its GPU is gone for good, force-delete the pod"
                )
            self._cleanup.begin_release(reference)
        with context.locks.hold([claim_key(reference.uid)], f"unpreparing claim {reference}"):
            record = context.checkpoint.get(reference.uid)
            if record is None:
                return
            with context.locks.hold(record.gpu_uuids, f"claim {reference}"):
                self._cleanup.release(record)
        log.info("unprepared claim", extra={"claim": str(reference)})

    def repair(self, uid: str) -> bool:
        """Make again what a prepared claim has lost; False if it is not prepared any more.

        A partition that is created again has another UUID: only containers that start afterwards get it.
        """
        context = self._context
        with context.locks.hold([claim_key(uid)], f"repairing claim {uid}"):
            record = context.checkpoint.get(uid)
            if record is None or not record.prepared_in_this_boot(context.boot):
                return False
            with context.locks.hold(record.gpu_uuids, f"repairing claim {record}"):
                self._finish(record, [self._as_recorded(record, entry) for entry in record.devices])
        self._listeners.prepared()
        return True

    def _as_recorded(self, record: ClaimRecord, entry: DeviceRecord) -> Allocated:
        device = self._context.recorded_device(entry)
        fault = None if device is None else self._context.inventory.fault(device.gpu)
        if device is None or fault is not None:
            raise HardwareError(f"claim {record}: {entry.device} can't be used at present: {fault or 'no such device'}")
        return Allocated(device, entry.requests, entry.time_slice)

    # The caller holds the locks of the claim and of its GPUs

    def _prepare_allocated(self, reference: ClaimReference, allocated: Sequence[Allocated]) -> ClaimRecord:
        """Prepare these devices, after undoing an earlier allocation of the claim."""
        context = self._context
        record = known = context.checkpoint.get(reference.uid)
        if record is not None and {each.device for each in record.devices} != {item.device.name for item in allocated}:
            self._release_earlier_allocation(record)
            record = known = None
        refuse_overlap(reference, allocated, context.inventory)
        # Containers may be running on devices that were prepared before, also if the record was lost.
        adopting = record is None and reference.uid in context.checkpoint.unrecorded
        repeat = adopting or (record is not None and record.prepared_in_this_boot(context.boot))
        # Held before the intent is on disk: concurrent work must find the devices taken.
        context.inventory.hold(reference, [item.device for item in allocated])
        try:
            if not repeat:
                # Refuse the claim before anything is created if the CDI directory has no space for its spec.
                with context.step(Step.RESERVE_CDI_SPEC, claim=str(reference)):
                    context.cdi.reserve(reference.uid, spec_room(context.files, len(allocated)))
            record = self._finish(record or self._write_intent(reference, allocated, adopting=adopting), allocated)
        except RecoverableError:
            if not repeat:
                self._undo_quietly(reference)
            raise
        if record is not known:
            self._listeners.prepared()
        return record

    def _release_earlier_allocation(self, record: ClaimRecord) -> None:
        log.warning(
            "claim was allocated anew while it was prepared: releasing the earlier devices",
            extra={"claim": str(record), "devices": ",".join(each.device for each in record.devices)},
        )
        self._cleanup.release(record)

    def _write_intent(
        self, reference: ClaimReference, allocated: Sequence[Allocated], *, adopting: bool
    ) -> ClaimRecord:
        """Write the record. ``adopting``: the claim is in use, so its record must never say that it needs release."""
        context = self._context
        with context.step(Step.CHECK_FREE, claim=str(reference)):
            for item in allocated:
                # If only the record was lost, a partition of the allocated placement is the claim's own.
                own = adopting and item.device.profile is not None
                if not own and not context.inventory.existing(item.device):
                    context.partitions.check_free(item.device)
        entries = [
            device_record(
                item.device,
                context.pool.name,
                item.requests,
                context.inventory.number(item.device.gpu),
                existing=context.inventory.existing(item.device),
                time_slice=item.time_slice,
            )
            for item in allocated
        ]
        if adopting:
            entries = [self._adopted(item.device, entry) for item, entry in zip(allocated, entries, strict=True)]
        record = ClaimRecord(
            version=VERSION,
            namespace=reference.namespace,
            name=reference.name,
            uid=reference.uid,
            phase="prepared" if adopting else "preparing",
            devices=tuple(entries),
            boot=context.boot,
        )
        with context.step(Step.WRITE_INTENT, claim=str(reference)):
            context.checkpoint.put(record)
        if adopting:
            context.checkpoint.settle(reference.uid)
        return record

    def _adopted(self, device: Device, entry: DeviceRecord) -> DeviceRecord:
        """The record with the partition that exists already."""
        if device.profile is None or device.placement is None:
            return entry
        context = self._context
        partition = context.host.find_partition(device.gpu, device.profile, device.placement)
        if partition is not None and partition.complete and context.existing_published:
            # It may be a partition that Tessera did not create: it is never removed.
            entry = msgspec.structs.replace(entry, existing=True)
        return entry.with_partition(partition)

    def _finish(self, record: ClaimRecord, allocated: Sequence[Allocated]) -> ClaimRecord:
        """Create the partitions, write the CDI spec, write "prepared"; each only if it is not done yet."""
        context = self._context
        existing = {entry.device for entry in record.devices if entry.existing}
        partitions = {
            item.device.name: context.partitions.ensure(item.device, create=item.device.name not in existing)
            for item in allocated
        }
        for gpu in {item.device.gpu.uuid: item.device.gpu for item in allocated}.values():
            context.time_slices.apply(gpu, record)
        spec = build_spec(context.pool.driver, record.uid, self._cdi_devices(allocated, partitions), context.files)
        with context.step(Step.WRITE_CDI_SPEC, claim=str(record)):
            spec_written = context.cdi.write(record.uid, spec)
        devices = tuple(device.with_partition(partitions[device.device]) for device in record.devices)
        done = msgspec.structs.replace(record, phase="prepared", devices=devices, boot=context.boot, releasing=False)
        if done == record:
            done = record
        else:
            with context.step(Step.WRITE_PREPARED, claim=str(record)):
                context.checkpoint.put(done)
        if record.prepared_in_this_boot(context.boot):
            self._report_repairs(record, done, spec_written=spec_written)
        return done

    def _cdi_devices(
        self, allocated: Iterable[Allocated], partitions: Mapping[str, Partition | None]
    ) -> Iterable[CdiDevice]:
        host = self._context.host
        for item in allocated:
            device, partition = item.device, partitions[item.device.name]
            if partition is None or partition.uuid is None:
                yield CdiDevice(device.name, device.gpu.uuid, host.gpu_nodes(device.gpu), device.shares)
            else:
                yield CdiDevice(device.name, partition.uuid, host.partition_nodes(device.gpu, partition))

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
            self._listeners.repaired(now, made)

    def _undo_quietly(self, reference: ClaimReference) -> None:
        record = self._context.checkpoint.get(reference.uid)
        try:
            if record is not None:
                self._cleanup.undo(record)
                return
            self._context.inventory.release(reference.uid)
            self._context.cdi.unreserve(reference.uid)
        except RecoverableError as error:
            log.error(
                "a failed prepare could not be undone; it stays recorded and is undone later",
                extra={"claim": str(reference), "error": str(error)},
            )
