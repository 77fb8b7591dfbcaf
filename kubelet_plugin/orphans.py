"""What no claim of the API server explains: found at the start and every few minutes, and released.

Nothing is done on doubt. A claim counts as gone when the API server has said so twice, a minute apart, the second time
from etcd and not from a cache; a full GPU on which a process still runs is left alone, and a partition that is in use
can't be removed anyway. What Tessera did not make it never touches.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from driver.errors import NOT_FOUND, ApiError, RecoverableError
from driver.kube.claims import Claim
from driver.model.device import DeviceKind
from kubelet_plugin.claims import ClaimReference
from kubelet_plugin.node import Node
from kubelet_plugin.preparation import Preparer
from kubelet_plugin.records import ClaimRecord
from kubelet_plugin.telling import Reason, Teller

log = logging.getLogger(__name__)

FIRST_S = 5.0
"""After the start until the first look."""

LOOK_S = 300.0
"""Between two looks: each asks for every claim of the node, and there may be a thousand nodes."""

GRACE_S = 60.0
"""How long a claim must be gone. A kubelet that is well unprepares it meanwhile."""

Count = Callable[[str], None]
"""Told the kind of each orphan that was dealt with: ``claim``, ``cdi-spec`` or ``record``."""


class Claims(Protocol):
    """The API server's. Both raise ApiError."""

    def read(self, namespace: str, name: str, *, any_age: bool) -> Claim:
        """One claim; status 404 where there is none."""
        ...

    def every(self) -> Iterable[Claim]:
        """All of them."""
        ...


class Orphans:
    """For one thread. ``count`` is told of each orphan that was dealt with."""

    def __init__(
        self,
        node: Node,
        preparer: Preparer,
        claims: Claims,
        teller: Teller,
        count: Count = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node = node
        self._preparer = preparer
        self._claims = claims
        self._teller = teller
        self._count = count
        self._clock = clock
        self._gone_since: dict[str, float] = {}
        self._due = clock() + FIRST_S
        for uid in node.checkpoint.aside:
            teller.node(Reason.RECORD_UNREADABLE, f"the checkpoint record of claim {uid} can't be read; see the log")

    def look(self) -> float:
        """Look, if it is time to; says in how many seconds it is again."""
        if self._clock() >= self._due:
            pause = LOOK_S * random.uniform(0.8, 1.2)  # noqa: S311 - spreads load, guards nothing
            try:
                self._look()
            except RecoverableError as error:
                log.warning("can't look for orphans now", extra={"error": str(error)})
                pause = GRACE_S
            self._due = self._clock() + (min(pause, GRACE_S) if self._gone_since else pause)
        return max(0.0, self._due - self._clock())

    def _look(self) -> None:
        self._tidy_specs()
        self._rebuild()
        records = [record for record in self._node.checkpoint.records() if not record.owed]
        known = {record.uid for record in records} | self._node.checkpoint.aside
        self._gone_since = {uid: since for uid, since in self._gone_since.items() if uid in known}
        for record in records:
            if self._is_gone(record, any_age=True) and self._long_enough(record.uid):
                self._release(record)

    def _long_enough(self, uid: str) -> bool:
        return self._clock() - self._gone_since.setdefault(uid, self._clock()) >= GRACE_S

    # Claims

    def _is_gone(self, record: ClaimRecord, *, any_age: bool) -> bool:
        """Whether nobody has the devices of ``record`` for its claim any more. Raises ApiError on doubt."""
        try:
            claim = self._claims.read(record.namespace, record.name, any_age=any_age)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            return True
        if claim.metadata.uid == record.uid and self._allocated(claim) & {entry.device for entry in record.devices}:
            self._teller.met(claim)
            self._gone_since.pop(record.uid, None)
            return False
        return True

    def _allocated(self, claim: Claim) -> set[str]:
        """The devices of this node that are allocated to ``claim``."""
        allocation, pool = claim.status.allocation, self._node.pool
        results = allocation.devices.results if allocation is not None else ()
        return {each.device for each in results if (each.driver, each.pool) == (pool.driver, pool.name)}

    def _release(self, record: ClaimRecord) -> None:
        if not self._is_gone(record, any_age=False):
            return
        reference, devices = record.reference, ", ".join(entry.device for entry in record.devices)
        where = f"claim {record} ({record.uid})"
        if busy := self._busy(record):
            log.warning("an orphan is still in use", extra={"claim": str(record), "why": busy})
            self._teller.node(Reason.ORPHAN_IN_USE, f"{where} is gone, and {devices} can't be released: {busy}")
            return
        try:
            self._preparer.unprepare(reference)
        except RecoverableError as error:
            log.warning("can't release an orphan yet", extra={"claim": str(record), "error": str(error)})
        self._gone_since.pop(record.uid, None)
        self._count("claim")
        self._teller.node(Reason.ORPHAN_RELEASED, f"{where} is gone, and was never unprepared: released {devices}")

    def _busy(self, record: ClaimRecord) -> str:
        """Why a full GPU of ``record`` must not be let go of. Partitions in use can't be destroyed: NVML sees to it."""
        for entry in record.devices:
            gpu = self._node.inventory.gpu(entry.gpu_uuid)
            if entry.kind is not DeviceKind.FULL or gpu is None:
                continue
            try:
                running = self._node.host.processes(gpu)
            except RecoverableError as error:
                return str(error)
            if running:
                return f"{running} processes still run on {entry.gpu_uuid}"
        return ""

    # CDI specs

    def _tidy_specs(self) -> None:
        for uid in self._node.cdi.claim_uids():
            if self._node.checkpoint.get(uid) is None and self._preparer.upkeep.remove_stray_spec(uid):
                self._count("cdi-spec")
                self._teller.node(Reason.ORPHAN_RELEASED, f"removed the CDI spec of claim {uid}, which is not prepared")

    # Records that were set aside

    def _rebuild(self) -> None:
        """Records that can't be read are made anew: from the claim, or where that is gone from its CDI spec."""
        aside = self._node.checkpoint.aside
        if not aside:
            return
        claims = {claim.metadata.uid: claim for claim in self._claims.every()}
        for uid in sorted(aside):
            claim = claims.get(uid)
            if claim is not None and self._allocated(claim):
                self._teller.met(claim)
                self._adopt(ClaimReference(claim.metadata.namespace, claim.metadata.name, uid))
            elif self._long_enough(uid):
                self._abandon(uid)

    def _adopt(self, reference: ClaimReference) -> None:
        try:
            self._preparer.prepare(reference)
        except RecoverableError as error:
            log.error("can't rebuild a checkpoint record", extra={"claim": str(reference), "error": str(error)})
            self._teller.claim(reference, Reason.RECORD_UNREADABLE, f"its checkpoint record can't be rebuilt: {error}")
            return
        self._count("record")
        self._teller.claim(reference, Reason.RECORD_REBUILT, "its unreadable checkpoint record was made anew")

    def _abandon(self, uid: str) -> None:
        if self._preparer.upkeep.rebuild_from_spec(uid):
            self._preparer.upkeep.finish_release(uid)
        self._node.checkpoint.settle(uid)
        self._count("record")
        message = f"claim {uid}, whose checkpoint record can't be read, is gone: released what its CDI spec named"
        self._teller.node(Reason.ORPHAN_RELEASED, message)
