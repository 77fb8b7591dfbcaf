"""What the cluster offers, by three policies. The ranking and the curation are the product's own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from controller.cluster.fleet import Fleet, FleetGpu
from controller.curation.counters_planner import CountersPlanner
from controller.demand.demand import Demand
from driver.model.device import Device
from driver.model.offer import Offer, OfferKind
from driver.placement.measure import Measure
from driver.placement.ranking import Ranking, order_offers
from tests.bench.placement.trace import Request
from tests.support.fleets import possible as all_possible


class Policy(Protocol):
    """Decides what stands when the scheduler looks."""

    def refresh(self, fleet: Fleet, waiting: Request | None) -> None:
        """Something changed, or ``waiting`` found nothing."""

    def offered(self, gpus: Sequence[FleetGpu], key: OfferKind) -> list[Device]:
        """The offers of ``key`` on one node, in the order in which the scheduler meets them."""


class LowestStart:
    """Everything that fits, GPU after GPU, the lowest start first: what the peers do."""

    def refresh(self, fleet: Fleet, waiting: Request | None) -> None:
        pass

    def offered(self, gpus: Sequence[FleetGpu], key: OfferKind) -> list[Device]:
        return [device for entry in gpus for device in possible(entry, key)]


class BestFirst:
    """Everything that fits, in FGD order: the node plugin alone."""

    def refresh(self, fleet: Fleet, waiting: Request | None) -> None:
        pass

    def offered(self, gpus: Sequence[FleetGpu], key: OfferKind) -> list[Device]:
        return in_order(gpus, (device for entry in gpus for device in possible(entry, key)))


class Curated:
    """The controller's choice. Counts what it costs: ``exchanged`` offers taken back though possible, and
    ``updates`` of a node's offers."""

    def __init__(self, curator: CountersPlanner) -> None:
        self.curator = curator
        self._offers: Collection[Offer] = ()
        self.exchanged = 0
        self.updates = 0

    def refresh(self, fleet: Fleet, waiting: Request | None) -> None:
        demands = [_demand(fleet, waiting)] if waiting else []
        offers = self.curator.curate(fleet, demands, self._offers)
        possible = {device.offer for entry in fleet for device in all_possible(entry)}
        self.exchanged += len(possible & set(self._offers) - set(offers))
        changed = set(offers) ^ set(self._offers)
        self.updates += len({fleet.gpus[offer.gpu].node for offer in changed})
        self._offers = offers

    def offered(self, gpus: Sequence[FleetGpu], key: OfferKind) -> list[Device]:
        there = {entry.gpu.uuid: entry for entry in gpus}
        standing = {offer for offer in self._offers if offer.gpu in there and offer.spot.kind == key}
        entries = [there[uuid] for uuid in {offer.gpu for offer in standing}]
        found = [device for entry in entries for device in possible(entry, key) if device.offer in standing]
        return in_order(gpus, found)


def curated(offers: int, weights: Mapping[str, float] | None = None) -> Curated:
    return Curated(CountersPlanner(Ranking(Measure(weights)), offers=offers))


def possible(entry: FleetGpu, key: OfferKind) -> list[Device]:
    return [device for device in all_possible(entry) if device.spot.kind == key]


def in_order(gpus: Sequence[FleetGpu], devices: Iterable[Device]) -> list[Device]:
    return order_offers(devices, {entry.gpu.uuid: entry.state.mask for entry in gpus})


def _demand(fleet: Fleet, request: Request) -> Demand:
    if request.count == 1:
        return Demand(request.key)
    cliques = tuple(frozenset(entry.gpu.uuid for entry in group) for group in fleet.cliques.values())
    return Demand(request.key, request.count, together=cliques)
