"""What a crash or a lost call leaves on the node: where each case is found, and what removes it.

    found                                                     by         then
    record whose prepare or unprepare was cut off             recover    ClaimCleanup: spec, partitions, record
    record of a claim that does not exist any more            Orphans    Preparer.unprepare, which does the same
    CDI spec, or partition in a claim's status, no record     Orphans    record rebuilt, or released as above
    partition without any of them                             Scanner    left alone: Tessera did not create it

``recover`` runs once, at the start; ``Orphans`` searches periodically. A release that fails is repeated (``retry``).

Nothing is released on doubt. A claim counts as deleted when the API server has said so twice, a minute apart, the
second time from etcd and not from a cache. Until then its devices are held, for it may be running. A full GPU on which
a process still runs is left alone, and NVML refuses to remove a partition that is in use.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec

from driver.errors import NOT_FOUND, ApiError, RecoverableError
from driver.kube.hostile_json import decode
from driver.kube.types import Claim
from driver.model.device import Device
from driver.model.offer import DeviceKind
from kubelet_plugin.checkpoint.records import ClaimRecord
from kubelet_plugin.claims.cleanup import ClaimCleanup
from kubelet_plugin.claims.context import PluginContext
from kubelet_plugin.claims.preparer import ClaimReader, Preparer
from kubelet_plugin.claims.steps import Step
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.status.events import EventReason, PluginEvents

log = logging.getLogger(__name__)

START_DELAY_SECONDS = 5.0
"""From the start until the first search."""

SEARCH_INTERVAL_SECONDS = 300.0
"""Between two searches: each reads every claim of the node, and a cluster may have a thousand nodes."""

GRACE_PERIOD_SECONDS = 60.0
"""How long a claim must have been deleted. A working kubelet unprepares it meanwhile."""

Count = Callable[[str], None]
"""Receives the kind of each orphan that was dealt with: ``claim``, ``cdi-spec`` or ``record``."""


def recover(context: PluginContext, cleanup: ClaimCleanup) -> None:
    """Hold the devices of all records and undo unfinished claims. Call it once, before the first prepare.

    A claim that was being prepared is undone: the kubelet got no answer and will ask again. So is one that was being
    unprepared. Never raises for a single claim: what fails is logged and stays held.
    """
    records = context.checkpoint.records()
    for record in records:
        context.inventory.hold(record.reference, _devices(context, record))
    with context.step(Step.TIDY_CDI_SPECS):
        _tidy_specs(context)
    for record in records:
        with context.step(Step.RECOVER_RECORD, claim=str(record)):
            try:
                if record.needs_release:
                    cleanup.finish_release(record.uid)
            except RecoverableError as error:
                extra = {"claim": str(record), "error": str(error)}
                log.error("can't release what is left of a claim yet", extra=extra)


def hold_recorded(context: PluginContext) -> None:
    """Hold the devices of records and of CDI specs without a record, also on GPUs that have come back since the start.

    May run concurrently with prepare and unprepare: a record that changes meanwhile is read again.
    """
    for uid in context.checkpoint.unrecorded:
        context.hold_unrecorded(uid)
        if uid not in context.checkpoint.unrecorded and context.checkpoint.get(uid) is None:
            context.inventory.release(uid)
    for uid in [record.uid for record in context.checkpoint.records()]:
        while (record := context.checkpoint.get(uid)) is not None:
            context.inventory.hold(record.reference, _devices(context, record))
            if context.checkpoint.get(uid) is record:
                break
        else:
            context.inventory.release(uid)


def _devices(context: PluginContext, record: ClaimRecord) -> list[Device]:
    found = []
    for entry in record.devices:
        device = context.recorded_device(entry)
        if device is not None:
            found.append(device)
            continue
        log.error(
            "a held device is not on this node any more",
            extra={"claim": str(record), "device": entry.device, "gpu": entry.gpu_uuid},
        )
    return found


def _tidy_specs(context: PluginContext) -> None:
    """Remove half-written specs; hold the devices of specs whose claim has no readable record."""
    try:
        context.cdi.remove_half_written()
        for uid in context.cdi.claim_uids():
            if context.checkpoint.get(uid) is None:
                context.checkpoint.note_missing(uid)
    except RecoverableError as error:
        log.error("can't tidy the CDI directory", extra={"error": str(error)})
    for uid in context.checkpoint.unrecorded:
        context.hold_unrecorded(uid)


class Reported(msgspec.Struct, frozen=True):
    """``data`` of the driver's own entry in ``status.devices`` of a claim (``claim_status``)."""

    uuid: str


