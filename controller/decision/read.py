"""The first stage of a decision: read the caches, and derive from them what changed since the last decision."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from controller.cluster.cache import ClusterCache, Snapshot
from controller.cluster.fleet import Fleet
from controller.cluster.fleet_builder import FleetBuilder
from controller.cluster.kueue import KueueQueue, QueuedWorkload
from controller.cluster.node_views import UnreportedNodes, UnreportedNodesTracker
from controller.cluster.published_offers import DeviceIndex
from controller.curation.offer_mode import ClusterMode
from controller.demand.eligibility import Eligibility
from controller.demand.pending_claims import Queue
from controller.demand.queued_workloads import cluster_of
from controller.demand.selected_devices import Matching
from controller.settings import ControllerSettings
from driver.kube.client import KubeClient
from driver.model.plan import OfferMode


@dataclass(frozen=True)
class DecisionInput:
    """What a decision is made from.

    ``devices``: what nodes publish. ``queue``: the pending claims. ``workloads``: what waits in Kueue's queue;
    ``queued``: what these will claim, None if there are none. ``minor_version``: that of the API server, if known.
    ``unreported``: the nodes that have not reported their GPUs. ``began``: when the decision began (``perf_counter``).
    """

    snapshot: Snapshot
    fleet: Fleet
    devices: DeviceIndex
    queue: Queue
    workloads: Sequence[QueuedWorkload]
    queued: Queue | None
    mode: OfferMode
    minor_version: int | None
    unreported: UnreportedNodes
    began: float


class ReadStage:
    """Keeps what does not change from one decision to the next."""

    next_s = None

    def __init__(
        self, client: KubeClient, settings: ControllerSettings, cache: ClusterCache, wake: Callable[[], None]
    ) -> None:
        """``wake`` is called after a change that the next decision may depend on."""
        self._cache = cache
        self._kueue = KueueQueue(client, wake) if settings.kueue else None
        self._fleet_builder = FleetBuilder()
        self._devices = DeviceIndex()
        self._matching = Matching(settings.driver_name)
        self._eligibility = self._eligibility_of_queued = Eligibility(())
        self._unreported = UnreportedNodesTracker()
        self._mode = ClusterMode(client, settings.offer_mode)

    def start(self, stop: threading.Event) -> None:
        """Watch in threads until ``stop`` is set."""
        self._cache.start(stop)
        if self._kueue is not None:
            threading.Thread(target=self._kueue.run, args=(stop,), daemon=True, name="kueue").start()

    def read(self) -> DecisionInput:
        """The present state of the cluster. Raises ApiError if its offer mode can not be decided."""
        began = time.perf_counter()
        snapshot = self._cache.snapshot()
        changed = snapshot.changed
        fleet = self._fleet_builder.build(snapshot.views, changed)
        self._devices.update(snapshot.views, changed, fleet)
        if changed.nodes:
            self._eligibility, self._eligibility_of_queued = (Eligibility(snapshot.cluster.nodes) for _ in range(2))
        workloads = [] if self._kueue is None else self._kueue.snapshot()
        return DecisionInput(
            snapshot=snapshot,
            fleet=fleet,
            devices=self._devices,
            queue=Queue(snapshot.cluster, fleet, self._matching, self._eligibility),
            workloads=workloads,
            queued=self._queue_of(workloads, fleet, snapshot),
            mode=self._mode.update(snapshot.views),
            minor_version=self._mode.minor_version,
            unreported=self._unreported.update(snapshot.views),
            began=began,
        )

    def _queue_of(self, workloads: Sequence[QueuedWorkload], fleet: Fleet, snapshot: Snapshot) -> Queue | None:
        """What ``workloads`` will claim; None without any, as every decision would pay for an empty queue."""
        if not workloads:
            return None
        return Queue(cluster_of(snapshot.cluster, workloads), fleet, self._matching, self._eligibility_of_queued)
