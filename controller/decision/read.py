"""The first stage of a decision: read the caches, and derive from them what changed since the last decision."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from controller.cluster.cache import ClusterCache, Snapshot
from controller.cluster.fleet import Fleet
from controller.cluster.fleet_builder import FleetBuilder
from controller.cluster.kueue_workloads import KueueQueue
from controller.cluster.node_views import (
    ALL_REPORTED,
    UnreportedNodes,
    UnreportedNodesTracker,
    refusing_nodes,
    silent_nodes,
)
from controller.cluster.unheld_devices import UnheldDevices
from controller.curation.offer_mode import ClusterMode
from controller.demand.feasibility import Matching
from controller.demand.node_eligibility import Eligibility
from controller.demand.pending_claims import Queue
from controller.demand.queued_workload_claims import WorkloadQueue
from controller.settings import ControllerSettings
from driver.kube.client import KubeClient
from driver.kube.types import ExactDeviceRequest
from driver.model.plan import OfferMode

MAX_PREPARED_CLASSES = 64
"""DeviceClasses whose selectors are compiled before a claim uses them."""


@dataclass(frozen=True)
class NodeStates:
    """Nodes by what they do with their plans.

    ``names``: all nodes. ``following``: those that follow their plans and accept offers. ``silent``: those that publish
    nothing that the scheduler takes, ``refusing``: those that do not publish all that their plans offer; and why.
    ``unprepared``: those that could not prepare a claim. ``leaving_out_held``: whether the plan of one leaves held
    devices unpublished while it offers nothing. ``incomplete``: that of the snapshot.
    """

    names: tuple[str, ...] = ()
    following: frozenset[str] = frozenset()
    silent: Mapping[str, str] = field(default_factory=dict)
    refusing: Mapping[str, str] = field(default_factory=dict)
    unprepared: frozenset[str] = frozenset()
    leaving_out_held: bool = False
    incomplete: Mapping[str, str] = field(default_factory=dict)

    def renewed(self, snapshot: Snapshot) -> NodeStates:
        """The states in ``snapshot``; only the nodes that changed are looked at, if that suffices."""
        before, views, names = self, snapshot.changed.views, self.names
        if snapshot.changed.membership or snapshot.incomplete != self.incomplete or not names:
            before, views, names = NodeStates(), snapshot.views, tuple(view.name for view in snapshot.views)
        new = {view.name for view in views}
        following = {view.name for view in views if view.follows_plan and not view.why_no_offers}
        silent = {name: why for name, why in before.silent.items() if name not in new}
        refusing = {name: why for name, why in before.refusing.items() if name not in new}
        return NodeStates(
            names=names,
            following=before.following - new | following,
            silent=silent | silent_nodes(views, snapshot.incomplete),
            refusing=refusing | refusing_nodes(views),
            unprepared=before.unprepared - new | {view.name for view in views if view.status.unprepared},
            leaving_out_held=any(plan.spec.leaves_out_held for plan in snapshot.plans.values()),
            incomplete=snapshot.incomplete,
        )


@dataclass(frozen=True)
class DecisionInput:
    """What a decision is made from.

    ``devices``: what nodes publish. ``queue``: the pending claims. ``queued``: what the Workloads in Kueue's
    queue will claim, None if there are none. ``minor_version``: that of the API server, if known.
    ``unreported``: the nodes that have not reported their GPUs. ``is_same_cluster``: neither a node nor what is
    allocated on it changed since the last decision; claims may have. ``began``: when that began (``perf_counter``).
    """

    snapshot: Snapshot
    fleet: Fleet
    devices: UnheldDevices
    nodes: NodeStates
    queue: Queue
    queued: WorkloadQueue | None
    mode: OfferMode
    minor_version: int | None
    unreported: UnreportedNodes
    is_same_cluster: bool
    began: float


class ReadStage:
    """Keeps what does not change from one decision to the next."""

    def __init__(
        self, client: KubeClient, settings: ControllerSettings, cache: ClusterCache, wake: Callable[[], None]
    ) -> None:
        """``wake`` is called after a change that the next decision may depend on."""
        self._cache = cache
        self._kueue = KueueQueue(client, cache.templates, wake) if settings.kueue else None
        self._fleet, self._fleet_builder = Fleet(), FleetBuilder()
        self._devices = UnheldDevices()
        self._matching = Matching(settings.driver_name)
        self._eligibility = self._eligibility_of_queued = Eligibility(())
        self._unreported = UnreportedNodesTracker()
        self._unreported_nodes: UnreportedNodes | None = None
        self._nodes: NodeStates | None = None
        self._prepared: tuple[object, ...] = ()
        """The classes and the hardware for which selectors are compiled."""
        self._mode = ClusterMode(client, settings.offer_mode)

    def start(self, stop: threading.Event) -> None:
        self._cache.start(stop)
        if self._kueue is not None:
            threading.Thread(target=self._kueue.run, args=(stop,), daemon=True, name="kueue").start()

    def read(self) -> DecisionInput:
        """The present state of the cluster. Raises ApiError if its offer mode can not be decided."""
        began = time.perf_counter()
        snapshot = self._cache.snapshot()
        is_same_cluster = not snapshot.changed.names and not snapshot.changed.membership
        if self._nodes is None or not is_same_cluster:
            self._nodes = self._renewed(snapshot)
            self._mode.update(snapshot.views)
        elif time.monotonic() >= self._mode.due_at:
            self._mode.update(snapshot.views)
        if self._unreported_nodes is None or snapshot.changed.names or self._unreported_nodes != ALL_REPORTED:
            self._unreported_nodes = self._unreported.update(snapshot.views)
        queued, cluster = None, snapshot.cluster
        if self._kueue is not None and (workloads := self._kueue.snapshot()):  # an empty queue would cost time
            queued = WorkloadQueue(workloads, cluster, self._fleet, self._matching, self._eligibility_of_queued)
        return DecisionInput(
            snapshot=snapshot,
            fleet=self._fleet,
            devices=self._devices,
            nodes=self._nodes,
            queue=Queue(cluster, self._fleet, self._matching, self._eligibility),
            queued=queued,
            mode=self._mode.mode,
            minor_version=self._mode.minor_version,
            unreported=self._unreported_nodes,
            is_same_cluster=is_same_cluster,
            began=began,
        )

    def _renewed(self, snapshot: Snapshot) -> NodeStates:
        """Bring what depends on nodes up to date."""
        views, changed = snapshot.views, snapshot.changed
        self._fleet = self._fleet_builder.build(views, changed)
        self._devices.update(views, changed, self._fleet)
        if changed.nodes:
            self._eligibility, self._eligibility_of_queued = (Eligibility(snapshot.cluster.nodes) for _ in range(2))
        return (self._nodes or NodeStates()).renewed(snapshot)

    def prepare(self, seen: DecisionInput) -> None:
        """Compile and evaluate the selectors of new DeviceClasses, so that the first claim of a class need not wait."""
        classes = seen.snapshot.cluster.classes[:MAX_PREPARED_CLASSES]
        if self._prepared == (classes, seen.fleet.hardware):
            return
        self._prepared = (classes, seen.fleet.hardware)
        for device_class in classes:
            selector = seen.queue.reader.selector_of(ExactDeviceRequest(device_class.metadata.name), "")
            if selector is not None:
                deque(selector.among(seen.fleet), maxlen=0)
