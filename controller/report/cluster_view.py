"""The cluster as the controller sees it, with the reasons of pending claims, for the page and for commands.

The leader shows what its last decision was made from and has found. A standby and the commands read the same from the
API server, and compute what they can not read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import msgspec

from controller.cluster.cache import ClusterCache, Snapshot
from controller.cluster.claim_index import PoolDevice, gpu_of, reservations_in
from controller.cluster.fleet import Fleet
from controller.cluster.fleet_builder import FleetBuilder
from controller.cluster.node_views import REPORT_TIMEOUT_SECONDS, UnreportedNodes, refusing_nodes, silent_nodes
from controller.cluster.unheld_devices import UnheldDevices
from controller.curation.disjoint_planner import DisjointPlanner
from controller.curation.reservation import overdue_reservation
from controller.demand.feasibility import Matching
from controller.demand.pending_claims import Queue
from controller.eviction.failed_starts import REASON as FAILED_START
from controller.eviction.failed_starts import FailedStart, claim_of
from controller.eviction.recent_evictions import Eviction, read_evictions
from controller.explain.events import WrittenEvent
from controller.explain.pipeline import reasons_in
from controller.explain.reason import ClaimReason
from controller.explain.situation import DisjointPlan, Lookups, Situation
from controller.explain.sources.no_free_device import Reasoning
from controller.fence.fenced_devices import read_fenced
from controller.report.unprepared_claims import FailedRelease, failed_releases, failed_starts
from controller.settings import ControllerSettings
from driver.clock import Clock
from driver.errors import FORBIDDEN, NOT_FOUND, ApiError, FatalError
from driver.kube.client import KubeClient
from driver.kube.controller_heartbeat import LastHeartbeat, last_heartbeat
from driver.kube.get_and_list import RESOURCE_GROUP, find_pod, read_all, read_claim
from driver.kube.slice_types import DetailedSlice
from driver.kube.types import Key, Metadata, Pod
from driver.kube.watch_cache import MALFORMED
from driver.model.plan import OfferMode
from driver.placement.ranking import Ranking

STALE_CHECK_INTERVAL_SECONDS = 10.0


@dataclass(frozen=True)
class ClusterView:
    """One moment of the cluster.

    fleet    the GPUs and what is held on them
    devices  the published devices that no claim holds
    queue    the pending claims and what they require
    stale    why all of it may be out of date; None if it is current
    decided  the reasons that the leader found when it decided from this; None: this view finds them itself
    reads    reads what that needs and the snapshot has not; None: nothing more is known
    """

    snapshot: Snapshot
    fleet: Fleet
    devices: UnheldDevices
    queue: Queue
    stale: str | None = None
    decided: Mapping[str, ClaimReason] | None = None
    reads: ClusterReads | None = None

    @property
    def driver(self) -> str:
        return self.queue.feasibility.matching.driver

    @property
    def clock(self) -> Clock:
        """The API server's clock; that of this machine for an imagined cluster."""
        return Clock() if self.reads is None else self.reads.clock

    @cached_property
    def reasoning(self) -> Reasoning:
        """Finds what a claim could have, and what would help."""
        return Reasoning(self.queue)

    @cached_property
    def reasons(self) -> Mapping[str, ClaimReason]:
        """Why claims are pending, by key of the claim, or of the pod that lacks one."""
        if self.decided is not None:
            return self.decided
        return reasons_in(self.situation, self.clock)

    @cached_property
    def situation(self) -> Situation:
        """The situation; fence and heartbeat are read only if they may matter."""
        devices, snapshot, reads = self.devices, self.snapshot, self.reads
        asked = reads if self.queue.pending else None
        fenced = frozenset[PoolDevice]() if asked is None else asked.fenced()
        return Situation(
            queue=self.queue,
            offered=devices.allocatable(fenced or ()),
            reserved={gpu_of(entry): uids for entry, uids in reservations_in(fenced or ()).items()},
            is_fence_known=fenced is not None,
            unpublished=devices.unpublished(snapshot.plans),
            silent=silent_nodes(snapshot.views, snapshot.incomplete),
            refusing=refusing_nodes(snapshot.views),
            unreported=unreported_nodes(snapshot, self.clock),
            plan=self._plan(),
            controller_silent=None if asked is None else asked.controller_silent(),
            lookups=reads or Lookups(),
        )

    @cached_property
    def failed_starts(self) -> Mapping[Key, FailedStart]:
        """The allocated claims that their nodes can not prepare."""
        return failed_starts(self.snapshot, self.driver)

    @cached_property
    def failed_releases(self) -> Mapping[Key, FailedRelease]:
        """The claims that their nodes can not release."""
        return failed_releases(self.snapshot, self.driver)

    def _plan(self) -> DisjointPlan | None:
        """What the leader plans for pending claims with disjoint offers: by the same planner."""
        modes = {plan.spec.offer_mode for plan in self.snapshot.plans.values()}
        if OfferMode.DISJOINT not in modes or not self.queue.pending:
            return None
        plans, devices = self.snapshot.plans, self.devices
        reserved = overdue_reservation(self.queue, self.clock)
        chosen = DisjointPlanner(Ranking()).curate(self.queue, devices.offered, {}, reserved)
        by_claim = chosen.by_claim or {}
        offers = devices.offerable(chain.from_iterable(by_claim.values()), plans)
        return DisjointPlan(by_claim, devices.obstacles(offers, devices.leaving(plans)).keys())


