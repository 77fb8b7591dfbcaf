"""The controller's decision, made anew after every change: the devices that each node offers.

All input comes from the API server, and all output goes into the plans: a controller that is killed at any instruction
is replaced by one that reads the same state.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from controller.cluster.cache import ClusterCache
from controller.decision.choose import ChooseStage
from controller.decision.explain import ExplainStage
from controller.decision.read import ReadStage
from controller.decision.withdraw_and_admit import AdmitStage, WithdrawStage
from controller.decision.write import WriteStage
from controller.eviction.overlapping_allocations import OverlapEvictor
from controller.explain.events import COMPONENT
from controller.fence.fence import Fence, FenceSettings
from controller.report.cluster_view import ClusterView
from controller.settings import ControllerSettings
from controller.steps import Observer
from driver.kube.client import KubeClient
from driver.kube.events import Recorder

if TYPE_CHECKING:
    from controller.metrics import ControllerMetrics

DECISION_INTERVAL_SECONDS = 10.0
"""Longest time between two decisions. The heartbeat is renewed only while decisions are made."""


class Timed(Protocol):
    """A part of the decision whose result may change by time alone."""

    @property
    def next_s(self) -> float | None:
        """Seconds until it may; None: it does not."""


class Decision:
    """The stages of a decision, and what they share for one term of the leader.

    ``last`` is what the last decision was made from, with the reasons it found; None: none has been made yet.
    """

    def __init__(
        self,
        client: KubeClient,
        settings: ControllerSettings,
        wake: Callable[[], None],
        observer: Observer,
        metrics: ControllerMetrics | None,
    ) -> None:
        """``wake`` asks for another decision."""
        self.last: ClusterView | None = None
        claim_changed = metrics.claim_changed if metrics is not None else None
        self._cache = ClusterCache(client, settings.driver_name, wake, claim_changed)
        keep_s = settings.fence_minutes * 60
        fence_settings = FenceSettings(settings.settle_s, keep_s=keep_s, namespace=settings.namespace)
        self._fence = Fence(client, self._cache, fence_settings, observer=observer)
        self._recorder = Recorder(client, COMPONENT, settings.identity)
        self._read = ReadStage(client, settings, self._cache, wake)
        self._choose = ChooseStage(settings)
        self._withdraw = WithdrawStage(self._fence, settings, wake, observer)
        self._admit = AdmitStage(self._cache, self._fence)
        evictor = OverlapEvictor(client, self._recorder, settings, metrics)
        self._write = WriteStage(client, settings, self._cache, evictor, observer)
        self._explain = ExplainStage(client, settings, self._cache, self._fence, self._recorder, metrics)
        self._timed: tuple[Timed, ...] = (self._choose, self._admit, self._write, self._explain)
        self._background = (self._withdraw.withdrawals, self._write.labels, self._recorder)

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
        self.last = self._explain.explain(seen, offers)
        self._read.prepare(seen)
        times = [part.next_s for part in self._timed]
        return min([DECISION_INTERVAL_SECONDS, *(seconds for seconds in times if seconds is not None)])

    def start(self, stop: threading.Event) -> None:
        """Watch the cluster, and work in the background, until ``stop`` is set (then call ``end``)."""
        self._read.start(stop)
        for part in self._background:
            threading.Thread(target=part.run, args=(stop,), daemon=True, name=type(part).__name__).start()

    def end(self) -> None:
        """Change nothing any more: another controller leads by now."""
        self._fence.end()
        for part in self._background:
            part.wake()

    def stale(self) -> str | None:
        """Why the caches may be out of date; None if all are current."""
        return self._cache.stale()

    def unreadable(self) -> Mapping[str, int]:
        """Number of unreadable objects by kind."""
        return Counter(about.kind for about, _ in self._cache.unreadable())
