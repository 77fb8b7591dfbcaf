"""The planner for schedulers that do not subtract counters: no two offers of a GPU overlap."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from controller.cluster.claim_index import PoolDevice
from controller.cluster.fleet import Fleet
from controller.cluster.published_offers import DeviceIndex
from controller.curation.disjoint import DisjointCurator
from controller.curation.planner import PlannedOffers
from controller.demand.pending_claims import Queue
from controller.demand.queued_workloads import Countable
from controller.demand.reservation import Reservations
from controller.demand.starvation import StarvationFallback
from driver.kube.work_loop import soonest
from driver.model.offer import Offer
from driver.model.plan import OfferMode
from driver.placement.ranking import Ranking


class DisjointPlanner:
    """``offers``: the number of offers of each kind without pending claims."""

    mode = OfferMode.DISJOINT

    def __init__(self, ranking: Ranking, offers: int) -> None:
        self._curator = DisjointCurator(ranking, offers)
        self._starvation = StarvationFallback()
        self._reservations = Reservations()

    @property
    def next_s(self) -> float | None:
        return soonest(self._starvation.next_s, self._reservations.next_s)

    def plan(self, queue: Queue, devices: DeviceIndex) -> PlannedOffers:
        """Offers for each pending claim that has room, then some of each kind for future claims."""
        reserved = self._reservations.update(queue)
        return self._curator.curate(queue, devices.offered, self._starvation.next_node(queue), reserved)

    def listed(self, fleet: Fleet, nodes: Collection[str], needed: Collection[Countable]) -> frozenset[Offer]:
        """Nothing: listed devices would keep offers that overlap them waiting."""
        return frozenset()

    def obstacles(
        self, devices: DeviceIndex, offers: Collection[Offer], withdrawn: Collection[PoolDevice] = ()
    ) -> Mapping[Offer, Collection[PoolDevice]]:
        return devices.obstacles(offers, withdrawn)
