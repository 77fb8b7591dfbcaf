"""Claims of shared GPUs and what their pods use, looked at with each scan of the node's GPUs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from driver.errors import ApiError, RecoverableError
from driver.model.gpu import Gpu
from driver.model.shared_memory import GIB
from kubelet_plugin.checkpoint.gpu_and_claim_locks import claim_key
from kubelet_plugin.checkpoint.records import ClaimRecord
from kubelet_plugin.claims.allocation import pods_of
from kubelet_plugin.claims.claim_memory import GpuSettingsOfClaims, is_limited
from kubelet_plugin.claims.claim_stores import ClaimStores
from kubelet_plugin.claims.mps_shares import parts_by_mps
from kubelet_plugin.claims.preparer import ClaimReader
from kubelet_plugin.status.events import EventReason, PluginEvents

log = logging.getLogger(__name__)

PODS_INTERVAL_SECONDS = 60.0
"""How often the pods are read that use a claim which several can use: the kubelet does not report later ones."""


class MemoryWatch:
    """Sets limits again that a reload of the driver has lost, and for pods that began to use a claim later. Starts MPS
    daemons again that have ended, and ends those that no claim uses.

    Each pod of a claim is held to the claim's memory; a claim whose pods use more than that together is reported.
    """

    def __init__(
        self,
        stores: ClaimStores,
        settings: GpuSettingsOfClaims,
        claims: ClaimReader,
        events: PluginEvents,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stores, self._memory, self._mps = stores, settings.memory, settings.mps
        self._claims, self._events, self._clock = claims, events, clock
        self._read_at: dict[str, float] = {}
        self.above: frozenset[str] = frozenset()
        """The UIDs of the claims whose pods use more than the claim has."""

    def handle_scan(self, answering: Sequence[Gpu]) -> None:
        """Check the limits on the GPUs that answer. What fails is tried again with the next scan."""
        above: set[str] = set()
        for gpu in answering:
            if self._mps.may_have_daemon(gpu):
                self._check_mps(gpu)
            records = [record for record in self._stores.prepared() if is_limited(gpu, record)]
            if not records:
                continue
            try:
                for record in records:
                    self._note_later_pods(record)
                with self._stores.locks.hold([gpu.uuid], f"checking the memory of claims on {gpu.uuid}"):
                    used = self._memory.check(gpu)
            except RecoverableError as error:
                log.warning("can't check the memory limits of a GPU", extra={"gpu": gpu.uuid, "error": str(error)})
                above |= self.above & {record.uid for record in records}
                continue
            above |= set(self._claims_above(gpu, records, used))
        self.above = frozenset(above)

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

    def _note_later_pods(self, record: ClaimRecord) -> None:
        """Record the pods that use a claim now, if others than those that it was prepared for may do so."""
        now = self._clock()
        if record.of_one_pod or now - self._read_at.get(record.uid, float("-inf")) < PODS_INTERVAL_SECONDS:
            return
        recorded = {other.uid for other in self._stores.checkpoint.records()}
        self._read_at = {uid: at for uid, at in self._read_at.items() if uid in recorded} | {record.uid: now}
        try:
            claim = self._claims.read(record.namespace, record.name, any_age=True)
        except ApiError as error:
            log.debug("the pods of a claim are unknown", extra={"claim": str(record), "error": str(error)})
            return
        pods = tuple(sorted({*pods_of(claim), *record.pods}))
        if claim.metadata.uid != record.uid or pods == record.pods:
            return
        with self._stores.locks.hold([claim_key(record.uid), *record.gpu_uuids], f"noting the pods of claim {record}"):
            current = self._stores.checkpoint.get(record.uid)
            if current is not None and not current.needs_release:
                self._stores.checkpoint.put(msgspec.structs.replace(current, pods=pods), durable=False)

    def _claims_above(self, gpu: Gpu, records: Iterable[ClaimRecord], used: Mapping[str, int]) -> Iterable[str]:
        """The claims whose pods use more of ``gpu`` together than they may; those that are new get an Event."""
        gib_of = {record.uid: sum(d.gib for d in record.devices if d.gpu_uuid == gpu.uuid) for record in records}
        for record in records:
            if len(record.pods) < 2:
                continue  # its own limit holds it
            others = [other for other in records if not set(other.pods).isdisjoint(record.pods)]
            allowed = sum(gib_of[other.uid] for other in others) * GIB
            uses = sum(used.get(pod, 0) for pod in record.pods)
            if uses <= allowed:
                continue
            if record.uid not in self.above:
                message = (
                    f"its {len(record.pods)} pods use {uses / GIB:.3g} GiB of GPU {gpu.uuid} together, "
                    f"{gib_of[record.uid]} GiB are allocated to it: each pod is held to that, not their sum; "
                    "use a ResourceClaimTemplate, so that each pod has a claim of its own"
                )
                self._events.claim(record.reference, EventReason.ABOVE_MEMORY, message)
            yield record.uid
