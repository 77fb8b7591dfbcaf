"""The fifth stage of a decision: write the plans that changed, and the labels of Nodes."""

from __future__ import annotations

import logging
import time

from controller.cluster.cache import ClusterCache
from controller.decision.choose import ChosenOffers
from controller.decision.held_publication import HeldPublication
from controller.decision.node_labels import LABEL_SETS, NodeLabels
from controller.decision.plan_specs import PlanSpecs
from controller.decision.plan_writer import PlanWriter
from controller.decision.read import DecisionInput
from controller.demand.demand import nodes_matching_held
from controller.settings import ControllerSettings
from controller.steps import Observer
from driver.kube.client import KubeClient
from driver.kube.work_loop import soonest

log = logging.getLogger(__name__)


class WriteStage:
    """Brings the specs of the plans up to date, and writes those that differ from the stored ones."""

    def __init__(
        self, client: KubeClient, settings: ControllerSettings, cache: ClusterCache, observer: Observer
    ) -> None:
        self._settings = settings
        self._held_publication = HeldPublication()
        self._specs = PlanSpecs()
        self._writer = PlanWriter(client, cache.observe_plan, observer=observer)
        self.labels = NodeLabels(client, LABEL_SETS[settings.node_labels])

    @property
    def next_s(self) -> float | None:
        return soonest(self._held_publication.next_s, self._writer.next_s)

    def write(self, seen: DecisionInput, offers: ChosenOffers) -> None:
        """Write plans and labels; what can not be written now is written later."""
        plans, views, changed = seen.snapshot.plans, seen.snapshot.views, seen.snapshot.changed
        publish_held = self._held_publication.decide(
            len(seen.fleet.gpus),
            self._settings.publish_held_limit(seen.minor_version),
            plans,
            [view.name for view in views],
            nodes_matching_held(seen.queue),
        )
        specs = self._specs.update(
            views, changed, seen.fleet, offers.possible, offers.withdrawn, publish_held, seen.mode, offers.listed
        )
        written = self._writer.write(specs, plans, self._specs.owners, self._specs.changed | changed.names)
        self._specs.changed.clear()
        if written:
            elapsed = (time.perf_counter() - seen.began) * 1000
            counts = {"plans": written, "offers": len(offers.planned.offers)}
            log.info("wrote plans", extra={**counts, "ms": f"{elapsed:.0f}"})
        self.labels.update(changed, seen.fleet)
