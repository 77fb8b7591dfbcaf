"""Claims of shared GPUs and what their pods use, looked at with each scan of the node's GPUs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from driver.errors import RecoverableError
from driver.model.gpu import Gpu
from driver.model.offer import DeviceKind
from driver.model.shared_memory import GIB, MemoryLimit, SharingStrategy
from kubelet_plugin.changes import ChangeNotifier, NodeChange
from kubelet_plugin.checkpoint.gpu_and_claim_locks import claim_key
from kubelet_plugin.checkpoint.records import ClaimRecord
from kubelet_plugin.claims.claim_memory import ClaimMemory, LimitNow
from kubelet_plugin.claims.claim_stores import ClaimStores
from kubelet_plugin.reconcile.later_pods import LaterPods
from kubelet_plugin.status.claim_status import HELD_BY, SHARES_MEMORY
from kubelet_plugin.status.events import EventReason, PluginEvents

log = logging.getLogger(__name__)

WAY_OUT = {
    MemoryLimit.CGROUP: "use a ResourceClaimTemplate, so that each pod has a claim of its own",
    MemoryLimit.MPS: "run fewer programs in its pods, or request more memory",
    MemoryLimit.NONE: "end what uses too much, or request more memory",
    MemoryLimit.UNKNOWN: "end what uses too much, or request more memory",
}

NO_PODS = "the claim is reserved for no pods, whose cgroups could be limited"

MemoryUse = Callable[[str, str], int | None]
"""(uid of a claim, key of its device): the bytes that its pods use of the device's GPU (``UsageSampler``)."""


