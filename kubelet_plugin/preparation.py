"""Preparing and unpreparing one claim, step by step.

The order is what makes a kill at any instruction harmless: intent on disk, then the cut, then the CDI spec,
then "prepared" on disk, then the answer. Undoing goes the other way, and the record goes last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

from driver.errors import ClaimError, HardwareError, RecoverableError
from driver.hardware.host import Host
from driver.kube.claims import Claim
from driver.model.device import Device, DeviceKind
from driver.model.gpu import MigMode, Partition
from driver.slices.names import Pool
from kubelet_plugin.cdi import CdiDevice, CdiDirectory, build_spec, device_id
from kubelet_plugin.checkpoint import VERSION, Checkpoint, ClaimRecord, DeviceRecord, device_record
from kubelet_plugin.claims import Allocated, ClaimReference, resolve
from kubelet_plugin.driver_files import DriverFiles
from kubelet_plugin.inventory import Inventory
from kubelet_plugin.locks import KeyedLocks
from kubelet_plugin.partitions import Partitions
from kubelet_plugin.steps import Step, Steps

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


@dataclass(frozen=True, slots=True)
class Node:
    """What preparing works on: everything the node plugin shares between claims."""

    pool: Pool
    host: Host
    inventory: Inventory
    checkpoint: Checkpoint
    cdi: CdiDirectory
    files: DriverFiles


class Preparer:
    """Thread-safe: claims that share no GPU never wait for each other.

    ``on_change`` is called after what is held has changed; it must return quickly.
    """

    def __init__(
        self, node: Node, read_claim: ClaimReader, on_change: Callable[[], None], steps: Steps, locks: KeyedLocks
    ) -> None:
        self._node = node
        self._read_claim = read_claim
        self._on_change = on_change
        self._step = steps
        self._locks = locks
        self._partitions = Partitions(node.host, steps)

    def prepare(self, reference: ClaimReference) -> Sequence[PreparedDevice]:
        """Make the claim's devices usable. Idempotent: a repeat verifies and repairs.

        Raises RecoverableError; then a claim that was not prepared before leaves nothing behind, or what
        could not be undone stays recorded as owed and is undone at the next call or start.
        """
        with self._locks.hold([f"claim {reference.uid}"], f"preparing claim {reference}"):
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
        """Take the claim's devices away. Idempotent; a claim that is not known is done. Raises RecoverableError."""
        with self._locks.hold([f"claim {reference.uid}"], f"unpreparing claim {reference}"):
            record = self._node.checkpoint.get(reference.uid)
            if record is None:
                return
            with self._locks.hold(record.gpu_uuids, f"claim {reference}"):
                self.undo(record)
        log.info("unprepared claim", extra={"claim": str(reference)})

    def undo(self, record: ClaimRecord) -> None:
        """Remove spec, partitions and record, in this order. The caller holds the GPUs' locks.

        What can't be removed does not keep the rest: the record stays then, and the first error is raised.
        """
        failures = [*self._attempt(lambda: self._remove_spec(record))]
        for device in record.devices:
            failures += self._attempt(partial(self._remove_partition, record, device))
        for failure in failures[1:]:
            log.error("could not undo", extra={"claim": f"{record.namespace}/{record.name}", "error": str(failure)})
        if failures:
            raise failures[0]
        with self._step(Step.REMOVE_RECORD, claim=record.uid):
            self._node.checkpoint.remove(record.uid)
            self._node.inventory.release(record.uid)
        self._on_change()

    def _attempt(self, work: Callable[[], None]) -> Iterable[RecoverableError]:
        try:
            work()
        except RecoverableError as error:
            return [error]
        return []

    def _remove_spec(self, record: ClaimRecord) -> None:
        with self._step(Step.REMOVE_CDI_SPEC, claim=record.uid):
            self._node.cdi.remove(record.uid)

    def _remove_partition(self, record: ClaimRecord, device: DeviceRecord) -> None:
        if device.kind is DeviceKind.FULL or device.existing:
            return
        gpu = self._node.inventory.gpu(device.gpu_uuid)
        if gpu is None:
            raise ClaimError(
                f"claim {record.namespace}/{record.name}: {device.device} is on {device.gpu_uuid}, which did not "
                "answer when the plugin started; its partition can't be removed: restart the plugin once the GPU is "
                f"back, or, where it is gone for good, delete {self._node.checkpoint.path(record.uid)} and restart it"
            )
        self._partitions.remove(gpu, device)

    def _gpus_involved(self, reference: ClaimReference, allocated: Iterable[Allocated]) -> set[str]:
        known = self._node.checkpoint.get(reference.uid)
        return {item.device.gpu.uuid for item in allocated} | (known.gpu_uuids if known else frozenset())

    def _prepare(self, reference: ClaimReference, allocated: Sequence[Allocated]) -> ClaimRecord:
        """Everything between resolving and answering; the GPUs are locked."""
        record = self._current_record(reference, allocated)
        self._refuse_overlap(reference, allocated)
        repeat = record is not None and record.phase == "prepared"
        if record is None:
            record = self._write_intent(reference, allocated)
        self._node.inventory.hold(record.holder, [item.device for item in allocated])
        try:
            record = self._finish(record, allocated)
        except RecoverableError:
            # Containers may be running on a claim that was prepared before: it keeps what it has.
            if not repeat:
                self._undo_quietly(record)
            raise
        self._on_change()
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
        self.undo(record)
        return None

    def _refuse_overlap(self, reference: ClaimReference, allocated: Sequence[Allocated]) -> None:
        """The last defence against giving memory out twice (force-deleted pods make this real)."""
        for item, other in combinations(allocated, 2):
            if item.device.gpu.uuid == other.device.gpu.uuid and item.device.mask & other.device.mask:
                raise ClaimError(
                    f"claim {reference}: its own devices {item.device} and {other.device} overlap; "
                    "the scheduler allocates only devices whose memory slices are disjoint"
                )
        for item in allocated:
            fault = self._node.inventory.fault(item.device.gpu)
            if fault is not None:
                raise HardwareError(f"claim {reference}: {item.device} can't be used at present: {fault}")
            conflict = self._node.inventory.conflict(reference.uid, item.device)
            if conflict is not None:
                holder, held = conflict
                raise ClaimError(
                    f"claim {reference}: {item.device} overlaps {held}, which {holder} still holds on this node; "
                    "it is prepared once that claim is unprepared"
                )

    def _write_intent(self, reference: ClaimReference, allocated: Iterable[Allocated]) -> ClaimRecord:
        items = list(allocated)
        with self._step(Step.CHECK_FREE, claim=str(reference)):
            for item in items:
                if not self._node.inventory.existing(item.device):
                    self._partitions.check_free(item.device)
        record = ClaimRecord(
            version=VERSION,
            namespace=reference.namespace,
            name=reference.name,
            uid=reference.uid,
            phase="preparing",
            devices=tuple(self._new_record(item) for item in items),
        )
        with self._step(Step.WRITE_INTENT, claim=str(reference)):
            self._node.checkpoint.put(record)
        return record

    def _new_record(self, item: Allocated) -> DeviceRecord:
        number = self._node.inventory.number(item.device.gpu)
        existing = self._node.inventory.existing(item.device)
        return device_record(item.device, self._node.pool.name, item.requests, number, existing=existing)

    def _finish(self, record: ClaimRecord, allocated: Sequence[Allocated]) -> ClaimRecord:
        """Cut, write the spec, write "prepared"; each only where it is not so already."""
        partitions = {item.device.name: self._ensure(item.device) for item in allocated}
        spec = build_spec(
            self._node.pool.driver, record.uid, self._cdi_devices(allocated, partitions), self._node.files
        )
        with self._step(Step.WRITE_CDI_SPEC, claim=record.uid):
            self._node.cdi.write(record.uid, spec)
        devices = (device.with_partition(partitions[device.device]) for device in record.devices)
        done = ClaimRecord(VERSION, record.namespace, record.name, record.uid, "prepared", tuple(devices))
        if done != record:
            with self._step(Step.WRITE_PREPARED, claim=record.uid):
                self._node.checkpoint.put(done)
        return done

    def _ensure(self, device: Device) -> Partition | None:
        partition = self._partitions.ensure(device)
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
                yield CdiDevice(device.name, device.gpu.uuid, host.gpu_nodes(device.gpu))
            else:
                yield CdiDevice(device.name, partition.uuid, host.partition_nodes(device.gpu, partition))

    def _undo_quietly(self, record: ClaimRecord) -> None:
        try:
            self.undo(record)
        except RecoverableError as error:
            log.error(
                "a failed prepare could not be undone; it stays recorded and is undone at the next call or start",
                extra={"claim": f"{record.namespace}/{record.name}", "error": str(error)},
            )

    def _answer(self, record: ClaimRecord, device: DeviceRecord) -> PreparedDevice:
        cdi = device_id(self._node.pool.driver, record.uid, device.device)
        return PreparedDevice(device.requests, device.pool, device.device, (cdi,))
