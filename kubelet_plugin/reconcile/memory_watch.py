"""Claims of shared GPUs and what their pods use, looked at with each scan of the node's GPUs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from driver.errors import RecoverableError
from driver.model.gpu import Gpu
from driver.model.shared_memory import GIB, MemoryLimit
from kubelet_plugin.checkpoint.records import ClaimRecord
from kubelet_plugin.claims.claim_memory import GpuSettingsOfClaims, is_limited
from kubelet_plugin.claims.claim_stores import ClaimStores
from kubelet_plugin.claims.mps_shares import parts_by_mps
from kubelet_plugin.reconcile.later_pods import LaterPods
from kubelet_plugin.status.claim_status import HELD_BY
from kubelet_plugin.status.events import EventReason, PluginEvents

log = logging.getLogger(__name__)

WAY_OUT = {
    MemoryLimit.CGROUP: "use a ResourceClaimTemplate, so that each pod has a claim of its own",
    MemoryLimit.MPS: "run fewer programs in its pods, or request more memory",
    MemoryLimit.NONE: "end what uses too much, or request more memory",
}

NO_PODS = "the claim is reserved for no pods, whose cgroups could be limited"

MemoryUse = Callable[[str, str], int | None]
"""(uid of a claim, key of its device): the bytes that its pods use of the device's GPU (``UsageSampler``)."""


class MemoryWatch:
    """Sets limits again that a reload of the driver has lost, and for pods that began to use a claim later. Starts MPS
    daemons again that have ended, and ends those that no claim uses.

    It reports once for each claim what holds it to its memory, and again when its pods use more than that together.
    Of claims without a limit on cgroups it knows what ``memory_used`` knows; None: usage is not measured.
    """

    def __init__(
        self,
        stores: ClaimStores,
        settings: GpuSettingsOfClaims,
        later_pods: LaterPods,
        events: PluginEvents,
        memory_used: MemoryUse | None = None,
        report_above: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``report_above`` receives the number of claims above their memory."""
        self._stores, self._memory, self._mps = stores, settings.memory, settings.mps
        self._later_pods, self._events = later_pods, events
        self._memory_used, self._report_above = memory_used, report_above
        self._above: frozenset[str] = frozenset()
        # The process before has reported what holds these.
        self._reported = {(record.uid, uuid) for record in stores.prepared() for uuid in record.gpu_uuids}

    def handle_scan(self, answering: Sequence[Gpu]) -> None:
        """Check the claims of the GPUs that answer. What fails is tried again with the next scan."""
        above: set[str] = set()
        prepared = [record for record in self._stores.prepared() if any(entry.gib for entry in record.devices)]
        self._reported &= {(record.uid, uuid) for record in prepared for uuid in record.gpu_uuids}
        for gpu in answering:
            if self._mps.may_have_daemon(gpu):
                self._check_mps(gpu)
            records = [record for record in prepared if record.shared_gib(gpu.uuid)]
            if not records:
                continue
            try:
                for record in records:
                    self._report_limit(gpu, record)
                    self._later_pods.note(record)
                used = self._used(gpu, records)
            except RecoverableError as error:
                log.warning("can't check the memory limits of a GPU", extra={"gpu": gpu.uuid, "error": str(error)})
                above |= self._above & {record.uid for record in records}
                continue
            above |= set(self._claims_above(gpu, records, used))
        self._above = frozenset(above)
        self._report_above(len(above))

    def _report_limit(self, gpu: Gpu, record: ClaimRecord) -> None:
        """Record the Event that says what holds a claim to its memory of ``gpu``."""
        if (record.uid, gpu.uuid) in self._reported:
            return
        limit = _limit(gpu, record)
        message = f"{record.shared_gib(gpu.uuid)} GiB of GPU {gpu.uuid} are allocated to it: {HELD_BY[limit]}"
        reason = EventReason.MEMORY_LIMITED
        if limit is MemoryLimit.NONE:
            reason = EventReason.MEMORY_NOT_LIMITED
            other_cause = "limits were not possible when the node plugin started" if record.pods else NO_PODS
            why = self._memory.unenforced(gpu) or other_cause
            message = f"{message}: {why}; share such GPUs only with pods that you trust, or request a partition"
        self._events.claim(record.reference, reason, message, warning=limit is MemoryLimit.NONE)
        self._reported.add((record.uid, gpu.uuid))

    def _check_mps(self, gpu: Gpu) -> None:
        try:
            with self._stores.locks.hold([gpu.uuid], f"checking the MPS daemon of {gpu.uuid}"):
                lost = self._mps.check(gpu)
                records = [record for record in self._stores.prepared() if lost and parts_by_mps(gpu, record)]
                for record in records:
                    message = (
                        f"{lost} on GPU {gpu.uuid}: programs that used the GPU through it have failed; containers that "
                        "start from now on get another one: delete the pod if its programs do not start again"
                    )
                    self._events.claim(record.reference, EventReason.MPS_SERVER_LOST, message)
                for record in records:
                    self._mps.apply(gpu, record)
        except RecoverableError as error:
            log.warning("can't check the MPS daemon of a GPU", extra={"gpu": gpu.uuid, "error": str(error)})

    def _used(self, gpu: Gpu, records: Iterable[ClaimRecord]) -> Mapping[str, int | None]:
        """Bytes of ``gpu`` that the pods of each claim use; None: unknown. Raises HardwareError, StateError."""
        by_pod: Mapping[str, int] = {}
        if any(is_limited(gpu, record) for record in records):
            with self._stores.locks.hold([gpu.uuid], f"checking the memory of claims on {gpu.uuid}"):
                by_pod = self._memory.check(gpu)
        used: dict[str, int | None] = {}
        for record in records:
            if is_limited(gpu, record):
                # A limit holds a single pod.
                used[record.uid] = sum(by_pod.get(pod, 0) for pod in record.pods) if len(record.pods) > 1 else 0
            else:
                key = next(entry.key for entry in record.devices if entry.gpu_uuid == gpu.uuid)
                used[record.uid] = self._memory_used(record.uid, key) if self._memory_used else None
        return used

    def _claims_above(self, gpu: Gpu, records: Iterable[ClaimRecord], used: Mapping[str, int | None]) -> Iterable[str]:
        """The claims whose pods use more of ``gpu`` together than they may; those that are new get an Event."""
        for record in records:
            uses, gib = used[record.uid], record.shared_gib(gpu.uuid)
            if uses is None and record.uid in self._above:
                yield record.uid
            if uses is None or uses <= gib * GIB:
                continue
            others = [other for other in records if not set(other.pods).isdisjoint(record.pods)]
            if uses <= sum(other.shared_gib(gpu.uuid) for other in others) * GIB:
                continue
            if record.uid not in self._above:
                limit = _limit(gpu, record)
                held = "each pod is held to that, not their sum" if limit is MemoryLimit.CGROUP else HELD_BY[limit]
                message = (
                    f"its {len(record.pods)} pods use {uses / GIB:.3g} GiB of GPU {gpu.uuid} together, "
                    f"{gib} GiB are allocated to it: {held}; {WAY_OUT[limit]}"
                )
                self._events.claim(record.reference, EventReason.ABOVE_MEMORY, message)
            yield record.uid


def _limit(gpu: Gpu, record: ClaimRecord) -> MemoryLimit:
    """What holds a claim to its memory of ``gpu``."""
    return next(entry.limit for entry in record.devices if entry.gpu_uuid == gpu.uuid and entry.gib)
