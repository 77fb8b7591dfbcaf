"""The cluster as the controller sees it, read once from the API server: for commands that work without a controller."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

from controller.cluster.cache import ClusterCache, Snapshot
from controller.cluster.fleet import Fleet
from controller.cluster.fleet_builder import FleetBuilder
from controller.cluster.node_views import refusing_nodes, silent_nodes
from controller.cluster.published_offers import DeviceIndex
from controller.demand.pending_claims import Queue
from controller.demand.selected_devices import Matching
from controller.explain.gangs import reasons_of_incomplete
from controller.explain.pending_despite_offers import UnscheduledClaims
from controller.explain.reason import ClaimReason
from controller.explain.reasons import Reasoning, find_reasons
from controller.explain.scheduler_reports import with_scheduler
from controller.explain.unplaced_pods import UnplacedPods
from driver.errors import FORBIDDEN, NOT_FOUND, ApiError, FatalError
from driver.kube.client import KubeClient
from driver.kube.clock import Clock
from driver.kube.reads import DevicesByNode, creation_failure, devices_of, template_exists
from driver.kube.types import Key, Pod
from driver.kube.watch_cache import MALFORMED

OVERDUE_SECONDS = 60.0
"""Age of a pending pod from which on the scheduler's feature gates are doubted."""
STALE_CHECK_INTERVAL_SECONDS = 10.0


@dataclass(frozen=True)
class ClusterView:
    """``fleet``: the GPUs and what is held on them; ``devices``: the published devices that no claim holds.

    ``stale``: why all of it may be out of date, None if it is current. ``template_exists``: whether a
    ResourceClaimTemplate does, None if that is unknown. ``devices_of``: the published devices of another driver.
    ``creation_failure``: why a claim of a pod can not be created.
    """

    driver: str
    snapshot: Snapshot
    fleet: Fleet
    devices: DeviceIndex
    stale: str | None = None
    template_exists: Callable[[Key], bool | None] = lambda _: None
    devices_of: Callable[[str], DevicesByNode | None] = lambda _: None
    creation_failure: Callable[[Pod], str | None] = lambda _: None

    @classmethod
    def of(
        cls, client: KubeClient, cache: ClusterCache, driver: str, builder: FleetBuilder, devices: DeviceIndex
    ) -> ClusterView:
        """The content of ``cache``, of which ``builder`` and ``devices`` know everything but the changes."""
        snapshot = cache.snapshot()
        fleet = builder.build(snapshot.views, snapshot.changed)
        devices.update(snapshot.views, snapshot.changed, fleet)
        return cls(
            driver,
            snapshot,
            fleet,
            devices,
            cache.stale(),
            partial(template_exists, client),
            partial(devices_of, client),
            partial(creation_failure, client),
        )

    @cached_property
    def queue(self) -> Queue:
        """The pending claims and what they require."""
        return Queue(self.snapshot.cluster, self.fleet, Matching(self.driver))

    @cached_property
    def reasoning(self) -> Reasoning:
        """Finds why no device satisfies a claim."""
        return Reasoning(self.queue)

    @cached_property
    def reasons(self) -> Mapping[str, ClaimReason]:
        """Why claims are pending, by key of the claim; without those that only wait for the scheduler's next turn."""
        offered = {offer: self.devices.free[offer] for offer in self.devices.offered}
        silent = silent_nodes(self.snapshot.views, self.snapshot.incomplete)
        refusing = refusing_nodes(self.snapshot.views)
        unscheduled = UnscheduledClaims(OVERDUE_SECONDS, Clock(), self.devices_of, watching=False)
        everything = (
            *unscheduled.reasons(self.queue, offered, silent, refusing, self.devices.unpublished(self.snapshot.plans)),
            *reasons_of_incomplete(self.queue, Clock()),
            *find_reasons(self.reasoning),
            *UnplacedPods(Clock(), self.template_exists, self.creation_failure, watching=False).reasons(self.queue),
        )
        return {each.pending.key: each for each in with_scheduler(everything, self.queue, Clock())}


def read_cluster(client: KubeClient, driver: str) -> ClusterView:
    """Read the cluster. Raises FatalError if this account may not read it, and ApiError if nobody answers."""
    cache = ClusterCache(client, driver, lambda: None)
    _load(cache)
    return ClusterView.of(client, cache, driver, FleetBuilder(), DeviceIndex())


def watch_cluster(client: KubeClient, driver: str, interval_seconds: float = 1.0) -> Generator[ClusterView]:
    """The cluster, and then after changes, at most once in ``interval_seconds``, until the iterator is closed.

    A view is valid until the next one. ``stale`` changes without a change of the cluster. Raises as ``read_cluster``
    before the first view.
    """
    changed, stop = threading.Event(), threading.Event()
    cache = ClusterCache(client, driver, changed.set)
    _load(cache)
    cache.start(stop)
    builder, devices = FleetBuilder(), DeviceIndex()
    try:
        while True:
            changed.clear()
            view = ClusterView.of(client, cache, driver, builder, devices)
            cache.acknowledge()
            yield view
            stop.wait(interval_seconds)
            changed.wait(STALE_CHECK_INTERVAL_SECONDS)
    finally:
        stop.set()


def _load(cache: ClusterCache) -> None:
    try:
        cache.load()
    except ApiError as error:
        if error.status == FORBIDDEN:
            raise FatalError(f"this account may not read what is needed: {error}") from error
        if error.status == NOT_FOUND:
            raise FatalError(
                f"Tessera's CustomResourceDefinition is not installed (docs/install.md): {error}"
            ) from error
        raise
    except MALFORMED as error:
        raise FatalError(f"the API server's answer does not parse: {error}") from error