class MemoryWatch:
    """Sets limits again that a reload of the driver has lost, and for pods that began to use a claim later.

    It reports for each claim what holds it to its memory, once and whenever that changes, and when its pods use more
    than that together. Of claims without a limit on cgroups it knows what ``memory_used`` knows; None: usage is not
    measured.
    """

    def __init__(
        self,
        stores: ClaimStores,
        memory: ClaimMemory,
        later_pods: LaterPods,
        events: PluginEvents,
        changes: ChangeNotifier,
        memory_used: MemoryUse | None = None,
        report_above: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``report_above`` receives the number of claims above their memory."""
        self._stores, self._memory = stores, memory
        self._later_pods, self._events, self._changes = later_pods, events, changes
        self._memory_used, self._report_above = memory_used, report_above
        self._above: frozenset[str] = frozenset()
        # The process before has reported what holds these.
        self._reported = {(record.uid, uuid) for record in stores.prepared() for uuid in record.gpu_uuids}

    def handle_scan(self, answering: Sequence[Gpu]) -> None:
        """Check the claims of shared GPUs. What fails is tried again with the next scan."""
        above: set[str] = set()
        present = {gpu.uuid: gpu for gpu in answering}
        prepared = self._stores.prepared()
        self._reported &= {(record.uid, uuid) for record in prepared for uuid in record.gpu_uuids}
        for record in prepared:
            self._report_shared_partitions(record)
        shared = [record for record in prepared if any(entry.gib for entry in record.devices)]
        if shared:
            self._later_pods.find_started()
        for uuid in sorted({uuid for record in shared for uuid in record.gpu_uuids if record.shared_gib(uuid)}):
            records = [record for record in shared if record.shared_gib(uuid)]
            try:
                by_pod = self._check_limits(uuid, present.get(uuid), records)
            except RecoverableError as error:
                log.warning("can't check the memory limits of a GPU", extra={"gpu": uuid, "error": str(error)})
                above |= self._above & {record.uid for record in records}
                continue
            above |= set(self._claims_above(uuid, records, by_pod))
        self._above = frozenset(above)
        self._report_above(len(above))

    def _check_limits(self, uuid: str, gpu: Gpu | None, records: list[ClaimRecord]) -> Mapping[str, int]:
        """Set what limits can be set on a GPU, and report what holds its claims.

        ``gpu``: None if it does not answer. ``records`` are replaced by what they are then. Returns the bytes that each
        limited pod uses. Raises StateError.
        """
        by_pod: Mapping[str, int] = {}
        unlimited: Mapping[str, LimitNow] = {}
        of_gpu = self._silent(uuid)
        if gpu is not None:
            for record in records:
                self._later_pods.note(record)
            of_gpu = self._memory.limit_now(gpu)
            if of_gpu[0] is MemoryLimit.CGROUP:
                with self._stores.locks.hold([uuid], f"checking the memory of claims on {uuid}"):
                    by_pod, unlimited = self._memory.check(gpu)
        for place, record in enumerate(records):
            of_pods = (unlimited[pod] for pod in record.pods if pod in unlimited)
            limit, why = _limit_now(uuid, record, next(of_pods, of_gpu))
            records[place] = self._note_limit(uuid, record, limit, why)
            self._report_limit(uuid, records[place], why)
        return by_pod

    def _silent(self, uuid: str) -> LimitNow:
        """What is known of a GPU that does not answer."""
        gpu = self._stores.inventory.gpu(uuid)
        fault = None if gpu is None else self._stores.inventory.fault(gpu)
        return MemoryLimit.UNKNOWN, f"the GPU does not answer: {fault or 'it was not found'}"

    def _note_limit(self, uuid: str, record: ClaimRecord, limit: MemoryLimit, why: str) -> ClaimRecord:
        """Record what holds a claim to its memory of a GPU if that has changed, so that its status says so."""
        if limit is _limit(uuid, record):
            return record
        # Not the lock of the GPU: work on it may hang, and a scan must go on.
        with self._stores.locks.hold([claim_key(record.uid)], f"noting the limit of claim {record}"):
            current = self._stores.checkpoint.get(record.uid)
            if current is None or current.needs_release:
                return record
            change = partial(msgspec.structs.replace, limit=limit, why_not_limited=why)
            devices = (change(entry) if entry.gpu_uuid == uuid and entry.gib else entry for entry in current.devices)
            current = msgspec.structs.replace(current, devices=tuple(devices))
            self._stores.checkpoint.put(current, durable=False)
        extra = {"claim": str(record), "gpu": uuid, "why": why or HELD_BY[limit]}
        log.warning("what holds a claim to its memory has changed", extra=extra)
        self._reported.discard((record.uid, uuid))
        self._changes.report(NodeChange.PREPARED)
        return current

    def _report_limit(self, uuid: str, record: ClaimRecord, why: str) -> None:
        """Record the Event that says what holds a claim to its memory of a GPU."""
        if (record.uid, uuid) in self._reported:
            return
        limit = _limit(uuid, record)
        message = f"{record.shared_gib(uuid)} GiB of GPU {uuid} are allocated to it: {HELD_BY[limit]}"
        reason, is_limited = EventReason.MEMORY_LIMITED, limit in (MemoryLimit.CGROUP, MemoryLimit.MPS)
        if not is_limited:
            reason = EventReason.MEMORY_NOT_LIMITED
            message = f"{message}: {why}; share such GPUs only with pods that you trust, or request a partition"
        self._events.claim(record.reference, reason, message, warning=not is_limited)
        self._reported.add((record.uid, uuid))

    def _report_shared_partitions(self, record: ClaimRecord) -> None:
        """Record the Event that says that the claims of a partition share its memory."""
        for entry in record.devices:
            if entry.kind is DeviceKind.SHARED_PARTITION and (record.uid, entry.gpu_uuid) not in self._reported:
                message = f"it has a compute instance of {entry.device}, {SHARES_MEMORY}"
                self._events.claim(record.reference, EventReason.MEMORY_NOT_LIMITED, message)
                self._reported.add((record.uid, entry.gpu_uuid))

    def _used(self, uuid: str, record: ClaimRecord, by_pod: Mapping[str, int]) -> int | None:
        """Bytes of a GPU that the pods of a claim use; None: unknown."""
        if _limit(uuid, record) is MemoryLimit.CGROUP:
            # A limit holds a single pod.
            return sum(by_pod.get(pod, 0) for pod in record.pods) if len(record.pods) > 1 else 0
        key = next(entry.key for entry in record.devices if entry.gpu_uuid == uuid)
        return self._memory_used(record.uid, key) if self._memory_used else None

    def _claims_above(self, uuid: str, records: Sequence[ClaimRecord], by_pod: Mapping[str, int]) -> Iterable[str]:
        """The claims whose pods use more of a GPU together than they may; those that are new get an Event."""
        for record in records:
            uses, gib = self._used(uuid, record, by_pod), record.shared_gib(uuid)
            if uses is None and record.uid in self._above:
                yield record.uid
            if uses is None or uses <= gib * GIB:
                continue
            others = [other for other in records if not set(other.pods).isdisjoint(record.pods)]
            if uses <= sum(other.shared_gib(uuid) for other in others) * GIB:
                continue
            if record.uid not in self._above:
                limit = _limit(uuid, record)
                held = "each pod is held to that, not their sum" if limit is MemoryLimit.CGROUP else HELD_BY[limit]
                message = (
                    f"its {len(record.pods)} pods use {uses / GIB:.3g} GiB of GPU {uuid} together, "
                    f"{gib} GiB are allocated to it: {held}; {WAY_OUT[limit]}"
                )
                self._events.claim(record.reference, EventReason.ABOVE_MEMORY, message)
            yield record.uid


def _limit(uuid: str, record: ClaimRecord) -> MemoryLimit:
    """What held a claim to its memory of a GPU by the last scan, or when it was prepared."""
    return next(entry.limit for entry in record.devices if entry.gpu_uuid == uuid and entry.gib)


def _limit_now(uuid: str, record: ClaimRecord, possible: LimitNow) -> LimitNow:
    """What holds a claim to its memory of a GPU, where pods could be held to it as ``possible`` says."""
    limit, why = possible
    if limit is MemoryLimit.CGROUP:
        return possible if record.pods else (MemoryLimit.NONE, NO_PODS)
    if any(entry.strategy is SharingStrategy.MPS for entry in record.devices if entry.gpu_uuid == uuid):
        return MemoryLimit.MPS, ""
    # What is unknown ends the promise of a limit; that nothing limits a claim stays true until something does.
    is_promised = _limit(uuid, record) is MemoryLimit.CGROUP
    return (_limit(uuid, record), why) if limit is MemoryLimit.UNKNOWN and not is_promised else possible
