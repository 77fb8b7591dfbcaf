"""Undoing what a crash interrupted, repeating releases that failed, and repairing prepared claims.

The kubelet repeats a call until it is answered, and never afterwards. Without retries a failed unprepare of a deleted
pod, a partition that was lost in a GPU reset, or a deleted CDI spec would stay as they are.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from functools import partial

from driver.errors import RecoverableError
from driver.kube.work_loop import Loop
from driver.model.gpu import Gpu
from driver.model.gpu_events_and_conditions import ConditionType
from driver.model.offer import OF_SEVERAL
from kubelet_plugin.checkpoint.records import ClaimRecord
from kubelet_plugin.claims.claim_stores import ClaimStores
from kubelet_plugin.claims.cleanup import ClaimCleanup
from kubelet_plugin.claims.preparer import Preparer
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.status.events import EventReason, PluginEvents
from kubelet_plugin.step_names import NodeStep, StepRunner

CallObserver = Callable[[str, ClaimReference], AbstractContextManager[None]]
"""(verb, claim): observes how a call ends, as ``FailedPreparations.observe``."""

log = logging.getLogger(__name__)

COALESCE_SECONDS = 0.2

RETRY_INTERVAL_SECONDS = 10.0
"""Between two attempts to release or repair a claim."""

STUCK_AFTER_SECONDS = 60.0
"""Longest duration of a release until its devices are tainted: a pod that gets one of them would only wait."""

ROUND_TIMEOUT_SECONDS = 20.0
"""How long a round waits for a GPU that does not answer: longer than the timeout of a lock."""

WORKERS = 16
"""Attempts at once. Those for one GPU that hangs wait for its lock, each as long as the timeout of a lock."""


def recover(stores: ClaimStores, cleanup: ClaimCleanup, steps: StepRunner) -> None:
    """Hold the devices of all records and undo unfinished claims. Call it once, before the first prepare.

    A claim that was being prepared is undone: the kubelet got no answer and will ask again. So is one that was being
    unprepared. Never raises for a single claim: what fails is logged and stays held.
    """
    records = stores.checkpoint.records()
    for record in records:
        stores.hold_record(record)
    with steps(NodeStep.TIDY_CDI_SPECS):
        tidy_specs(stores)
    for record in records:
        with steps(NodeStep.RECOVER_RECORD, claim=record):
            try:
                if record.needs_release:
                    cleanup.finish_release(record.uid)
            except RecoverableError as error:
                extra = {"claim": str(record), "error": str(error)}
                log.error("can't release what is left of a claim yet", extra=extra)


def tidy_specs(stores: ClaimStores) -> None:
    """Remove half-written specs; hold the devices of specs whose claim has no readable record."""
    try:
        stores.cdi.remove_half_written()
        for uid in stores.cdi.claim_uids():
            if stores.checkpoint.get(uid) is None:
                stores.checkpoint.note_missing(uid)
    except RecoverableError as error:
        log.error("can't tidy the CDI directory", extra={"error": str(error)})
    for uid in stores.checkpoint.unrecorded:
        stores.hold_unrecorded(uid)


class ClaimReconciler:
    """One thread. Call ``notify`` after a failed release or a loss; ``find_orphans`` runs in between."""

    def __init__(
        self,
        stores: ClaimStores,
        preparer: Preparer,
        events: PluginEvents,
        report_condition: Callable[[str, ConditionType, str | None], None],
        find_orphans: Callable[[], float],
        observe: CallObserver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stores, self._preparer, self._events = stores, preparer, events
        self._report_condition, self._find_orphans, self._clock = report_condition, find_orphans, clock
        self._observe = observe
        self._unreleased_since: dict[str, float] = {}
        self._tried_at: dict[str, float] = {}
        self._reported: dict[tuple[str, ConditionType], tuple[str, ...]] = {}
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="reconciler")
        self._running: dict[str, Future[None]] = {}
        self._loop = Loop("reconciling prepared claims", self.reconcile, COALESCE_SECONDS)
        self.notify = self._loop.notify

    def run(self, stop: threading.Event) -> None:
        """Reconcile at the start, when notified and periodically, until ``stop`` is set (then ``notify`` once more)."""
        self.notify()
        self._loop.run(stop)
        self._workers.shutdown(wait=False, cancel_futures=True)

    def handle_scan(self, _answering: Sequence[Gpu]) -> None:
        """Restore a missing CDI directory; reconcile soon if the spec of a prepared claim is not as it should be."""
        with suppress(RecoverableError):  # its probe reports a directory that is not writable
            self._stores.cdi.restore()
        if not all(self._stores.cdi.is_current(record.uid) for record in self._stores.prepared()):
            self.notify()

    def reconcile(self) -> float:
        """Release and repair claims. Return the number of seconds until the next round."""
        unreleased = {record.uid: record for record in self._stores.checkpoint.records() if record.needs_release}
        self._forget(unreleased)
        for uid in unreleased:
            self._unreleased_since.setdefault(uid, self._clock())
        jobs = {uid: partial(self._release, record) for uid, record in unreleased.items()}
        for record, lost in self._preparer.losses():
            if lost or (record.uid, ConditionType.LOST) in self._reported:
                jobs[record.uid] = partial(self._repair, record, lost)
        self._run({uid: job for uid, job in jobs.items() if self._is_due(uid)})
        pause = self._find_orphans()
        return min(pause, RETRY_INTERVAL_SECONDS) if self._unreleased_since or self._reported else pause

    def _run(self, jobs: Mapping[str, Callable[[], None]]) -> None:
        """Run ``jobs`` by claim, except those that hang since an earlier round. Raises what is no RecoverableError."""
        self._running = {uid: future for uid, future in self._running.items() if not future.done()}
        started = {uid: self._workers.submit(job) for uid, job in jobs.items() if uid not in self._running}
        self._running |= started
        done, _ = wait(started.values(), ROUND_TIMEOUT_SECONDS)
        for future in done:
            future.result()

    def _forget(self, unreleased: Mapping[str, ClaimRecord]) -> None:
        """Forget claims that have ended or do not need to be released any more."""
        self._unreleased_since = {uid: since for uid, since in self._unreleased_since.items() if uid in unreleased}
        recorded = {record.uid for record in self._stores.checkpoint.records()}
        self._tried_at = {uid: at for uid, at in self._tried_at.items() if uid in recorded}
        for uid, kind in list(self._reported):
            if uid not in (unreleased if kind is ConditionType.STUCK else recorded):
                self._report(uid, kind)

    def _is_due(self, uid: str) -> bool:
        """Whether to try now. Notifications come in bursts; after a failure the next attempt has to wait."""
        now = self._clock()
        if now < self._tried_at.get(uid, float("-inf")) + RETRY_INTERVAL_SECONDS * 0.9:
            return False
        self._tried_at[uid] = now
        return True

    # Releases

    def _release(self, record: ClaimRecord) -> None:
        try:
            with self._observe("unprepare", record.reference):
                released = self._preparer.cleanup.finish_release(record.uid)
        except RecoverableError as error:
            log.warning("can't release a claim yet", extra={"claim": str(record), "error": str(error)})
            if self._clock() >= self._unreleased_since.get(record.uid, self._clock()) + STUCK_AFTER_SECONDS:
                self._report(record.uid, ConditionType.STUCK, record, f"{record} can't be released: {error}")
            return
        self._report(record.uid, ConditionType.STUCK)
        if released:
            message = "what could not be released before is released now"
            self._events.claim(record.reference, EventReason.RELEASED_LATE, message, warning=False)

    # Repairs

    def _repair(self, record: ClaimRecord, lost: Sequence[str]) -> None:
        what = ", ".join(lost) or "what it had lost"
        try:
            self._preparer.repair(record.uid)
        except RecoverableError as error:
            log.error("can't repair a prepared claim", extra={"claim": str(record), "lost": what, "error": str(error)})
            self._events.claim(
                record.reference, EventReason.REPAIR_FAILED, f"{what} is gone and can't be made: {error}"
            )
            self._report(record.uid, ConditionType.LOST, record, f"{what} is gone and can't be made again: {error}")
            return
        self._tried_at.pop(record.uid, None)
        self._report(record.uid, ConditionType.LOST)

    def _report(self, uid: str, kind: ConditionType, record: ClaimRecord | None = None, why: str | None = None) -> None:
        """Report a condition of the devices of ``record``; without a record, that the claim's condition has ended.

        What a claim has lost says nothing about a shared device, which other claims have, too.
        """
        devices = self._reported.pop((uid, kind), ())
        if record is not None:
            concerned = (e for e in record.devices if kind is ConditionType.STUCK or e.kind not in OF_SEVERAL)
            devices = self._reported[uid, kind] = tuple(entry.device for entry in concerned)
        others = {name for (_, other), names in self._reported.items() if other is kind for name in names}
        for device in devices:
            if record is not None or device not in others:
                self._report_condition(device, kind, why)
