"""The fifth stage of a decision: write plans and labels of Nodes that changed, and evict pods that can not start."""

from __future__ import annotations

import logging
import math
import time
from typing import NamedTuple

from controller.cluster.cache import ClusterCache
from controller.cluster.claim_index import PoolDevice
from controller.decision.choose import ChosenOffers
from controller.decision.held_publication import HeldPublication
from controller.decision.node_labels import LABEL_SETS, NodeLabels
from controller.decision.plan_specs import PlanSpecs
from controller.decision.plan_writer import PlanWriter
from controller.decision.read import DecisionInput
from controller.demand.demand import nodes_matching_held
from controller.demand.feasibility import Nodes
from controller.eviction.overlapping_allocations import OverlapEvictor
from controller.settings import ControllerSettings
from controller.steps import Observer
from driver.kube.client import KubeClient
from driver.kube.work_loop import soonest
from driver.model.offer import Offer
from driver.model.plan import OfferMode

log = logging.getLogger(__name__)


class Asked(NamedTuple):
    """What a decision asks of the nodes; equal ones need no other plans while the nodes stay as they are."""

    mode: OfferMode
    possible: frozenset[Offer]
    listed: frozenset[Offer]
    withdrawn: frozenset[PoolDevice]
    matching_held: Nodes


class WriteStage:
    """Brings the specs of the plans up to date, and writes those that differ from the stored ones."""

    def __init__(
        self,
        client: KubeClient,
        settings: ControllerSettings,
        cache: ClusterCache,
        evictor: OverlapEvictor,
        observer: Observer,
    ) -> None:
        self._settings = settings
        self._evictor = evictor
        self._held_publication = HeldPublication()
        self._specs = PlanSpecs()
        self._writer = PlanWriter(client, cache.observe_plan, observer=observer)
        self.labels = NodeLabels(client, LABEL_SETS[settings.node_labels])
        self._asked: Asked | None = None
        """What was written last; None: the last attempt failed."""
        self._due_at = -math.inf

    @property
    def next_s(self) -> float | None:
        return max(0.0, self._due_at - time.monotonic()) if self._due_at < math.inf else None

    def write(self, seen: DecisionInput, offers: ChosenOffers) -> None:
        """Write plans and labels, and evict pods; what can not be done now is done later."""
        matching_held = nodes_matching_held(seen.queue)
        asked = Asked(seen.mode, offers.possible, offers.listed, offers.withdrawn, matching_held)
        if seen.is_same_cluster and asked == self._asked and time.monotonic() < self._due_at:
            return
        self._asked = None
        self._write_plans(seen, offers, matching_held)
        changed = seen.snapshot.changed
        self.labels.update(changed, seen.fleet)
        self._evictor.update(seen.snapshot.cluster.claims, seen.fleet, changed.names)
        self._asked = asked
        seconds = soonest(self._held_publication.next_s, self._writer.next_s, self._evictor.next_s)
        self._due_at = math.inf if seconds is None else time.monotonic() + seconds

    def _write_plans(self, seen: DecisionInput, offers: ChosenOffers, matching_held: Nodes) -> None:
        plans, views, changed = seen.snapshot.plans, seen.snapshot.views, seen.snapshot.changed
        most_gpus = self._settings.publish_held_limit(seen.minor_version)
        publish_held = self._held_publication.decide(
            len(seen.fleet.gpus), most_gpus, plans, seen.nodes.names, matching_held
        )
        specs = self._specs.update(
            views, changed, seen.fleet, offers.possible, offers.withdrawn, publish_held, seen.mode, offers.listed
        )
        written = self._writer.write(specs, plans, self._specs.owners, self._specs.changed | changed.names)
        self._specs.changed.clear()
        if written:
            elapsed = (time.perf_counter() - seen.began) * 1000
            offered = len(offers.planned.offers)
            log.info("wrote plans", extra={"plans": written, "offers": offered, "ms": f"{elapsed:.0f}"})
