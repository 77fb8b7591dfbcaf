"""The planner for schedulers that subtract counters: offers may overlap, and the scheduler chooses among them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from controller.cluster.claim_index import PoolDevice
from controller.cluster.fleet import Fleet
from controller.cluster.published_offers import DeviceIndex
from controller.curation.curator import Curator
from controller.curation.listed_devices import ListedDevices
from controller.curation.planner import PlannedOffers
from controller.curation.wider_offers import WiderOffers
from controller.demand.demand import demand_of
from controller.demand.pending_claims import Queue
from controller.demand.queued_workloads import Countable
from driver.model.offer import Offer, OfferKind
from driver.model.plan import OfferMode
from driver.placement.ranking import Ranking


class CountersPlanner:
    """``offers``: the number of offers of each kind without pending claims. ``min_published``: see ListedDevices."""

    mode = OfferMode.COUNTERS

    def __init__(self, ranking: Ranking, offers: int, min_published: Mapping[OfferKind, int] | None) -> None:
        self._curator = Curator(ranking, offers)
        self._wider_offers = WiderOffers()
        self._devices_to_list = ListedDevices(min_published, offers)
        self._listed_for: tuple[Fleet, Collection[str]] | None = None
        """The fleet and nodes for which ``_listed`` was chosen; None: queued Workloads mattered, too."""
        self._listed: frozenset[Offer] = frozenset()

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

    def listed(self, fleet: Fleet, nodes: Collection[str], needed: Collection[Countable]) -> frozenset[Offer]:
        is_same = self._listed_for is not None and self._listed_for[0] is fleet and self._listed_for[1] == nodes
        if needed or not is_same:
            self._listed = self._devices_to_list.update(fleet, nodes, needed)
            self._listed_for = None if needed else (fleet, nodes)
        return self._listed

    def obstacles(
        self, devices: DeviceIndex, offers: Collection[Offer], withdrawn: Collection[PoolDevice] = ()
    ) -> Mapping[Offer, Collection[PoolDevice]]:
        """None: counters keep offers of one GPU apart."""
        return {}
