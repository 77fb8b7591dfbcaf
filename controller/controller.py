"""The controller's decision, made anew after every change: the devices that each node offers.

All input comes from the API server, and all output goes into the plans: a controller that is killed at any instruction
is replaced by one that reads the same state.
"""

from __future__ import annotations

import copy
import gc
import logging
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from controller.cluster.cache import ClusterCache, Snapshot
from controller.cluster.claim_index import PoolDevice
from controller.cluster.fleet import Fleet
from controller.cluster.fleet_builder import FleetBuilder
from controller.cluster.kueue import KueueQueue, QueuedWorkload
from controller.cluster.node_views import UnreportedNodes, UnreportedNodesTracker, refusing_nodes, silent_nodes
from controller.cluster.published_offers import DeviceIndex
from controller.conflicts import ConflictResolver
from controller.curation.curator import Curator
from controller.curation.disjoint import DisjointCurator, DisjointOffers
from controller.curation.listed_devices import ListedDevices
from controller.demand.demand import demand_of, nodes_matching_held
from controller.demand.eligibility import Eligibility
from controller.demand.pending_claims import Queue
from controller.demand.queued_workloads import cluster_of, countable
from controller.demand.reservation import NominatedPods, Reservations
from controller.demand.selected_devices import Matching
from controller.demand.starvation import StarvationFallback
from controller.explain.events import COMPONENT, EventReporter, written_events
from controller.explain.gangs import reasons_of_incomplete
from controller.explain.pending_despite_offers import UnscheduledClaims, reasons_of_waiting
from controller.explain.queued_workloads import WorkloadReasons
from controller.explain.reason import ClaimReason, KnownReasons
from controller.explain.reasons import Reasoning, find_reasons
from controller.explain.scheduler_reports import with_scheduler
from controller.explain.unplaced_pods import UnplacedPods
from controller.fence.withdrawal import Fence, FenceSettings, Withdrawals
from controller.node_labels import LABEL_SETS, NodeLabels
from controller.plans import PlanSpecs, PlanWriter
from controller.publication_modes import DecidedMode, HeldPublication, decide_offer_mode, first_offers
from controller.settings import ControllerSettings
from controller.steps import Observer, Step
from driver.errors import ApiError
from driver.kube.client import KubeClient
from driver.kube.clock import Clock
from driver.kube.events import Recorder
from driver.kube.reads import creation_failure, devices_of, template_exists
from driver.kube.work_loop import Loop
from driver.model.plan import Offer, OfferMode
from driver.placement.measure import Measure
from driver.placement.ranking import Ranking
from driver.placement.state import OfferKind
from driver.steps import observed, unobserved

if TYPE_CHECKING:
    from controller.metrics import ControllerMetrics

log = logging.getLogger(__name__)

BLOCKED_RETRY_INTERVAL_SECONDS = 2.0
"""Time until the next decision after devices could not be offered: they stay fenced, or claims are not up to date."""

VERSION_INTERVAL_SECONDS = 30.0
"""Time after which the version of the API server is read again: control planes are upgraded while this runs."""

DECISION_INTERVAL_SECONDS = 10.0
"""Longest time between two decisions. The heartbeat is renewed only while decisions are made."""

COALESCE_SECONDS = 0.02
"""Time in which changes are collected: claims come in bursts, which one decision answers."""

EXPLAIN_SECONDS = 0.25
"""About how long the reasons of pending claims may take in one decision: pods wait for it meanwhile."""

LONG_DECISION_SECONDS, REST_FACTOR, MAX_REST_SECONDS = 0.05, 2.0, 0.5
"""After a decision that took longer, API server or machine are busy: the controller rests for a multiple of the excess,
so that the next decision answers more changes with fewer writes."""


def soonest(*times: float | None) -> float:
    """Seconds until the next decision without a change; None: not due at all."""
    return min([DECISION_INTERVAL_SECONDS, *(seconds for seconds in times if seconds is not None)])


class Decided(NamedTuple):
    """What a decision was made from. It stays as it is, except that allocations of claims may become newer."""

    snapshot: Snapshot
    fleet: Fleet
    devices: DeviceIndex


