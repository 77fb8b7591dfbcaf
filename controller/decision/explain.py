"""The last stage of a decision: say why claims are pending, in Events, metrics and on the web page."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from controller.cluster.cache import ClusterCache, Snapshot
from controller.cluster.claim_index import gpu_of
from controller.cluster.node_views import UnreportedNodes
from controller.cluster.unheld_devices import UnheldDevices
from controller.decision.choose import ChosenOffers, WaitsFor
from controller.decision.read import DecisionInput
from controller.demand.pending_claims import Queue
from controller.demand.queued_workload_claims import WorkloadQueue
from controller.explain.events import EventReporter, written_events
from controller.explain.pipeline import ReasonFinder
from controller.explain.reason import ClaimReason, ReasonCode
from controller.explain.situation import DisjointPlan, Situation
from controller.explain.sources.no_free_device import Reasoning, reason_of
from controller.fence.fence import Fence
from controller.report.cluster_view import ClusterReads, ClusterView
from controller.settings import ControllerSettings
from driver.kube.client import KubeClient
from driver.kube.events import Recorder
from driver.kube.types import Key, Metadata

if TYPE_CHECKING:
    from controller.metrics import ControllerMetrics

EXPLAIN_SECONDS = 0.25
"""About how long the reasons of pending claims, and those of Workloads, may take in one decision: pods wait for it."""

WORKLOADS_INTERVAL_SECONDS = 5.0
"""Time between two explanations of queued Workloads."""

DECIDED_AT_ADMISSION = {ReasonCode.NO_NODE, ReasonCode.OTHER_NODES}
"""Reasons that Workloads do not get: a ResourceFlavor may change where the pods may run."""


class ExplainStage:
    """Remembers what has been reported and since when claims are pending."""

    def __init__(
        self,
        client: KubeClient,
        settings: ControllerSettings,
        cache: ClusterCache,
        fence: Fence,
        recorder: Recorder,
        metrics: ControllerMetrics | None,
    ) -> None:
        self._client, self._settings, self._cache, self._fence, self._metrics = client, settings, cache, fence, metrics
        self._events = EventReporter(recorder)
        self._explained = 0
        """The number of decisions that have been explained."""
        self._workload_reasons = WorkloadReasons()
        self.finder = ReasonFinder(settings.unused_s, client.clock, EXPLAIN_SECONDS)
        self._lookups = ClusterReads(client, settings)

    def explain(self, seen: DecisionInput, offers: ChosenOffers) -> ClusterView:
        """Report what this decision found. Returns what it was made from, with the reasons."""
        if not seen.is_same_cluster:
            self._events.report_labels(seen.snapshot.cluster.nodes, seen.snapshot.changed.nodes, seen.fleet)
        self._events.report_unreadable(self._cache.unreadable())
        self._explained += 1
        if self._explained == 2:  # nodes and pods wait for the first decision
            self._events.adopt(written_events(self._client))
        plan = None
        if offers.planned.by_claim is not None:
            obstructed = offers.waiting_for(WaitsFor.OVERLAPPING_DEVICES)
            plan = DisjointPlan(offers.planned.by_claim, obstructed, self._settings.settle_s)
        situation = Situation(
            queue=seen.queue,
            offered=seen.devices.allocatable(self._fence.fenced.devices),
            reserved={gpu_of(entry): uids for entry, uids in self._fence.fenced.reservations.items()},
            unpublished=seen.devices.unpublished(seen.snapshot.plans),
            silent=seen.nodes.silent,
            refusing=seen.nodes.refusing,
            unreported=seen.unreported,
            plan=plan,
            lookups=self._lookups,
        )
        reasons = self._events.report_claims(self.finder.find(situation), seen.queue)
        if self._metrics is not None:
            codes = {key: reason.code.value for key, reason in reasons.items()}
            self._metrics.decision_made(seen.queue, seen.fleet, offers.wanted, codes, seen.snapshot)
        if seen.queued is not None:
            self._events.report_workloads(self._workload_reasons.of(seen.queued, seen.unreported))
        return decided_view(seen.snapshot, copy.copy(seen.devices), seen.queue, reasons, self._lookups)


def decided_view(
    snapshot: Snapshot,
    devices: UnheldDevices,
    queue: Queue,
    reasons: Mapping[str, ClaimReason],
    reads: ClusterReads,
) -> ClusterView:
    """The view of a decision, for another thread, whose results the next decision does not remember."""
    fleet = queue.feasibility.fleet
    return ClusterView(snapshot, fleet, devices, queue.on(fleet), decided=reasons, reads=reads)


class WorkloadReasons:
    """Explains in turn why what Kueue's queued Workloads will claim is not free, as many as there is time for.

    Kueue decides by quotas, which the controller does not know: a Workload whose devices are free gets no reason.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due_at = -math.inf
        self._explained = 0
        """How many claims of the queue have had their turn."""

    def of(self, queue: WorkloadQueue, unreported: UnreportedNodes) -> Iterator[tuple[Metadata, ClaimReason]]:
        """One reason of each Workload, by its metadata."""
        began = self._clock()
        if began < self._due_at:
            return
        self._due_at = began + WORKLOADS_INTERVAL_SECONDS
        done: set[Key] = set()
        reasoning, first = Reasoning(queue), self._explained % max(1, len(queue.pending))
        for pending in (*queue.pending[first:], *queue.pending[:first]):
            self._explained += 1
            origin = queue.origin(pending)
            workload = origin.workload.metadata
            reason = None if workload.key in done else reason_of(pending, reasoning, unreported)
            if reason is not None and reason.code not in DECIDED_AT_ADMISSION:
                done.add(workload.key)
                where = f"pod set {origin.pod_set.name}, claim {origin.name}: "
                yield workload, reason._replace(sentence=where + reason.sentence)
            if self._clock() - began > EXPLAIN_SECONDS:
                return
