"""The planner of offers: what a decision asks for in either offer mode, and the answer (pure)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from controller.cluster.claim_index import PoolDevice
from controller.cluster.fleet import Fleet
from controller.cluster.published_offers import DeviceIndex
from controller.demand.pending_claims import Queue
from controller.demand.queued_workloads import Countable
from driver.model.offer import Offer
from driver.model.plan import OfferMode


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
    def mode(self) -> OfferMode: ...

    @property
    def next_s(self) -> float | None:
        """Seconds until the plan may change by time alone; None: it does not."""

    def plan(self, queue: Queue, devices: DeviceIndex) -> PlannedOffers:
        """What to offer, whether it is possible at once or not. ``devices`` are those that nodes publish."""

    def listed(self, fleet: Fleet, nodes: Collection[str], needed: Collection[Countable]) -> frozenset[Offer]:
        """What ``nodes`` are to publish whether it is offered or not; ``needed`` is what queued Workloads need."""

    def obstacles(
        self, devices: DeviceIndex, offers: Collection[Offer], withdrawn: Collection[PoolDevice] = ()
    ) -> Mapping[Offer, Collection[PoolDevice]]:
        """Those of ``offers`` that can not be published yet, with the devices that must leave the slices first.

        ``withdrawn`` are devices that leave them now.
        """
