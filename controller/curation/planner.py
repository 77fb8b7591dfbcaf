"""The planner of offers: what a decision asks for in either offer mode, and the planner for counters (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from controller.cluster.published_offers import DeviceIndex
from controller.curation.curator import Curator
from controller.curation.wider_offers import WiderOffers
from controller.demand.demand import demand_of
from controller.demand.pending_claims import Queue
from driver.model.offer import Offer
from driver.placement.ranking import Ranking


@dataclass(frozen=True)
class PlannedOffers:
    """``by_claim``: by key of the claim, the offers of ``offers`` that its pod is to be given.

    None with counters: the scheduler chooses among all offers.
    """

    offers: tuple[Offer, ...]
    by_claim: Mapping[str, tuple[Offer, ...]] | None = None


class OfferPlanner(Protocol):
    """Plans the offers of the cluster. What it remembers saves time or measures time; a new leader starts anew."""

    @property
    def next_s(self) -> float | None:
        """Seconds until the plan may change by time alone; None: it does not."""

    def plan(self, queue: Queue, devices: DeviceIndex) -> PlannedOffers:
        """What to offer, whether it is possible at once or not. ``devices`` are those that nodes publish."""


class CountersPlanner:
    """For schedulers that subtract counters: offers may overlap, and the scheduler chooses among them.

    ``offers``: the number of offers of each kind without pending claims.
    """

    def __init__(self, ranking: Ranking, offers: int) -> None:
        self._curator = Curator(ranking, offers)
        self._wider_offers = WiderOffers()

    @property
    def next_s(self) -> float | None:
        return self._wider_offers.next_s

    def plan(self, queue: Queue, devices: DeviceIndex) -> PlannedOffers:
        """Offers that serve the demand of pending claims, and some of each kind for future claims.

        Present offers of a kind that is in demand are kept: the scheduler may just have given one to a claim.
        """
        demands = demand_of(queue, self._wider_offers.widened(queue))
        requested = {demand.key for demand in demands}
        protected = [offer for offer in devices.offered if offer.spot.kind in requested]
        return PlannedOffers(self._curator.curate(queue.feasibility.fleet, demands, devices.offered, protected))
