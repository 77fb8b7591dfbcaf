"""What a crash or a lost call leaves on the node: where each case is found, and what removes it.

    found                                                     by         then
    record whose prepare or unprepare was cut off             recover    ClaimCleanup: spec, partitions, record
    record of a claim that does not exist any more            Orphans    Preparer.unprepare, which does the same
    CDI spec, or partition in a claim's status, no record     Orphans    record rebuilt, or released as above
    partition without any of them                             Scanner    left alone: Tessera did not create it

``recovery.recover`` runs once, at the start; ``Orphans`` searches periodically. ``ClaimReconciler`` repeats a release
that fails.

Nothing is released on doubt. A claim counts as deleted when the API server has said so twice, a minute apart, the
second time from etcd and not from a cache. Until then its devices are held, for it may be running. A full GPU on which
a process still runs is left alone, and NVML refuses to remove a partition that is in use.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from driver.errors import NOT_FOUND, RecoverableError, accepted_status
from driver.kube.tolerant_json import decode
from driver.kube.types import Claim
from driver.model.device import is_monitor
from kubelet_plugin.checkpoint.records import ClaimRecord
from kubelet_plugin.claims.claim_stores import ClaimStores
from kubelet_plugin.claims.preparer import ClaimReader, Preparer
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.status.events import EventReason, PluginEvents

log = logging.getLogger(__name__)

START_DELAY_SECONDS = 5.0
"""From the start until the first search."""

SEARCH_INTERVAL_SECONDS = 300.0
"""Between two searches: each reads every claim of the node, and a cluster may have a thousand nodes."""

GRACE_PERIOD_SECONDS = 60.0
"""How long a claim must have been deleted. A working kubelet unprepares it meanwhile."""


class Reported(msgspec.Struct, frozen=True):
    """``data`` of the driver's own entry in ``status.devices`` of a claim (``claim_status``)."""

    uuid: str


REPORTED = msgspec.json.Decoder(Reported)