def unreported_nodes(snapshot: Snapshot, clock: Clock) -> UnreportedNodes:
    """The nodes without a report, by the age of their plans."""
    names = tuple(sorted(view.name for view in snapshot.views if not view.status.inventory))
    plans = (snapshot.plans[name].metadata.creation_timestamp for name in names if name in snapshot.plans)
    ages = (clock.seconds_since(created) for created in plans if created is not None)
    return UnreportedNodes(names, any(age < REPORT_TIMEOUT_SECONDS for age in ages))


class ClusterReads(Lookups):
    """Reads of single objects that no snapshot has. None: this account may not read them."""

    def __init__(self, client: KubeClient, settings: ControllerSettings | None) -> None:
        """``settings``: those of this controller, the leader or a standby; None: found by the heartbeat."""
        self._client, self._settings = client, settings
        self.clock: Clock = client.clock

    @cached_property
    def _heartbeat(self) -> LastHeartbeat | None:
        return last_heartbeat(self._client) if self._settings is None else None

    @cached_property
    def evicts_after(self) -> float | None:
        """Seconds until the pods of a claim that can not be prepared are evicted; 0: never; None: unknown."""
        if self._settings is not None:
            return self._settings.evict_failed_starts_s
        return self._heartbeat.evict_after if self._heartbeat is not None else None

    def fenced(self) -> frozenset[PoolDevice] | None:
        """The fenced devices; None: not known."""
        source = self._settings or self._heartbeat
        return None if source is None else read_fenced(self._client, source.namespace)

    def evictions(self) -> Sequence[Eviction]:
        """Those of the last day, the oldest first; none if this account may not read them."""
        with suppress(ApiError):
            return read_evictions(self._client, "" if self._settings is None else self._settings.namespace)
        return ()

    def controller_silent(self) -> float | None:
        """Seconds since the last heartbeat of a controller that is silent; None: it is not, or unknown.

        A standby takes over before that.
        """
        return None if self._heartbeat is None else self._heartbeat.silent_seconds

    def template_exists(self, template: Key) -> bool | None:
        path = f"{RESOURCE_GROUP}/namespaces/{template.namespace}/resourceclaimtemplates/{template.name}"
        try:
            return self._client.find(path) is not None
        except ApiError:
            return None

    def creation_failure(self, pod: Pod) -> str | None:
        """Why kube-controller-manager could not create a claim of ``pod`` last; None, too, if it could."""
        event = self._last_event(pod.metadata, "FailedResourceClaimCreation")
        return None if event is None else event.message

    def eviction_outcome(self, start: FailedStart) -> str | None:
        """What the controller reported last of evicting the pods of a claim; None: nothing since it fails."""
        namespace, name = claim_of(start.unprepared)
        event = self._last_event(Metadata(name=name, namespace=namespace, uid=start.unprepared.uid), FAILED_START)
        is_old = event is None or (event.last_timestamp or "") < start.unprepared.since
        return None if event is None or is_old else event.message

    def _last_event(self, about: Metadata, reason: str) -> WrittenEvent | None:
        selector = {"fieldSelector": f"involvedObject.uid={about.uid},reason={reason}"}
        path = f"/api/v1/namespaces/{about.namespace}/events"
        try:
            events = list(read_all(self._client, path, WrittenEvent, selector))
        except (ApiError, msgspec.MsgspecError):
            return None
        return max(events, key=lambda event: event.last_timestamp or "", default=None)

    def pods_of(self, claim: Key) -> Sequence[Pod] | None:
        try:
            consumers = read_claim(self._client, claim.namespace, claim.name, any_age=True).pod_consumers[:2]
            pods = [find_pod(self._client, Key(claim.namespace, consumer.name)) for consumer in consumers]
            return None if None in pods else [pod for pod in pods if pod is not None]
        except ApiError:
            return None

    def slices_of(self, driver: str) -> Sequence[DetailedSlice] | None:
        of_driver = {"fieldSelector": f"spec.driver={driver}"}
        try:
            return list(read_all(self._client, f"{RESOURCE_GROUP}/resourceslices", DetailedSlice, of_driver))
        except (ApiError, msgspec.MsgspecError):
            return None


