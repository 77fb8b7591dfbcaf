"""The last stage of a decision: say why claims are pending, in Events, metrics and on the web page."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from controller.cluster.cache import ClusterCache, Snapshot
from controller.cluster.fleet import Fleet
from controller.cluster.published_offers import DeviceIndex
from controller.decision.choose import ChosenOffers, WaitsFor
from controller.decision.read import DecisionInput
from controller.explain.events import EventReporter, written_events
from controller.explain.gangs import reasons_of_incomplete
from controller.explain.pending_despite_offers import UnscheduledClaims, reasons_of_waiting
from controller.explain.queued_workloads import WorkloadReasons
from controller.explain.reason import ClaimReason, KnownReasons
from controller.explain.reasons import Reasoning, find_reasons
from controller.explain.scheduler_reports import with_scheduler
from controller.explain.unplaced_pods import UnplacedPods
from controller.fence.fence import Fence
from controller.settings import ControllerSettings
from driver.kube.client import KubeClient
from driver.kube.clock import Clock
from driver.kube.events import Recorder
from driver.kube.reads import creation_failure, devices_of, template_exists
from driver.kube.work_loop import soonest

if TYPE_CHECKING:
    from controller.metrics import ControllerMetrics

EXPLAIN_SECONDS = 0.25
"""About how long the reasons of pending claims may take in one decision: pods wait for it meanwhile."""


class Decided(NamedTuple):
    """What a decision was made from. It stays as it is, except that allocations of claims may become newer."""

    snapshot: Snapshot
    fleet: Fleet
    devices: DeviceIndex


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
        self._is_first, self._has_adopted = True, False
        self._workload_reasons = WorkloadReasons()
        self._known_reasons = KnownReasons(EXPLAIN_SECONDS)
        self._unscheduled = UnscheduledClaims(settings.unused_s, Clock(), partial(devices_of, client))
        self._unplaced = UnplacedPods(Clock(), partial(template_exists, client), partial(creation_failure, client))

    @property
    def next_s(self) -> float | None:
        return soonest(self._unscheduled.next_s, self._unplaced.next_s)

    def explain(self, seen: DecisionInput, offers: ChosenOffers) -> Decided:
        """Report what this decision found. Returns what it was made from."""
        if not seen.is_same_cluster:
            self._events.labels(seen.snapshot.cluster.nodes, seen.snapshot.changed.nodes, seen.fleet)
        self._events.unreadable(self._cache.unreadable())
        codes = self._explain_claims(seen, offers)
        if self._metrics is not None:
            self._metrics.decision_made(seen.queue, seen.fleet, offers.wanted, codes, seen.snapshot.changed.names)
        if seen.queued is not None:
            self._events.workloads(self._workload_reasons.of(seen.queued, seen.workloads, seen.unreported))
        return Decided(seen.snapshot, seen.fleet, copy.copy(seen.devices))

    def _explain_claims(self, seen: DecisionInput, offers: ChosenOffers) -> Mapping[str, str]:
        """Report why claims are pending: no device can satisfy them, or the scheduler does not allocate what can.

        Returns the code by key of the claim.
        """
        queue, devices = seen.queue, seen.devices
        offered = {offer: devices.free[offer] for offer in devices.offered}
        unfenced = {offer: device for offer, device in offered.items() if device not in self._fence.fenced}
        late = devices.unpublished(seen.snapshot.plans)
        unscheduled = self._unscheduled.reasons(queue, unfenced, seen.nodes.silent, seen.nodes.refusing, late)
        unplaced = reversed(self._unplaced.reasons(queue))
        lacking = find_reasons(Reasoning(queue, self._known_reasons), seen.unreported)
        waiting: list[ClaimReason] = []
        if offers.planned.by_claim is not None:
            obstructed = offers.waiting_for(WaitsFor.OVERLAPPING_DEVICES)
            waiting = reasons_of_waiting(queue, offers.planned.by_claim, obstructed, self._settings.settle_s)
        incomplete = reasons_of_incomplete(queue, Clock()) if queue.gangs else ()
        reasons = chain(unplaced, lacking, incomplete, unscheduled, waiting)
        self._adopt()
        codes: dict[str, str] = {}
        self._events.claims(_first_of_each(with_scheduler(reasons, queue, Clock()), codes), queue)
        return codes

    def _adopt(self) -> None:
        """Take over the Events of the previous leader; not in the first decision, for which nodes and pods wait."""
        if not self._is_first and not self._has_adopted:
            self._events.adopt(written_events(self._client))
            self._has_adopted = True
        self._is_first = False


def _first_of_each(reasons: Iterable[ClaimReason], codes: dict[str, str]) -> Iterator[ClaimReason]:
    """The first reason of each claim, as soon as it is found; its code is added to ``codes`` by key of the claim."""
    for reason in reasons:
        if reason.pending.key not in codes:
            codes[reason.pending.key] = reason.code.value
            yield reason
