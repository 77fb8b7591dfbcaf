"""Preparing and unpreparing one claim, step by step.

The order is what makes a kill at any instruction harmless: intent on disk, then the cut, then the CDI spec,
then "prepared" on disk, then the answer. Undoing goes the other way, and the record goes last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from driver.errors import HardwareError, RecoverableError
from driver.kube.claims import Claim
from driver.model.device import Device
from driver.model.gpu import MigMode, Partition
from kubelet_plugin.cdi import CdiDevice, build_spec, device_id
from kubelet_plugin.claims import Allocated, ClaimReference, resolve
from kubelet_plugin.held import device_of
from kubelet_plugin.inventory import Holder
from kubelet_plugin.locks import KeyedLocks, claim_key
from kubelet_plugin.node import Node
from kubelet_plugin.overlap import refuse_overlap
from kubelet_plugin.partitions import Partitions
from kubelet_plugin.records import VERSION, ClaimRecord, DeviceRecord, device_record
from kubelet_plugin.releasing import Listeners, Releaser
from kubelet_plugin.steps import Step, Steps
from kubelet_plugin.time_slices import TimeSlices
from kubelet_plugin.upkeep import Upkeep

log = logging.getLogger(__name__)

ClaimReader = Callable[[str, str], Claim]
"""(namespace, name) -> the claim as the API server has it now. Raises ApiError."""


@dataclass(frozen=True, slots=True)
class PreparedDevice:
    """What the kubelet is told about one device."""

    requests: tuple[str, ...]
    pool: str
    device: str
    cdi_device_ids: tuple[str, ...]


class Preparer:
    """Thread-safe: claims that share no GPU never wait for each other. ``upkeep`` shares its locks."""

    def __init__(
        self, node: Node, read_claim: ClaimReader, listeners: Listeners, steps: Steps, locks: KeyedLocks
    ) -> None:
        self._node = node
        self._listeners = listeners
        self._read_claim = read_claim
        self._step = steps
        self._locks = locks
        self._partitions = Partitions(node.host, steps)
        self._releaser = Releaser(node, listeners, steps)
        self.upkeep = Upkeep(node, self._releaser, locks)
        self._time_slices = TimeSlices(node.host, node.checkpoint, steps)

    def prepare(self, reference: ClaimReference) -> Sequence[PreparedDevice]:
        """Make the claim's devices usable. Idempotent: a repeat verifies and repairs.

        Raises RecoverableError; then a claim that was not prepared before leaves nothing behind, or what
        could not be undone stays recorded as owed and is undone at the next call or start.
        """
        with self._locks.hold([claim_key(reference.uid)], f"preparing claim {reference}"):
            with self._step(Step.READ_CLAIM, claim=str(reference)):
                claim = self._read_claim(reference.namespace, reference.name)
            with self._step(Step.RESOLVE_ALLOCATION, claim=str(reference)):
                allocated = resolve(reference, claim, self._node.pool, self._node.inventory)
            with self._locks.hold(self._gpus_involved(reference, allocated), f"claim {reference}"):
                record = self._prepare(reference, allocated)
        log.info(
            "prepared claim",
            extra={
                "claim": str(reference),
                "pod": claim.pods,
                "devices": ",".join(device.device for device in record.devices),
                "gpus": ",".join(sorted(record.gpu_uuids)),
            },
        )
        return [self._answer(record, device) for device in record.devices]

    def unprepare(self, reference: ClaimReference) -> None:
        """Take the claim's devices away. Idempotent; a claim that is not known is done. Raises RecoverableError.

        From the first call on the claim counts as owed: what can't be removed now, ``upkeep`` removes later.
        """
        with self._locks.hold([claim_key(reference.uid)], f"unpreparing claim {reference}"):
            record = self._node.checkpoint.get(reference.uid)
            if record is None:
                return
            with self._locks.hold(record.gpu_uuids, f"claim {reference}"):
                self._releaser.release(record)
        log.info("unprepared claim", extra={"claim": str(reference)})

    def repair(self, uid: str) -> bool:
        """Make again what a prepared claim has lost; False where it isn't prepared any more. Raises RecoverableError.

        A partition that is cut again has another UUID: containers that start from now on get that one.
        """
        with self._locks.hold([claim_key(uid)], f"repairing claim {uid}"):
            record = self._node.checkpoint.get(uid)
            if record is None or not record.stands(self._node.boot):
                return False
            with self._locks.hold(record.gpu_uuids, f"repairing claim {record}"):
                self._finish(record, [self._as_recorded(record, entry) for entry in record.devices])
        self._listeners.held()
        return True

    def _as_recorded(self, record: ClaimRecord, entry: DeviceRecord) -> Allocated:
        device = device_of(self._node.inventory, entry)
        fault = None if device is None else self._node.inventory.fault(device.gpu)
        if device is None or fault is not None:
            raise HardwareError(f"claim {record}: {entry.device} can't be used at present: {fault or 'no such device'}")
        return Allocated(device, entry.requests, entry.time_slice)

    def _gpus_involved(self, reference: ClaimReference, allocated: Iterable[Allocated]) -> set[str]:
        known = self._node.checkpoint.get(reference.uid)
        return {item.device.gpu.uuid for item in allocated} | (known.gpu_uuids if known else frozenset())

    def _prepare(self, reference: ClaimReference, allocated: Sequence[Allocated]) -> ClaimRecord:
        """Everything between resolving and answering; the GPUs are locked."""
        record = known = self._current_record(reference, allocated)
        refuse_overlap(reference, allocated, self._node.inventory)
        # Containers may be running on what was prepared before, also where its record got lost.
        adopting = record is None and reference.uid in self._node.checkpoint.aside
        repeat = adopting or (record is not None and record.stands(self._node.boot))
        # Held before it is on disk: whatever comes between must find the device taken.
        holder = Holder(reference.uid, reference.namespace, reference.name)
        self._node.inventory.hold(holder, [item.device for item in allocated])
        try:
            record = self._finish(record or self._write_intent(reference, allocated, adopting=adopting), allocated)
            self._node.checkpoint.settle(reference.uid)
        except RecoverableError:
            if not repeat:
                self._undo_quietly(reference)
            raise
        if record is not known:
            self._listeners.held()
        return record

    def _current_record(self, reference: ClaimReference, allocated: Sequence[Allocated]) -> ClaimRecord | None:
        """The claim's record, unless it is about an earlier allocation: then that one is undone first."""
        record = self._node.checkpoint.get(reference.uid)
        if record is None or {d.device for d in record.devices} == {item.device.name for item in allocated}:
            return record
        log.warning(
            "claim was allocated anew while it was prepared: releasing the earlier devices",
            extra={"claim": str(reference), "devices": ",".join(d.device for d in record.devices)},
        )
        self._releaser.release(record)
        return None

    def _write_intent(
        self, reference: ClaimReference, allocated: Iterable[Allocated], *, adopting: bool
    ) -> ClaimRecord:
        items = list(allocated)
        with self._step(Step.CHECK_FREE, claim=str(reference)):
            for item in items:
                # A partition of the allocated placement is the claim's own where only its record got lost.
                own = adopting and item.device.profile is not None
                if not own and not self._node.inventory.existing(item.device):
                    self._partitions.check_free(item.device)
        record = ClaimRecord(
            version=VERSION,
            namespace=reference.namespace,
            name=reference.name,
            uid=reference.uid,
            phase="preparing",
            devices=tuple(self._new_record(item) for item in items),
            boot=self._node.boot,
        )
        with self._step(Step.WRITE_INTENT, claim=str(reference)):
            self._node.checkpoint.put(record)
        return record

    def _new_record(self, item: Allocated) -> DeviceRecord:
        number = self._node.inventory.number(item.device.gpu)
        existing = self._node.inventory.existing(item.device)
        return device_record(
            item.device, self._node.pool.name, item.requests, number, existing=existing, time_slice=item.time_slice
        )

    def _finish(self, record: ClaimRecord, allocated: Sequence[Allocated]) -> ClaimRecord:
        """Cut, write the spec, write "prepared"; each only where it is not so already."""
        given = {entry.device for entry in record.devices if entry.existing}
        partitions = {item.device.name: self._ensure(item.device, item.device.name in given) for item in allocated}
        for gpu in {item.device.gpu.uuid: item.device.gpu for item in allocated}.values():
            self._time_slices.apply(gpu, record)
        spec = build_spec(
            self._node.pool.driver, record.uid, self._cdi_devices(allocated, partitions), self._node.files
        )
        with self._step(Step.WRITE_CDI_SPEC, claim=str(record)):
            written = self._node.cdi.write(record.uid, spec)
        devices = tuple(device.with_partition(partitions[device.device]) for device in record.devices)
        done = msgspec.structs.replace(record, phase="prepared", devices=devices, boot=self._node.boot, releasing=False)
        if done == record:
            done = record
        else:
            with self._step(Step.WRITE_PREPARED, claim=str(record)):
                self._node.checkpoint.put(done)
        if record.stands(self._node.boot):
            self._tell_repairs(record, done, spec_written=written)
        return done

    def _tell_repairs(self, before: ClaimRecord, now: ClaimRecord, *, spec_written: bool) -> None:
        """What a claim that was prepared already had lost."""
        made = [
            f"{new.device} was cut again: {new.uuid} instead of {old.uuid}; containers that start from now on get it"
            for old, new in zip(before.devices, now.devices, strict=True)
            if old.uuid != new.uuid
        ]
        if not made and spec_written:
            made = ["its CDI spec was written again"]
        if made:
            log.warning("repaired a prepared claim", extra={"claim": str(now), "made": "; ".join(made)})
            self._listeners.repaired(now, made)

    def _ensure(self, device: Device, existing: bool) -> Partition | None:
        partition = self._partitions.ensure(device, cut=not existing)
        if device.gpu.mig_capable:
            mode = MigMode.DISABLED if partition is None else MigMode.ENABLED
            self._node.inventory.note_mig_mode(device.gpu, mode)
        return partition

    def _cdi_devices(
        self, allocated: Iterable[Allocated], partitions: Mapping[str, Partition | None]
    ) -> Iterable[CdiDevice]:
        host = self._node.host
        for item in allocated:
            device, partition = item.device, partitions[item.device.name]
            if partition is None or partition.uuid is None:
                yield CdiDevice(device.name, device.gpu.uuid, host.gpu_nodes(device.gpu), device.shares)
            else:
                yield CdiDevice(device.name, partition.uuid, host.partition_nodes(device.gpu, partition))

    def _undo_quietly(self, reference: ClaimReference) -> None:
        record = self._node.checkpoint.get(reference.uid)
        if record is None:
            self._node.inventory.release(reference.uid)
            return
        try:
            self._releaser.undo(record)
        except RecoverableError as error:
            log.error(
                "a failed prepare could not be undone; it stays recorded and is undone later",
                extra={"claim": str(reference), "error": str(error)},
            )

    def _answer(self, record: ClaimRecord, device: DeviceRecord) -> PreparedDevice:
        cdi = device_id(self._node.pool.driver, record.uid, device.device)
        return PreparedDevice(device.requests, device.pool, device.device, (cdi,))
