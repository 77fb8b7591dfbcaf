"""The second stage of a decision: choose what is to be offered, and what is published in any case."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from controller.cluster.claim_index import PoolDevice
from controller.curation.counters_planner import CountersPlanner
from controller.curation.disjoint_planner import DisjointPlanner
from controller.curation.planner import OfferPlanner, PlannedOffers
from controller.decision.read import DecisionInput
from controller.demand.queued_workloads import countable
from controller.demand.reservation import NominatedPods
from controller.settings import ControllerSettings
from driver.model.offer import Offer
from driver.placement.measure import Measure
from driver.placement.ranking import Ranking


class WaitsFor(Enum):
    """What an offer waits for before it may be written into a plan."""

    OVERLAPPING_DEVICES = "published devices that overlap it leave the slices first"
    FENCE = "its device is fenced, and that could not be lifted"
    CLAIMS = "the cache of claims has not processed every change of what is held on its GPU"


@dataclass(frozen=True)
class ChosenOffers:
    """What is to be offered, from the choice to the plans.

    ``wanted``: every offer that is to be made; ``waiting``: those of them that can not be made now, with the cause.
    ``listed``: what is published whether it is offered or not. ``withdrawn``: the devices that leave the slices now.
    ``planner`` made the choice, ``planned`` is what it answered.
    """

    planner: OfferPlanner
    planned: PlannedOffers
    wanted: frozenset[Offer]
    listed: frozenset[Offer]
    withdrawn: frozenset[PoolDevice] = frozenset()
    waiting: Mapping[Offer, WaitsFor] = field(default_factory=dict)

    @property
    def possible(self) -> frozenset[Offer]:
        """What may be written now."""
        return self.wanted - self.waiting.keys()

    def waiting_for(self, cause: WaitsFor) -> set[Offer]:
        """The offers that wait for ``cause``."""
        return {offer for offer, waits_for in self.waiting.items() if waits_for is cause}

    def let_wait(self, offers: Iterable[Offer], cause: WaitsFor) -> ChosenOffers:
        """The same, with ``offers`` waiting, too."""
        return replace(self, waiting={**self.waiting, **dict.fromkeys(offers, cause)})


class ChooseStage:
    """Asks the planner of the cluster's offer mode."""

    def __init__(self, settings: ControllerSettings) -> None:
        ranking = Ranking(Measure(settings.weights))
        counters = CountersPlanner(ranking, settings.offers, settings.min_published)
        disjoint = DisjointPlanner(ranking, settings.offers)
        self._planners: Mapping[object, OfferPlanner] = {planner.mode: planner for planner in (counters, disjoint)}
        self._planner: OfferPlanner = counters
        self._nominated = NominatedPods()

    @property
    def next_s(self) -> float | None:
        return self._planner.next_s

    def choose(self, seen: DecisionInput) -> ChosenOffers:
        """What to offer, whether it is possible at once or not."""
        planner = self._planner = self._planners[seen.mode]
        plans, devices = seen.snapshot.plans, seen.devices
        planned = planner.plan(seen.queue, devices)
        nominated = self._nominated.update(seen.queue, devices.offered)
        following = {view.name for view in seen.snapshot.views if view.follows_plan and not view.closed}
        needed = () if seen.queued is None else countable(seen.queued)
        return ChosenOffers(
            planner,
            planned,
            wanted=frozenset(devices.offerable({*planned.offers, *nominated}, plans)),
            listed=frozenset(devices.offerable(planner.listed(seen.fleet, following, needed), plans)),
        )
