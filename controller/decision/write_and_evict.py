"""The fifth stage of a decision: write plans and labels of Nodes that changed, and evict pods that can not start."""

from __future__ import annotations

import logging
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from controller.cluster.cache import ClusterCache
from controller.cluster.claim_index import PoolDevice
from controller.cluster.fleet import Fleet
from controller.cluster.node_views import NodeChanges, NodeView
from controller.decision.choose import ChosenOffers
from controller.decision.hardware_labels import LABEL_SETS, NodeLabels
from controller.decision.plan_writer import PlanWriter
from controller.decision.read import DecisionInput
from controller.demand.demand import nodes_with_requests_for_all
from controller.demand.feasibility import Nodes
from controller.eviction.failed_starts import FailedStarts
from controller.eviction.overlapping_allocations import OverlapEvictor
from controller.settings import ControllerSettings
from controller.step_names import Observer
from driver.clock import soonest
from driver.kube.client import KubeClient
from driver.kube.types import GpuNodePlan
from driver.model.offer import Offer, OfferKind
from driver.model.plan import MODE_SPREAD_SECONDS, OfferMode, PlanSpec, PublishHeld

log = logging.getLogger(__name__)

PUBLISH_HELD_GPUS, PUBLISH_HELD_GPUS_BEFORE_1_37 = 500, 80
"""The number of GPUs at which held devices make the scheduler take about 10 ms for a pod (docs/scale.md)."""

RETURN_SHARE = 0.8
"""A cluster near the limit of GPUs must not change to and fro as nodes come and go."""


MAX_NAMED_CLAIMS = 32
"""Claims of one shared device that a plan names: what matters is that the device is held."""

NO_NODES: Nodes = frozenset()


class Asked(NamedTuple):
    """What a decision asks of the nodes; equal ones need no other plans while the nodes stay as they are."""

    mode: OfferMode
    possible: frozenset[Offer]
    listed: frozenset[Offer]
    withdrawn: frozenset[PoolDevice]
    with_requests_for_all: Nodes = NO_NODES
    monitored: Nodes = NO_NODES


class WriteStage:
    """Brings the specs of the plans up to date, and writes those that differ from the stored ones."""

    def __init__(
        self,
        client: KubeClient,
        settings: ControllerSettings,
        cache: ClusterCache,
        overlaps: OverlapEvictor,
        failed_starts: FailedStarts,
        observer: Observer,
    ) -> None:
        self._settings, self._cache = settings, cache
        self._overlaps, self._failed_starts = overlaps, failed_starts
        self._held_publication = HeldPublication()
        self._specs = PlanSpecs()
        self._writer = PlanWriter(client, cache.observe_plan, observer=observer)
        self.labels = NodeLabels(client, LABEL_SETS[settings.node_labels])
        self._labelled: object = None
        """The hardware for which labels were compared last."""
        self._asked: Asked | None = None
        """What was written last; None: the last attempt failed."""
        self._requested: frozenset[OfferKind] = frozenset()
        """The kinds that pending claims asked for then."""
        self._due_at = -math.inf
        """When something is due that waits, such as a change that no pending claim asked for; infinite: nothing."""

    @property
    def next_s(self) -> float | None:
        return max(0.0, self._due_at - time.monotonic()) if self._due_at < math.inf else None

    def write(self, seen: DecisionInput, offers: ChosenOffers) -> None:
        """Write plans and labels, and evict pods; what can not be done now is done later."""
        with_requests_for_all = nodes_with_requests_for_all(seen.queue)
        monitored = seen.queue.monitored_nodes if seen.queue.monitoring else NO_NODES
        asked = Asked(seen.mode, offers.possible, offers.listed, offers.withdrawn, with_requests_for_all, monitored)
        requested = offers.planned.requested
        is_urgent = self._due_at < math.inf and not requested <= self._requested
        is_same = seen.is_same_cluster and asked == self._asked and not is_urgent
        if is_same and time.monotonic() < self._due_at:
            return
        self._asked = None
        plans, views, changed = seen.snapshot.plans, seen.snapshot.views, seen.snapshot.changed
        most_gpus = publish_held_limit(self._settings, seen.minor_version)
        publish_held = self._held_publication.decide(
            len(seen.fleet.gpus), most_gpus, plans, seen.nodes.names, with_requests_for_all
        )
        specs = self._specs.update(views, changed, seen.fleet, asked, publish_held)
        for_claims = {str(offer) for offer in offers.possible if offer.spot.kind in requested} if requested else None
        written = self._writer.write(specs, plans, self._specs.owners, for_claims, self._specs.changed | changed.names)
        self._specs.changed.clear()
        if written:
            elapsed, offered = (time.perf_counter() - seen.began) * 1000, len(offers.planned.offers)
            log.info("wrote plans", extra={"plans": written, "offers": offered, "ms": f"{elapsed:.0f}"})
        if changed.nodes or seen.fleet.hardware is not self._labelled:
            self.labels.update(seen.snapshot.cluster.nodes, changed.names, seen.fleet)
            self._labelled = seen.fleet.hardware
        self._overlaps.update(seen.snapshot.cluster.claims, seen.fleet, changed.names)
        has_failed = self._failed_starts.next_s is not None or seen.nodes.unprepared
        if has_failed and self._cache.stale() is None:
            self._failed_starts.update(plans, seen.snapshot.cluster.claims)
        self._asked, self._requested = asked, requested
        evictors = (self._overlaps.next_s, self._failed_starts.next_s)
        seconds = soonest(self._held_publication.next_s, self._writer.next_s, *evictors)
        self._due_at = math.inf if seconds is None else time.monotonic() + seconds