class ViewMaker:
    """Makes views of a cache; what did not change between two views is neither compiled nor built again."""

    def __init__(
        self, client: KubeClient, driver: str, wake: Callable[[], None], settings: ControllerSettings | None = None
    ) -> None:
        """Reads the cluster; raises as ``read_cluster``. ``settings``: as for ClusterReads."""
        self._client, self._settings = client, settings
        self._builder, self._devices, self._matching = FleetBuilder(), UnheldDevices(), Matching(driver)
        self.cache = ClusterCache(client, driver, wake)
        try:
            self.cache.load()
        except ApiError as error:
            if error.status == FORBIDDEN:
                raise FatalError(f"this account may not read what is needed: {error}") from error
            if error.status == NOT_FOUND:
                missing = "Tessera's CustomResourceDefinition is not installed (docs/install.md)"
                raise FatalError(f"{missing}: {error}") from error
            raise
        except MALFORMED as error:
            raise FatalError(f"the API server's answer does not parse: {error}") from error

    def view(self) -> ClusterView:
        """The present content; the view before is not valid any more."""
        snapshot = self.cache.snapshot()
        fleet = self._builder.build(snapshot.views, snapshot.changed)
        self._devices.update(snapshot.views, snapshot.changed, fleet)
        queue = Queue(snapshot.cluster, fleet, self._matching)
        reads = ClusterReads(self._client, self._settings)
        return ClusterView(snapshot, fleet, self._devices, queue, self.cache.stale(), reads=reads)


def read_cluster(client: KubeClient, driver: str) -> ClusterView:
    """Read the cluster. Raises FatalError if this account may not read it, and ApiError if nobody answers."""
    return ViewMaker(client, driver, lambda: None).view()


def watch_cluster(
    client: KubeClient, driver: str, interval_seconds: float = 1.0, settings: ControllerSettings | None = None
) -> Generator[ClusterView]:
    """The cluster, and then after changes, at most once in ``interval_seconds``, until the iterator is closed.

    A view is valid until the next one. ``stale`` changes without a change of the cluster. Raises as ``read_cluster``
    before the first view. ``settings``: as for ClusterReads.
    """
    changed, stop = threading.Event(), threading.Event()
    maker = ViewMaker(client, driver, changed.set, settings)
    maker.cache.start(stop)
    try:
        while True:
            changed.clear()
            view = maker.view()
            maker.cache.acknowledge()
            yield view
            stop.wait(interval_seconds)
            changed.wait(STALE_CHECK_INTERVAL_SECONDS)
    finally:
        stop.set()
