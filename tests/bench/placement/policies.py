"""What the cluster offers, by three policies. The ranking and the curation are the product's own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from controller.curation import Curator
from controller.fleet import Fleet, FleetGpu
from controller.learning import Learnt, Popularity
from controller.offers import CurationSettings, Demand
from driver.model.device import Device
from driver.model.gpu import Gpu
from driver.model.plan import Offer, offer_of
from driver.placement import EQUAL, Key, Measure, Ranking, Weights, key_of, order_offers
from driver.placement.measure import CLIQUE_CLASS
from tests.bench.placement.trace import Arrival, Request
from tests.support.clock import FakeClock

HOUR_S = 3600.0


class Policy(Protocol):
    """Decides what stands when the scheduler looks."""

    def arrived(self, arrival: Arrival) -> None:
        """Before the first look at what stands."""

    def refresh(self, fleet: Fleet, waiting: Request | None) -> None:
        """Something changed, or ``waiting`` found nothing."""

    def offered(self, gpus: Sequence[FleetGpu], key: Key) -> list[Device]:
        """The offers of ``key`` on one node, in the order in which the scheduler meets them."""


class LowestStart:
    """Everything that fits, GPU after GPU, the lowest start first: what the peers do."""

    def arrived(self, arrival: Arrival) -> None:
        pass

    def refresh(self, fleet: Fleet, waiting: Request | None) -> None:
        pass

    def offered(self, gpus: Sequence[FleetGpu], key: Key) -> list[Device]:
        return [device for entry in gpus for device in possible(entry, key)]


class BestFirst:
    """Everything that fits, in FGD order: the node plugin alone."""

    def arrived(self, arrival: Arrival) -> None:
        pass

    def refresh(self, fleet: Fleet, waiting: Request | None) -> None:
        pass

    def offered(self, gpus: Sequence[FleetGpu], key: Key) -> list[Device]:
        return in_order(gpus, (device for entry in gpus for device in possible(entry, key)))


class Curated:
    """The controller's choice. Counts what it costs: ``exchanged`` offers taken back though possible, and
    ``updates`` of a node's offers."""

    def __init__(self, curator: Curator) -> None:
        self.curator = curator
        self._offers: Collection[Offer] = ()
        self.exchanged = 0
        self.updates = 0

    def arrived(self, arrival: Arrival) -> None:
        pass

    def refresh(self, fleet: Fleet, waiting: Request | None) -> None:
        demands = [_demand(fleet, waiting)] if waiting else []
        curation = self.curator.curate(fleet, demands, self._offers)
        self.exchanged += sum(1 for entry in curation.taken_back if entry.reason != "gone")
        changed = set(curation.offers) ^ set(self._offers)
        self.updates += len({fleet.gpus[offer.gpu].node for offer in changed})
        self._offers = curation.offers.keys()

    def offered(self, gpus: Sequence[FleetGpu], key: Key) -> list[Device]:
        there = {entry.gpu.uuid: entry for entry in gpus}
        standing = {offer for offer in self._offers if offer.gpu in there and (offer.type, offer.profile) == key}
        entries = [there[uuid] for uuid in {offer.gpu for offer in standing}]
        found = [device for entry in entries for device in possible(entry, key) if offer_of(device) in standing]
        return in_order(gpus, found)


class Learning(Curated):
    """The same with weights learnt from what arrives; the mean duration is taken for one hour."""

    def __init__(self, offers: int, hours: float, gpu: Gpu) -> None:
        super().__init__(Curator(settings=CurationSettings(offers=offers)))
        self._gpu = gpu
        self._clock = FakeClock(0.0)
        self._popularity = Popularity(hours * HOUR_S, self._clock)
        self._learnt = Learnt(self._popularity, self._clock)

    def arrived(self, arrival: Arrival) -> None:
        self._clock.advance(arrival.at * HOUR_S - self._clock.monotonic())
        request = arrival.request
        name = CLIQUE_CLASS if request.count > 1 else str(request.key)
        self._popularity.add({name: request.slices(self._gpu) / self._gpu.memory_slices})
        if self._learnt.renew():
            self.curator = Curator(Ranking(Measure(self._learnt.weights)), self.curator.settings)


def curated(offers: int, weights: Weights = EQUAL) -> Curated:
    return Curated(Curator(Ranking(Measure(weights)), CurationSettings(offers=offers)))


def possible(entry: FleetGpu, key: Key) -> list[Device]:
    return [device for device in entry.possible if key_of(device) == key]


def in_order(gpus: Sequence[FleetGpu], devices: Iterable[Device]) -> list[Device]:
    return order_offers(devices, {entry.gpu.uuid: entry.occupancy.mask for entry in gpus})


def _demand(fleet: Fleet, request: Request) -> Demand:
    if request.count == 1:
        return Demand(request.key)
    cliques = tuple(frozenset(entry.gpu.uuid for entry in group) for group in fleet.cliques.values())
    return Demand(request.key, request.count, together=cliques)
