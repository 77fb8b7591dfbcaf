"""What nobody asks for again: claims that are still to be released, and what prepared claims have lost.

The kubelet asks until it has an answer, and never after it. So a failed unprepare of a pod that is gone for good, a
partition that a GPU's reset took, or a CDI spec that somebody deleted would stay as they are.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from driver.errors import RecoverableError
from driver.kube.loop import Loop
from driver.model.gpu import Partition
from driver.model.health import Trouble
from kubelet_plugin.crew import Crew
from kubelet_plugin.node import Node
from kubelet_plugin.preparation import Preparer
from kubelet_plugin.records import ClaimRecord
from kubelet_plugin.telling import Reason, Teller

log = logging.getLogger(__name__)

COALESCE_S = 0.2

RETRY_S = 10.0
"""Between two tries to release or repair what could not be."""

STUCK_S = 60.0
"""How long a release may take until its devices are tainted: whoever is given them meanwhile only waits."""

PATIENCE_S = 20.0
"""How long a round waits for a GPU that does not answer: longer than the deadline of a lock."""


Note = Callable[[str, Trouble, str | None], None]
"""(device, kind of trouble, why): ``Health.note``. The reason None: it is well again."""


class Caretaker:
    """One thread. ``notify`` when something may be owed or lost; ``chores`` are done between, see ``Orphans.look``."""

    def __init__(
        self,
        node: Node,
        preparer: Preparer,
        teller: Teller,
        note: Note,
        chores: Callable[[], float] = lambda: RETRY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node = node
        self._preparer = preparer
        self._teller = teller
        self._note = note
        self._chores = chores
        self._clock = clock
        self._owed_since: dict[str, float] = {}
        self._tried_at: dict[str, float] = {}
        self._noted: dict[tuple[str, Trouble], tuple[str, ...]] = {}
        self._crew = Crew("caretaker", PATIENCE_S)
        self._loop = Loop("looking after what is prepared", self.look, COALESCE_S)
        self.notify = self._loop.notify

    def run(self, stop: threading.Event) -> None:
        """Look at the start, when notified and in between, until ``stop`` is set (then ``notify`` once more)."""
        self.notify()
        self._loop.run(stop)

    def look(self) -> float:
        """Release what is owed and repair what is lost; in how many seconds to look again."""
        owed = {record.uid: record for record in self._node.checkpoint.records() if record.owed}
        self._forget(owed)
        for uid in owed:
            self._owed_since.setdefault(uid, self._clock())
        jobs = {uid: partial(self._release, record) for uid, record in owed.items()}
        jobs |= {record.uid: partial(self._repair, record, found) for record, found in self._losses()}
        self._crew.run({uid: job for uid, job in jobs.items() if self._is_due(uid)})
        pause = self._chores()
        return min(pause, RETRY_S) if self._owed_since or self._noted else pause

    def _forget(self, owed: Mapping[str, ClaimRecord]) -> None:
        """What is known of claims that have ended, or are not owed any more, is over."""
        self._owed_since = {uid: since for uid, since in self._owed_since.items() if uid in owed}
        known = {record.uid for record in self._node.checkpoint.records()}
        self._tried_at = {uid: at for uid, at in self._tried_at.items() if uid in known}
        for uid, kind in list(self._noted):
            if uid not in (owed if kind is Trouble.STUCK else known):
                self._report(uid, kind)

    def _is_due(self, uid: str) -> bool:
        """Notifications come in bursts; a try that failed waits its time."""
        now = self._clock()
        if now < self._tried_at.get(uid, float("-inf")) + RETRY_S * 0.9:
            return False
        self._tried_at[uid] = now
        return True

    # What is owed

    def _release(self, record: ClaimRecord) -> None:
        try:
            released = self._preparer.upkeep.finish_release(record.uid)
        except RecoverableError as error:
            log.warning("can't release a claim yet", extra={"claim": str(record), "error": str(error)})
            if self._clock() >= self._owed_since.get(record.uid, self._clock()) + STUCK_S:
                self._report(record.uid, Trouble.STUCK, record, f"{record} can't be released: {error}")
            return
        self._report(record.uid, Trouble.STUCK)
        if released:
            message = "what could not be released before is released now"
            self._teller.claim(record.reference, Reason.RELEASED_LATE, message, warning=False)

    # What is lost

    def _losses(self) -> Iterable[tuple[ClaimRecord, list[str]]]:
        """Prepared claims and what they have lost. A claim that comes or goes meanwhile is looked at again."""
        records = [record for record in self._node.checkpoint.records() if record.stands(self._node.boot)]
        try:
            specs = set(self._node.cdi.claim_uids())
        except RecoverableError as error:
            log.warning("can't list the CDI specs", extra={"error": str(error)})
            specs = {record.uid for record in records}
        standing = {uuid: self._standing(uuid) for record in records for uuid in record.gpu_uuids}
        for record in records:
            found = [] if record.uid in specs else ["its CDI spec"]
            for entry in record.devices:
                there = standing[entry.gpu_uuid]
                if entry.partition is not None and there is not None and entry.partition not in there:
                    found.append(entry.device)
            if found or (record.uid, Trouble.LOST) in self._noted:
                yield record, found

    def _standing(self, uuid: str) -> list[Partition] | None:
        """The partitions of a GPU; None where it can't be asked at present: then nobody knows of a loss."""
        gpu = self._node.inventory.gpu(uuid)
        if gpu is None or self._node.inventory.fault(gpu) is not None:
            return None
        try:
            return list(self._node.host.partitions(gpu))
        except RecoverableError:
            return None

    def _repair(self, record: ClaimRecord, lost: list[str]) -> None:
        what = ", ".join(lost) or "what it had lost"
        try:
            self._preparer.repair(record.uid)
        except RecoverableError as error:
            log.error("can't repair a prepared claim", extra={"claim": str(record), "lost": what, "error": str(error)})
            self._teller.claim(record.reference, Reason.REPAIR_FAILED, f"{what} is gone and can't be made: {error}")
            self._report(record.uid, Trouble.LOST, record, f"{what} is gone and can't be made again: {error}")
            return
        self._report(record.uid, Trouble.LOST)

    def _report(self, uid: str, kind: Trouble, record: ClaimRecord | None = None, why: str | None = None) -> None:
        """Note that the devices of ``record`` are in trouble; without it that those of its claim are not any more."""
        devices = self._noted.pop((uid, kind), ())
        if record is not None:
            devices = self._noted[uid, kind] = tuple(entry.device for entry in record.devices)
        for device in devices:
            self._note(device, kind, why)