class Orphans:
    """Finds what has no claim or no record, and releases it or rebuilds the record. For one thread."""

    def __init__(
        self,
        stores: ClaimStores,
        preparer: Preparer,
        claims: ClaimReader,
        events: PluginEvents,
        count: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``count`` receives the kind of each orphan that was dealt with: ``claim``, ``cdi-spec`` or ``record``."""
        self._stores, self._preparer, self._cleanup, self._claims = stores, preparer, preparer.cleanup, claims
        self._events, self._count, self._clock = events, count, clock
        self._gone_since: dict[str, float] = {}
        self._reported: set[str] = set()
        self._searched = False
        self._due = clock() + START_DELAY_SECONDS
        for uid in stores.checkpoint.aside:
            events.node(
                EventReason.RECORD_UNREADABLE,
                f"the checkpoint record of claim {uid} can't be read; see the log",
                about=uid,
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
            soon = self._gone_since or self._stores.checkpoint.unrecorded
            self._due = self._clock() + (min(pause, GRACE_PERIOD_SECONDS) if soon else pause)
        return max(0.0, self._due - self._clock())

    def _search(self) -> None:
        self._search_unrecorded()
        records = [record for record in self._stores.checkpoint.records() if not record.needs_release]
        recorded = {record.uid for record in records} | self._stores.checkpoint.unrecorded
        self._gone_since = {uid: since for uid, since in self._gone_since.items() if uid in recorded}
        for record in records:
            if self._is_gone(record, any_age=True) and self._long_enough(record.uid):
                self._release(record)

    def _long_enough(self, uid: str) -> bool:
        return self._clock() - self._gone_since.setdefault(uid, self._clock()) >= GRACE_PERIOD_SECONDS

    # Claims

    def _is_gone(self, record: ClaimRecord, *, any_age: bool) -> bool:
        """Whether the claim of ``record`` was deleted or lost its devices. Raises ApiError on doubt."""
        with accepted_status(NOT_FOUND):
            claim = self._claims.read(record.namespace, record.name, any_age=any_age)
            allocated = {result.device for result in claim.results_in(self._stores.pool.driver, record.pools)}
            if claim.metadata.uid == record.uid and allocated & record.names:
                self._gone_since.pop(record.uid, None)
                return False
        return True

    def _allocated(self, claim: Claim) -> set[str]:
        """The devices and monitor devices of this node that are allocated to ``claim``."""
        pool = self._stores.pool
        return {result.device for result in claim.results_in(pool.driver, pool.names)}

    def _release(self, record: ClaimRecord) -> None:
        if not self._is_gone(record, any_age=False):
            return
        reference, devices = record.reference, ", ".join(sorted(record.names))
        where = f"claim {record} ({record.uid})"
        reason = self._cleanup.reason_not_to_release(record)
        if reason:
            log.warning("an orphan is still in use", extra={"claim": str(record), "why": reason})
            message = f"{where} is gone, and {devices} can't be released: {reason}"
            self._events.node(EventReason.ORPHAN_IN_USE, message, about=record.uid)
            return
        try:
            self._preparer.unprepare(reference)
        except RecoverableError as error:
            log.warning("can't release an orphan yet", extra={"claim": str(record), "error": str(error)})
        self._gone_since.pop(record.uid, None)
        self._count("claim")
        message = f"{where} is gone, and was never unprepared: released {devices}"
        self._events.node(EventReason.ORPHAN_RELEASED, message, about=record.uid)

    # Claims without a record

    def _search_unrecorded(self) -> None:
        """Rebuild unreadable or missing records of claims that are allocated; release claims that are not any more."""
        stores = self._stores
        for uid in stores.cdi.claim_uids():
            if stores.checkpoint.get(uid) is None and uid not in stores.checkpoint.unrecorded:
                self._cleanup.note_stray_spec(uid)
        search = not self._searched and stores.inventory.foreign
        if stores.checkpoint.unrecorded or search:
            claims = {claim.metadata.uid: claim for claim in self._claims.read_all()}
            for claim in claims.values() if search else ():
                self._note_if_partitions_exist(claim)
            for uid in sorted(stores.checkpoint.unrecorded - stores.checkpoint.aside - self._reported):
                self._reported.add(uid)
                message = f"the checkpoint record of claim {uid} is missing; nothing of it is removed while it exists"
                self._events.node(EventReason.RECORD_MISSING, message, about=uid)
            for uid in sorted(stores.checkpoint.unrecorded):
                self._settle(uid, claims.get(uid))
        self._searched = True

    def _note_if_partitions_exist(self, claim: Claim) -> None:
        """Find a claim that lost its record and its CDI spec: its status names the partitions that exist.

        An allocation alone proves nothing: the partition at that placement may have another origin.
        """
        uid, stores = claim.metadata.uid, self._stores
        is_recorded = stores.checkpoint.get(uid) is not None or uid in stores.checkpoint.unrecorded
        names = () if is_recorded else sorted(name for name in self._allocated(claim) if not is_monitor(name))
        devices = [stores.inventory.device(name) for name in names]
        uuids = self._reported_uuids(claim) if devices else {}
        if devices and all(
            device is not None and self._cleanup.partition_exists(uid, device, uuids.get(device.name))
            for device in devices
        ):
            stores.checkpoint.note_missing(uid)

    def _reported_uuids(self, claim: Claim) -> dict[str, str]:
        """UUIDs by device in ``status.devices`` of ``claim``, as this node's plugin wrote them."""
        pool, uuids = self._stores.pool, {}
        for entry in claim.status.devices:
            if (entry.driver, entry.pool) == (pool.driver, pool.name):
                with suppress(msgspec.MsgspecError):
                    uuids[entry.device] = decode(entry.data, REPORTED).uuid
        return uuids

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
        reason = "" if record is None else self._cleanup.reason_not_to_release(record)
        if reason:
            message = f"{where} is gone, and can't be released: {reason}"
            self._events.node(EventReason.ORPHAN_IN_USE, message, about=reference.uid)
            return
        kind = "record" if reference.uid in self._stores.checkpoint.aside else "cdi-spec"
        if self._cleanup.write_release_record(reference):
            self._cleanup.finish_release(reference.uid)
        self._count(kind)
        message = f"{where} is gone: released what its CDI spec named"
        self._events.node(EventReason.ORPHAN_RELEASED, message, about=reference.uid)