REPORTED = msgspec.json.Decoder(Reported)


class Orphans:
    """For one thread."""

    def __init__(
        self,
        context: PluginContext,
        preparer: Preparer,
        cleanup: ClaimCleanup,
        claims: ClaimReader,
        events: PluginEvents,
        count: Count = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._preparer = preparer
        self._cleanup = cleanup
        self._claims = claims
        self._events = events
        self._count = count
        self._clock = clock
        self._gone_since: dict[str, float] = {}
        self._reported: set[str] = set()
        self._searched = False
        self._due = clock() + START_DELAY_SECONDS
        for uid in context.checkpoint.aside:
            events.node(
                EventReason.RECORD_UNREADABLE, f"the checkpoint record of claim {uid} can't be read; see the log"
            )

    def search_if_due(self) -> float:
        """Search if it is time to. Return the number of seconds until the next search."""
        if self._clock() >= self._due:
            pause = SEARCH_INTERVAL_SECONDS * random.uniform(0.8, 1.2)  # noqa: S311 - spreads load, guards nothing
            try:
                self._search()
            except RecoverableError as error:
                log.warning("can't search for orphans now", extra={"error": str(error)})
                pause = GRACE_PERIOD_SECONDS
            soon = self._gone_since or self._context.checkpoint.unrecorded
            self._due = self._clock() + (min(pause, GRACE_PERIOD_SECONDS) if soon else pause)
        return max(0.0, self._due - self._clock())

    def _search(self) -> None:
        self._search_unrecorded()
        records = [record for record in self._context.checkpoint.records() if not record.needs_release]
        known = {record.uid for record in records} | self._context.checkpoint.unrecorded
        self._gone_since = {uid: since for uid, since in self._gone_since.items() if uid in known}
        for record in records:
            if self._is_gone(record, any_age=True) and self._long_enough(record.uid):
                self._release(record)

    def _long_enough(self, uid: str) -> bool:
        return self._clock() - self._gone_since.setdefault(uid, self._clock()) >= GRACE_PERIOD_SECONDS

    # Claims

    def _is_gone(self, record: ClaimRecord, *, any_age: bool) -> bool:
        """Whether the claim of ``record`` was deleted or lost its devices. Raises ApiError on doubt."""
        try:
            claim = self._claims.read(record.namespace, record.name, any_age=any_age)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            return True
        if claim.metadata.uid == record.uid and self._allocated(claim) & {entry.device for entry in record.devices}:
            self._gone_since.pop(record.uid, None)
            return False
        return True

    def _allocated(self, claim: Claim) -> set[str]:
        """The devices of this node that are allocated to ``claim``."""
        allocation, pool = claim.status.allocation, self._context.pool
        results = allocation.devices.results if allocation is not None else ()
        return {each.device for each in results if (each.driver, each.pool) == (pool.driver, pool.name)}

    def _release(self, record: ClaimRecord) -> None:
        if not self._is_gone(record, any_age=False):
            return
        reference, devices = record.reference, ", ".join(entry.device for entry in record.devices)
        where = f"claim {record} ({record.uid})"
        if busy := self._busy(record):
            log.warning("an orphan is still in use", extra={"claim": str(record), "why": busy})
            self._events.node(EventReason.ORPHAN_IN_USE, f"{where} is gone, and {devices} can't be released: {busy}")
            return
        try:
            self._preparer.unprepare(reference)
        except RecoverableError as error:
            log.warning("can't release an orphan yet", extra={"claim": str(record), "error": str(error)})
        self._gone_since.pop(record.uid, None)
        self._count("claim")
        self._events.node(EventReason.ORPHAN_RELEASED, f"{where} is gone, and was never unprepared: released {devices}")

    def _busy(self, record: ClaimRecord) -> str:
        """Why a full GPU of ``record`` must not be released. NVML refuses to destroy partitions in use."""
        for entry in record.devices:
            gpu = self._context.inventory.gpu(entry.gpu_uuid)
            if entry.kind is not DeviceKind.FULL or gpu is None:
                continue
            try:
                running = self._context.host.processes(gpu)
            except RecoverableError as error:
                return str(error)
            if running:
                return f"{running} processes still run on {entry.gpu_uuid}"
        return ""

    # Claims without a record

    def _search_unrecorded(self) -> None:
        """Rebuild unreadable or missing records of claims that are allocated; release claims that are not any more."""
        context = self._context
        for uid in context.cdi.claim_uids():
            if context.checkpoint.get(uid) is None and uid not in context.checkpoint.unrecorded:
                self._cleanup.note_stray_spec(uid)
        search = not self._searched and context.inventory.foreign
        if context.checkpoint.unrecorded or search:
            claims = {claim.metadata.uid: claim for claim in self._claims.read_all()}
            for claim in claims.values() if search else ():
                self._note_if_partitions_exist(claim)
            self._report_missing()
            for uid in sorted(context.checkpoint.unrecorded):
                self._settle(uid, claims.get(uid))
        self._searched = True

    def _note_if_partitions_exist(self, claim: Claim) -> None:
        """Find a claim that lost its record and its CDI spec: its status names the partitions that exist.

        An allocation alone proves nothing: the partition at that placement may have another origin.
        """
        uid, context = claim.metadata.uid, self._context
        known = context.checkpoint.get(uid) is not None or uid in context.checkpoint.unrecorded
        devices = [] if known else [context.inventory.device(name) for name in sorted(self._allocated(claim))]
        uuids = self._reported_uuids(claim) if devices else {}
        if devices and all(device is not None and self._exists(uid, device, uuids) for device in devices):
            context.checkpoint.note_missing(uid)

    def _reported_uuids(self, claim: Claim) -> dict[str, str]:
        """UUIDs by device in ``status.devices`` of ``claim``, as this node's plugin wrote them."""
        pool, found = self._context.pool, {}
        for entry in claim.status.devices:
            if (entry.driver, entry.pool) == (pool.driver, pool.name):
                with suppress(msgspec.MsgspecError):
                    found[entry.device] = decode(entry.data, REPORTED).uuid
        return found

    def _exists(self, uid: str, device: Device, uuids: Mapping[str, str]) -> bool:
        """Whether ``device`` exists as the partition with that UUID, and no other claim holds it."""
        if device.profile is None or device.placement is None or self._context.inventory.conflict(uid, device):
            return False
        try:
            partition = self._context.host.find_partition(device.gpu, device.profile, device.placement)
        except RecoverableError:
            return False
        return partition is not None and partition.uuid is not None and partition.uuid == uuids.get(device.name)

    def _report_missing(self) -> None:
        for uid in sorted(self._context.checkpoint.unrecorded - self._context.checkpoint.aside - self._reported):
            self._reported.add(uid)
            message = f"the checkpoint record of claim {uid} is missing; nothing of it is removed while it exists"
            self._events.node(EventReason.RECORD_MISSING, message)

    def _settle(self, uid: str, claim: Claim | None) -> None:
        if claim is not None and self._allocated(claim):
            self._gone_since.pop(uid, None)
            self._events.remember_pods(claim)
            self._adopt(ClaimReference(claim.metadata.namespace, claim.metadata.name, uid))
        elif self._long_enough(uid):
            try:
                self._abandon(ClaimReference("", uid, uid))
            except RecoverableError as error:
                log.warning("can't release an orphan yet", extra={"claimUID": uid, "error": str(error)})

    def _adopt(self, reference: ClaimReference) -> None:
        try:
            self._preparer.prepare(reference)
        except RecoverableError as error:
            log.error("can't rebuild a checkpoint record", extra={"claim": str(reference), "error": str(error)})
            self._events.claim(
                reference, EventReason.RECORD_UNREADABLE, f"its checkpoint record can't be rebuilt: {error}"
            )
            return
        self._count("record")
        message = "its checkpoint record, which was unreadable or missing, was rebuilt"
        self._events.claim(reference, EventReason.RECORD_REBUILT, message)

    def _abandon(self, reference: ClaimReference) -> None:
        record = self._cleanup.record_of_spec(reference)
        where = f"claim {reference.uid}, whose checkpoint record is unreadable or missing,"
        if record is not None and (busy := self._busy(record)):
            self._events.node(EventReason.ORPHAN_IN_USE, f"{where} is gone, and can't be released: {busy}")
            return
        kind = "record" if reference.uid in self._context.checkpoint.aside else "cdi-spec"
        if self._cleanup.begin_release(reference):
            self._cleanup.finish_release(reference.uid)
        self._count(kind)
        self._events.node(EventReason.ORPHAN_RELEASED, f"{where} is gone: released what its CDI spec named")
