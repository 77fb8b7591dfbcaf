"""The work of the leader: a decision after every change of the cluster, and the pauses between them."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from controller.decision.decision import DECISION_INTERVAL_SECONDS, Decision
from controller.settings import ControllerSettings
from controller.steps import Observer, Step
from driver.kube.client import KubeClient
from driver.kube.work_loop import Loop
from driver.steps import observed, unobserved

if TYPE_CHECKING:
    from controller.metrics import ControllerMetrics
    from controller.report.cluster_view import ClusterView

COALESCE_SECONDS = 0.02
"""Time in which changes are collected: claims come in bursts, which one decision answers."""

LONG_DECISION_SECONDS, REST_FACTOR, MAX_REST_SECONDS = 0.05, 2.0, 0.5
"""After a decision that took longer, API server or machine are busy: the controller rests for a multiple of the excess,
so that the next decision answers more changes with fewer writes."""


class Controller:
    """The work of the leader, for one term."""

    def __init__(
        self,
        client: KubeClient,
        settings: ControllerSettings,
        observer: Observer = unobserved,
        metrics: ControllerMetrics | None = None,
    ) -> None:
        self._loop = Loop("deciding what to offer", self._turn, COALESCE_SECONDS, give_way=self._rest)
        self._decision = Decision(client, settings, self._loop.notify, observer, metrics)
        self._observer = observer
        self._decided_at = -math.inf
        self._excess_seconds = 0.0
        """How much longer than ``LONG_DECISION_SECONDS`` the last decision took."""
        self._is_settled = False

    @property
    def last_decision(self) -> ClusterView | None:
        """What the last decision was made from, with the reasons it found; None: none has been made yet."""
        return self._decision.last

    def run(self, stop: threading.Event) -> None:
        """Lead until ``stop`` is set."""
        self._decision.start(stop)
        threading.Thread(target=self._end_at, args=(stop,), daemon=True, name="end-of-term").start()
        self._loop.run(stop)

    def failure(self) -> str | None:
        """Why nodes must not rely on their plans: the caches are out of date, or no decisions are made."""
        if (stale := self._decision.stale()) is not None:
            return stale
        since = time.monotonic() - self._decided_at
        if since < 2 * DECISION_INTERVAL_SECONDS:
            return None
        return "no decision has been made yet" if since == math.inf else f"no decision has been made for {since:.0f} s"

    def unreadable(self) -> Mapping[str, int]:
        """Number of unreadable objects by kind."""
        return self._decision.unreadable()

    def _end_at(self, stop: threading.Event) -> None:
        stop.wait()
        self._decision.end()
        self._loop.notify()

    def _rest(self, stop: threading.Event) -> None:
        rest = min(REST_FACTOR * self._excess_seconds, MAX_REST_SECONDS)
        stop.wait(max(0.0, self._decided_at + rest - time.monotonic()))

    def _turn(self) -> float | None:
        began = time.monotonic()
        before = self._decision.last
        with observed(self._observer, Step.DECIDE):
            again = self._decision.decide()
        if self._decision.last is not before:
            self._decided_at = time.monotonic()
            self._settle()
        self._excess_seconds = max(0.0, time.monotonic() - began - LONG_DECISION_SECONDS)
        return again

    def _settle(self) -> None:
        """Most listed objects stay: the garbage collector need not visit them again and again."""
        if not self._is_settled:
            gc.collect()
            gc.freeze()
            self._is_settled = True
