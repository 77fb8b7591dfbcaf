"""The work of the leader: a decision after every change of the cluster, and the pauses between them.

All input comes from the API server, and all output goes into the plans: a controller that is killed at any instruction
is replaced by one that reads the same state.
"""

from __future__ import annotations

import gc
import math
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from controller.cluster.cache import ClusterCache, Snapshot
from controller.decision.choose import ChooseStage
from controller.decision.config_rollout import ConfigRollout
from controller.decision.explain import ExplainStage
from controller.decision.read import ReadStage
from controller.decision.withdraw_and_admit import AdmitStage, WithdrawStage
from controller.decision.write_and_evict import WriteStage
from controller.demand.pending_claims import Queue
from controller.eviction.evictor import Evictor
from controller.eviction.failed_starts import FailedStarts
from controller.eviction.overlapping_allocations import OverlapEvictor
from controller.eviction.preemptions import Preemptions
from controller.eviction.recent_evictions import RecentEvictions
from controller.explain.events import COMPONENT
from controller.fence.fence import Fence, FenceSettings
from controller.report.cluster_view import ClusterView
from controller.settings import ControllerSettings
from controller.step_names import Observer, Step
from driver.clock import soonest
from driver.kube.client import KubeClient
from driver.kube.events import Recorder
from driver.kube.work_loop import Loop
from driver.step_observer import observed, unobserved

if TYPE_CHECKING:
    from controller.metrics import ControllerMetrics

DECISION_INTERVAL_SECONDS = 10.0
"""Longest time between two decisions. The heartbeat is renewed only while decisions are made."""

COALESCE_SECONDS = 0.02
"""Time in which changes are collected: claims come in bursts, which one decision answers."""

LONG_DECISION_SECONDS, REST_FACTOR, MAX_REST_SECONDS = 0.05, 2.0, 0.5
"""After a decision that took longer, API server or machine are busy: the controller rests for a multiple of the excess,
so that the next decision answers more changes with fewer writes."""


class Controller:
    """The stages of a decision and what they share, for one term of the leader.

    ``last_decision`` is what the last decision was made from, with the reasons it found; None: none has been made yet.
    """

    def __init__(
        self,
        client: KubeClient,
        settings: ControllerSettings,
        observer: Observer = unobserved,
        metrics: ControllerMetrics | None = None,
    ) -> None:
        self.last_decision: ClusterView | None = None
        self._loop = Loop("deciding what to offer", self._turn, COALESCE_SECONDS, give_way=self._rest)
        self._observer = observer
        self._decided_at = -math.inf
        self._excess_seconds = 0.0
        """How much longer than ``LONG_DECISION_SECONDS`` the last decision took."""
        wake = self._loop.notify
        claim_changed = metrics.claim_changed if metrics is not None else None
        self._cache = ClusterCache(client, settings.driver_name, wake, claim_changed)
        fence_settings = FenceSettings(
            settings.settle_s, keep_s=settings.fence_minutes * 60, namespace=settings.namespace
        )
        self._fence = Fence(client, self._cache, fence_settings, observer=observer)
        self._recorder = Recorder(client, COMPONENT, settings.identity)
        self._read = ReadStage(client, settings, self._cache, wake)
        self._choose = ChooseStage(settings, self._fence.fenced)
        self._withdraw = WithdrawStage(self._fence, settings, wake, observer)
        self._admit = AdmitStage(self._cache, self._fence)
        evictor = Evictor(client, self._recorder, RecentEvictions(client, settings.namespace), metrics)
        overlaps = OverlapEvictor(client, evictor, settings)
        failed_starts = FailedStarts(client, evictor, settings.driver_name, settings.evict_failed_starts_s)
        self._write = WriteStage(client, settings, self._cache, overlaps, failed_starts, observer)
        self._rollout = ConfigRollout(client, settings.namespace, self._decided_from)
        # It works in a thread of its own, so it has an evictor of its own.
        preemptor = Evictor(client, self._recorder, RecentEvictions(client, settings.namespace), metrics)
        self._preemptions = Preemptions(client, self._queue, self.failure, preemptor, self._recorder, self._fence)
        self._explain = ExplainStage(client, settings, self._cache, self._fence, self._recorder, metrics)
        self._timed = (self._choose, self._admit, self._write, self._explain.finder)
        """The parts whose result may change by time alone."""

    def decide(self) -> float | None:
        """Decide once, and write the plans that changed. Returns seconds until the next decision. Raises ApiError."""
        if not self._cache.synced:
            return None
        seen = self._read.read()
        offers = self._choose.choose(seen)
        offers = self._withdraw.withdraw(seen, offers)
        offers = self._admit.admit(seen, offers)
        self._write.write(seen, offers)
        self._cache.acknowledge()
        self.last_decision = self._explain.explain(seen, offers)
        self._read.prepare(seen)
        return soonest(DECISION_INTERVAL_SECONDS, *(part.next_s for part in self._timed))

    def run(self, stop: threading.Event) -> None:
        """Lead until ``stop`` is set."""
        withdrawals, labels, rollout = self._withdraw.withdrawals.loop, self._write.labels.loop, self._rollout.loop
        recorder = self._recorder
        preemption = self._preemptions.loop
        for run in (withdrawals.run, labels.run, rollout.run, preemption.run, recorder.run):
            threading.Thread(target=run, args=(stop,), daemon=True, name="leader-background").start()

        def end() -> None:
            stop.wait()
            self._fence.end()  # another controller leads by now: change nothing any more
            loops = (withdrawals, labels, rollout, preemption, self._loop)
            for wake in (*(loop.notify for loop in loops), recorder.wake):
                wake()

        threading.Thread(target=end, daemon=True, name="end-of-term").start()
        rollout.notify()
        preemption.notify()
        self._read.start(stop)
        self._loop.run(stop)

    def _decided_from(self) -> Snapshot | None:
        return None if self.last_decision is None else self.last_decision.snapshot

    def _queue(self) -> Queue | None:
        return None if self.last_decision is None else self.last_decision.queue

    def failure(self) -> str | None:
        """Why nodes must not rely on their plans: the caches are out of date, or no decisions are made."""
        if (stale := self._cache.stale()) is not None:
            return stale
        since = time.monotonic() - self._decided_at
        if since < 2 * DECISION_INTERVAL_SECONDS:
            return None
        return "no decision has been made yet" if since == math.inf else f"no decision has been made for {since:.0f} s"

    def unreadable(self) -> Mapping[str, int]:
        return Counter(about.kind for about, _ in self._cache.unreadable())

    def _rest(self, stop: threading.Event) -> None:
        rest = min(REST_FACTOR * self._excess_seconds, MAX_REST_SECONDS)
        stop.wait(max(0.0, self._decided_at + rest - time.monotonic()))

    def _turn(self) -> float | None:
        began, before = time.monotonic(), self.last_decision
        with observed(self._observer, Step.DECIDE):
            again = self.decide()
        if self.last_decision is not before:
            self._decided_at = time.monotonic()
            if before is None:  # most listed objects stay: the garbage collector need not visit them again and again
                gc.collect()
                gc.freeze()
        self._excess_seconds = max(0.0, time.monotonic() - began - LONG_DECISION_SECONDS)
        return again