class Controller:
    """The work of the leader, for one term. ``last_decision`` is what the last decision was made from."""

    def __init__(
        self,
        client: KubeClient,
        settings: ControllerSettings,
        observer: Observer = unobserved,
        metrics: ControllerMetrics | None = None,
    ) -> None:
        self._loop = Loop("deciding what to offer", self._turn, COALESCE_SECONDS, give_way=self._rest)
        self._observer = observer
        self._recorder = Recorder(client, COMPONENT, settings.identity)
        self._events = EventReporter(self._recorder)
        self._metrics = metrics
        claim_changed = metrics.claim_changed if metrics is not None else None
        self._cache = ClusterCache(client, settings.driver_name, self._loop.notify, claim_changed)
        fence_settings = FenceSettings(
            settings.settle_s, keep_s=settings.fence_minutes * 60, namespace=settings.namespace
        )
        self._fence = Fence(client, self._cache, fence_settings, observer=observer)
        self._matching = Matching(settings.driver_name)
        self._eligibility = self._eligibility_of_queued = Eligibility(())
        self._kueue = KueueQueue(client, self._loop.notify) if settings.kueue else None
        self.last_decision: Decided | None = None
        self._started = self._settled = self._adopted = False
        self._decided_at = -math.inf
        self._excess_seconds = 0.0
        """How much longer than ``LONG_DECISION_SECONDS`` the last decision took."""
        self._starvation = StarvationFallback()
        self._reservations = Reservations()
        self._nominated = NominatedPods()
        self._unreported = UnreportedNodesTracker()
        self._workload_reasons = WorkloadReasons()
        self._known_reasons = KnownReasons(EXPLAIN_SECONDS)
        self._fleet_builder = FleetBuilder()
        self._devices = DeviceIndex()
        self._specs = PlanSpecs()
        ranking = Ranking(Measure(settings.weights))
        self._curator = Curator(ranking, settings.offers)
        self._disjoint_curator = DisjointCurator(ranking, settings.offers)
        self._listed_devices = ListedDevices(settings.min_published, settings.offers)
        self._unscheduled = UnscheduledClaims(settings.unused_s, Clock(), partial(devices_of, client))
        self._unplaced = UnplacedPods(Clock(), partial(template_exists, client), partial(creation_failure, client))
        self._node_labels = NodeLabels(client, LABEL_SETS[settings.node_labels])
        self._conflicts = ConflictResolver(
            client, self._recorder, settings.driver_name, evicted=metrics.pod_evicted if metrics is not None else None
        )
        self._client, self._settings = client, settings
        self._minor_version: int | None = None
        self._version_read_at = -math.inf
        self._mode: DecidedMode | None = None
        self._held_publication = HeldPublication()
        self._writer = PlanWriter(client, self._cache.observe_plan, observer=observer)
        self._withdrawals = Withdrawals(self._fence, self._loop.notify, settings.linger_s, observer=observer)

    def run(self, stop: threading.Event) -> None:
        """Lead until ``stop`` is set."""
        self._cache.start(stop)
        kueue = () if self._kueue is None else (self._kueue.run,)
        for target in (self._withdrawals.run, self._recorder.run, self._node_labels.run, self._wake_at, *kueue):
            threading.Thread(target=target, args=(stop,), daemon=True, name=target.__qualname__).start()
        self._loop.run(stop)

    def _wake_at(self, stop: threading.Event) -> None:
        stop.wait()
        self._fence.end()
        for wake in (self._loop.notify, self._withdrawals.notify, self._recorder.wake, self._node_labels.wake):
            wake()

    def _rest(self, stop: threading.Event) -> None:
        rest = min(REST_FACTOR * self._excess_seconds, MAX_REST_SECONDS)
        stop.wait(max(0.0, self._decided_at + rest - time.monotonic()))

    def _turn(self) -> float | None:
        began = time.monotonic()
        with observed(self._observer, Step.DECIDE):
            again = self._decide()
        self._excess_seconds = max(0.0, time.monotonic() - began - LONG_DECISION_SECONDS)
        if not self._settled and self._decided_at > 0:
            # Most listed objects stay: the garbage collector need not visit them again and again.
            gc.collect()
            gc.freeze()
            self._settled = True
        return again

    def _decide(self) -> float | None:
        """Decide from one snapshot and write the plans that changed. Returns seconds until the next decision.

        Raises ApiError.
        """
        if not self._cache.synced:
            return None
        began = time.perf_counter()
        seen = self._cache.snapshot()
        fleet = self._fleet_builder.build(seen.views, seen.changed)
        self._devices.update(seen.views, seen.changed, fleet)
        if seen.changed.nodes:
            self._eligibility, self._eligibility_of_queued = (Eligibility(seen.cluster.nodes) for _ in range(2))
        devices, queue = self._devices, Queue(seen.cluster, fleet, self._matching, self._eligibility)
        self._start(seen)
        mode = self._decide_mode(seen)
        chosen = self._choose(mode, fleet, queue)
        nominated = self._nominated.update(queue, devices.offered)
        offers = devices.offerable({*chosen.offers, *nominated}, seen.plans)
        workloads = [] if self._kueue is None else self._kueue.snapshot()
        queued = self._queue_of(workloads, fleet, seen)
        listed = self._list(mode, fleet, queued, seen)
        withdrawn, obstructed = self._withdraw(mode, chosen, offers, listed)
        blocked = obstructed | self._unfence(offers - obstructed)
        most_gpus = self._settings.publish_held_limit(self._minor_version)
        names, matched = [view.name for view in seen.views], nodes_matching_held(queue)
        publish_held = self._held_publication.decide(len(fleet.gpus), most_gpus, seen.plans, names, matched)
        blocked |= self._unverified(offers - blocked, fleet, seen)
        possible = offers - blocked
        specs = self._specs.update(seen.views, seen.changed, fleet, possible, withdrawn, publish_held, mode, listed)
        changed = self._specs.changed | seen.changed.names
        written = self._writer.write(specs, seen.plans, self._specs.owners, changed)
        self._specs.changed.clear()
        if written:
            elapsed = (time.perf_counter() - began) * 1000
            log.info("wrote plans", extra={"plans": written, "offers": len(chosen.offers), "ms": f"{elapsed:.0f}"})
        self._events.labels(seen.cluster.nodes, seen.changed.nodes, fleet)
        self._node_labels.update(seen.changed, fleet)
        if self._settings.evict_conflicting:
            self._conflicts.update(seen.cluster.claims, fleet, seen.changed.names)
        self._cache.acknowledge()
        self._events.unreadable(self._cache.unreadable())
        unreported = self._unreported.update(seen.views)
        waiting: list[ClaimReason] = []
        if mode is OfferMode.DISJOINT:
            waiting = reasons_of_waiting(queue, chosen.planned, obstructed, self._settings.settle_s)
        reasons = self._explain(queue, unreported, seen, waiting)
        if self._metrics is not None:
            self._metrics.decision_made(queue, fleet, offers, reasons, seen.changed.names)
        if queued is not None:
            self._events.workloads(self._workload_reasons.of(queued, workloads, unreported))
        self._decided_at = time.monotonic()
        self.last_decision = Decided(seen, fleet, copy.copy(devices))
        retry = BLOCKED_RETRY_INTERVAL_SECONDS if blocked else None
        return soonest(
            self._writer.due_in_s(),
            self._unscheduled.next_s,
            self._unplaced.next_s,
            self._starvation.next_s,
            self._reservations.next_s,
            self._held_publication.next_s,
            self._conflicts.next_s,
            0.0 if self._known_reasons.postponed or not self._adopted else None,
            retry,
        )

    def failure(self) -> str | None:
        """Why nodes must not rely on their plans: the caches are out of date, or no decisions are made."""
        if (stale := self._cache.stale()) is not None:
            return stale
        since = time.monotonic() - self._decided_at
        if since < 2 * DECISION_INTERVAL_SECONDS:
            return None
        return "no decision has been made yet" if since == math.inf else f"no decision has been made for {since:.0f} s"

    def unreadable(self) -> Mapping[str, int]:
        """Number of unreadable objects by kind."""
        return Counter(about.kind for about, _ in self._cache.unreadable())

    def _start(self, seen: Snapshot) -> None:
        """Take over the fence of the previous leader; once."""
        if not self._started:
            self._fence.start(self._devices.of(offer for plan in seen.plans.values() for offer in plan.spec.offered))
            self._started = True

    def _decide_mode(self, seen: Snapshot) -> OfferMode:
        """The offer mode of the cluster. Raises ApiError if the version is not known yet and nobody answers."""
        if time.monotonic() - self._version_read_at >= VERSION_INTERVAL_SECONDS:
            self._minor_version = self._read_minor_version()
            self._version_read_at = time.monotonic()
        decided = decide_offer_mode(self._settings.offer_mode, self._minor_version, seen.views)
        if decided != self._mode:
            log.info("offer mode", extra={"mode": decided.mode.value, "reason": decided.reason})
            self._mode = decided
        return decided.mode

    def _read_minor_version(self) -> int | None:
        """The minor version of Kubernetes, such as 36 for "36+"; None if this account may not read it."""
        try:
            found = re.match(r"\d+", str(self._client.get_object("/version").get("minor", "")))
        except ApiError as error:
            if error.status is None and self._mode is None:
                raise
            return self._minor_version
        return int(found[0]) if found is not None else None

    def _choose(self, mode: OfferMode, fleet: Fleet, queue: Queue) -> DisjointOffers:
        """What to offer, whether it is possible at once or not."""
        offered = self._devices.offered
        if mode is OfferMode.DISJOINT:
            reserved = self._reservations.update(queue)
            return self._disjoint_curator.curate(queue, offered, self._starvation.next_node(queue), reserved)
        demands = demand_of(queue, self._starvation.widened(queue))
        requested = {demand.key for demand in demands}
        protected = [offer for offer in offered if OfferKind(offer.type, offer.profile) in requested]
        return DisjointOffers(self._curator.curate(fleet, demands, offered, protected))

    def _queue_of(self, workloads: Collection[QueuedWorkload], fleet: Fleet, seen: Snapshot) -> Queue | None:
        """What ``workloads`` will claim; None without any, as every decision would pay for an empty queue."""
        if not workloads:
            return None
        return Queue(cluster_of(seen.cluster, workloads), fleet, self._matching, self._eligibility_of_queued)

    def _list(self, mode: OfferMode, fleet: Fleet, queued: Queue | None, seen: Snapshot) -> set[Offer]:
        """What to publish whether it is offered or not; nothing with disjoint offers, which it would obstruct."""
        if mode is OfferMode.DISJOINT:
            return set()
        nodes = {view.name for view in seen.views if view.follows_plan and not view.closed}
        needed = () if queued is None else countable(queued)
        return self._devices.offerable(self._listed_devices.update(fleet, nodes, needed), seen.plans)

    def _withdraw(
        self, mode: OfferMode, chosen: DisjointOffers, offers: set[Offer], listed: set[Offer]
    ) -> tuple[frozenset[PoolDevice], set[Offer]]:
        """The devices to withdraw now, and those of ``offers`` that others of their GPU keep waiting."""
        devices, staying = self._devices, offers | listed
        excess = frozenset(device for offer, device in devices.managed.items() if offer not in staying)
        if mode is not OfferMode.DISJOINT:
            return self._withdrawals.decide(excess, devices.is_published), set()
        awaited = {offer for planned in chosen.planned.values() for offer in planned}
        urgent = frozenset[PoolDevice]().union(*devices.obstacles(awaited, ()).values())
        withdrawn = self._withdrawals.decide(excess, devices.is_published, urgent)
        return withdrawn, {*devices.obstacles(offers, withdrawn)}

    def _unfence(self, offers: Collection[Offer]) -> set[Offer]:
        """Lift the fence from offered devices. Returns those of ``offers`` that stay fenced because that failed."""
        devices = self._devices
        unmanaged = {device for offer, device in devices.free.items() if offer not in devices.managed}
        fenced = {device for device in devices.of(offers) | unmanaged if self._fence.is_fenced(device)}
        if not fenced:
            return set()
        try:
            self._fence.lift(fenced)
        except ApiError as error:
            log.warning("fenced devices cannot be offered now", extra={"count": len(fenced), "error": str(error)})
            return {offer for offer in offers if devices.of([offer]) & fenced}
        return set()

    def _unverified(self, offers: Collection[Offer], fleet: Fleet, seen: Snapshot) -> set[Offer]:
        """Those of ``offers`` on unpublished GPUs whose plans may lack a held device.

        The scheduler does not count the memory of devices on such a GPU, so the plan that offers something of it again
        must name every device of it that a claim holds. Hence this waits until the cache of claims has processed every
        change up to now, and leaves out the nodes on which that changed anything: another decision follows at once.
        """
        again = first_offers(offers, fleet, seen.plans)
        if not again:
            return set()
        nodes = set(again.values())
        if self._fence.catch_up():
            views = (view for view in seen.views if view.name in nodes)
            nodes = {view.name for view in views if self._cache.held_on(view.pool) != view.held}
        return {offer for offer, node in again.items() if node in nodes}

    def _explain(
        self, queue: Queue, unreported: UnreportedNodes, seen: Snapshot, waiting: Iterable[ClaimReason]
    ) -> Mapping[str, str]:
        """Report why claims are pending: no device can satisfy them, or the scheduler does not allocate what can.

        ``waiting`` are reasons of claims whose offers are not possible yet. Returns the code by key of the claim.
        """
        offered = {offer: self._devices.free[offer] for offer in self._devices.offered}
        unfenced = {offer: device for offer, device in offered.items() if not self._fence.is_fenced(device)}
        silent = silent_nodes(seen.views, seen.incomplete)
        late = self._devices.unpublished(seen.plans)
        unscheduled = self._unscheduled.reasons(queue, unfenced, silent, refusing_nodes(seen.views), late)
        unplaced = reversed(self._unplaced.reasons(queue))
        lacking = find_reasons(Reasoning(queue, self._known_reasons), unreported)
        everything = chain(unplaced, lacking, reasons_of_incomplete(queue, Clock()), unscheduled, waiting)
        if not self._adopted and self._decided_at > 0:
            # Not in the first decision, for which nodes and pods wait.
            self._events.adopt(written_events(self._client))
            self._adopted = True
        codes: dict[str, str] = {}
        self._events.claims(_first_of_each(with_scheduler(everything, queue, Clock()), codes), queue)
        return codes


def _first_of_each(reasons: Iterable[ClaimReason], codes: dict[str, str]) -> Iterator[ClaimReason]:
    """The first reason of each claim, as soon as it is found; its code is added to ``codes`` by key of the claim."""
    for each in reasons:
        if each.pending.key not in codes:
            codes[each.pending.key] = each.code.value
            yield each