def publish_held_limit(settings: ControllerSettings, minor_version: int | None) -> int | None:
    """The most GPUs of a cluster whose nodes publish all held devices; None: any number."""
    if settings.publish_held == "always":
        return None
    if settings.publish_held_gpus is not None:
        return settings.publish_held_gpus
    is_old = minor_version is not None and minor_version < 37
    return PUBLISH_HELD_GPUS_BEFORE_1_37 if is_old else PUBLISH_HELD_GPUS


class HeldPublication:
    """Which nodes publish their held devices while they offer nothing.

    A node changes at a random moment of ``MODE_SPREAD_SECONDS``: each slice update wakes every pending pod.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, spread: Callable[[], float] = random.random
    ) -> None:
        self._clock = clock
        self._spread = spread
        self._modes: dict[str, PublishHeld] = {}
        self._due: dict[str, float] = {}
        """When nodes change to the other mode."""

    def decide(
        self,
        gpus: int,
        most_gpus: int | None,
        plans: Mapping[str, GpuNodePlan],
        nodes: Collection[str],
        requested: Collection[str],
    ) -> Mapping[str, PublishHeld]:
        """The mode of each of ``nodes``; ``requested`` are those whose held devices a pending claim matches.

        ``most_gpus``: as ``publish_held_limit``; in larger clusters no node publishes them. A new leader starts from
        the modes in ``plans``. The cluster returns to ALWAYS only when clearly fewer GPUs are left.
        """
        now = self._clock()
        has_beside = any(plan.spec.publish_held is PublishHeld.BESIDE_OFFERS for plan in plans.values())
        limit = RETURN_SHARE if has_beside else 1
        is_small = most_gpus is None or gpus <= most_gpus * limit
        of_cluster = PublishHeld.ALWAYS if is_small else PublishHeld.BESIDE_OFFERS
        modes = self._modes
        if modes.keys() != {*nodes}:
            stored = {name: plan.spec.publish_held for name, plan in plans.items()}
            modes = {name: modes.get(name) or stored.get(name, of_cluster) for name in nodes}
        self._modes = modes | {name: PublishHeld.ALWAYS for name in requested if name in modes}
        differing = {name for name, mode in self._modes.items() if mode is not of_cluster} - {*requested}
        self._due = {name: self._due.get(name) or now + MODE_SPREAD_SECONDS * self._spread() for name in differing}
        for name in [name for name, due in self._due.items() if due <= now]:
            self._modes[name] = of_cluster
            del self._due[name]
        return self._modes

    @property
    def next_s(self) -> float | None:
        """Seconds until the next node changes; None: none is due."""
        return max(0.0, min(self._due.values()) - self._clock()) if self._due else None


def _held_on(view: NodeView) -> tuple[str, ...]:
    """What a plan says of held devices, some of which several claims share."""
    exclusive = (str(held) for device, held in view.held.items() if device not in view.shared)
    parts = (sorted(map(str, claims))[:MAX_NAMED_CLAIMS] for claims in view.shared.values())
    return tuple(sorted([*exclusive, *chain.from_iterable(parts)]))


class PlanSpecs:
    """The spec of each node's plan, brought up to date at every decision for the nodes that it concerns (pure).

    ``owners`` are the uids of the Nodes. ``changed`` are nodes whose spec is another than when ``changed`` was cleared.
    """

    def __init__(self) -> None:
        self.specs: dict[str, PlanSpec] = {}
        self.owners: dict[str, str] = {}
        self.changed: set[str] = set()
        self._views: dict[str, NodeView] = {}
        self._node_of_pool: dict[str, str] = {}
        self._dedicated: set[str] = set()
        """Nodes with a use for single GPUs: their specs depend on the fleet, too."""
        self._special: set[str] = set()
        """Nodes that had offers, withdrawn devices or pending monitors last time."""
        self._publish_held: Mapping[str, PublishHeld] = {}
        self._offer_mode = OfferMode.COUNTERS

    def update(
        self,
        views: Sequence[NodeView],
        changes: NodeChanges,
        fleet: Fleet,
        asked: Asked,
        publish_held: Mapping[str, PublishHeld],
    ) -> Mapping[str, PlanSpec]:
        """The specs by node, given what the decision asks for and what each node does with held devices."""
        offers_of, listed_of = fleet.by_node(asked.possible), fleet.by_node(asked.listed)
        withdrawn_of: dict[str, list[str]] = defaultdict(list)
        for device in asked.withdrawn:
            withdrawn_of[device.pool].append(device.device)
        renewed = self._take_over(views, changes)
        nodes_of_withdrawn = {self._node_of_pool[pool] for pool in withdrawn_of if pool in self._node_of_pool}
        monitored = asked.monitored & self._views.keys()
        special = offers_of.keys() | listed_of.keys() | self._dedicated | nodes_of_withdrawn | monitored
        turned = set[str]()
        if publish_held != self._publish_held:
            turned = {name for name, held in publish_held.items() if self._publish_held.get(name) is not held}
        if asked.mode is not self._offer_mode:
            turned = {*self._views}
        self._publish_held, self._offer_mode = publish_held, asked.mode
        for name in renewed | ((self._special | turned) & self._views.keys()) | special:
            view = self._views[name]
            uses = view.dedication.gpus
            spec = PlanSpec(
                epoch=view.status.epoch,
                held=_held_on(view) if view.shared else tuple(sorted(map(str, view.held.values()))),
                offers=tuple(sorted(map(str, offers_of.get(name, ())))),
                listed=tuple(sorted(map(str, listed_of.get(name, ())))),
                withdrawn=tuple(sorted(withdrawn_of.get(view.pool, ()))),
                publish_held=publish_held[name],
                offer_mode=asked.mode,
                monitors=view.is_monitored or name in monitored,
                dedicated_to=view.dedication.node,
                dedicated_gpus=tuple(
                    f"{gpu.gpu.uuid}={uses[gpu.number]}" for gpu in fleet.nodes.get(name, ()) if gpu.number in uses
                ),
            )
            if spec != self.specs.get(name):  # an equal one stays the same object
                self.specs[name] = spec
                self.changed.add(name)
        self._special = special
        return self.specs

    def _take_over(self, views: Sequence[NodeView], changes: NodeChanges) -> set[str]:
        """Returns the nodes whose views are new."""
        renewed = changes.views
        if changes.membership:
            self.specs, self.owners, self._views, self._node_of_pool, self._dedicated = {}, {}, {}, {}, set()
            renewed = views
        for view in renewed:
            self._views[view.name], self._node_of_pool[view.pool], self.owners[view.name] = view, view.name, view.uid
            (self._dedicated.add if view.dedication.gpus else self._dedicated.discard)(view.name)
        return {view.name for view in renewed}
