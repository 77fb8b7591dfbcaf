"""What nodes publish, by layout, and keeping it so while claims get devices."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Protocol

from controller.cluster.fleet import Fleet, FleetGpu
from controller.curation.counters_planner import CountersPlanner
from controller.demand.demand import Demand
from controller.demand.requirements import AskedKinds
from driver.model.device import Device, merged
from driver.model.offer import SHARED, Offer, OfferKind, Spot
from driver.slices.build import Content, PublishedGpu, SliceBuilder
from kubelet_plugin.plan.mode import HELD_LAG_SECONDS
from tests.bench.placement.trace import Request
from tests.bench.scale.nodes import pool_of
from tests.bench.scale.peer import peer_slices
from tests.support.fleets import possible


class Layout(StrEnum):
    """Who decides what is published."""

    PEER = "like NVIDIA's driver"
    COMPLETE = "complete"
    FITTING = "every offer that fits"
    CURATED_ALWAYS = "curated, held always"
    CURATED_BY_GPU = "curated, held by GPU"
    """As until November 2026; kubernetes#140806 would keep the scheduler from giving out anything then."""
    CURATED = "curated"
    PRODUCT = "curated, real controller"
    """By the product's own processes (``product.py``); in the others the benchmark plays controller and nodes."""


class Publishing(Protocol):
    """What the nodes of a fleet publish."""

    def contents(self, node: str) -> Mapping[str, Content]:
        """The content of the node's slices by name, as it should be now."""

    def changed(self, held: Mapping[str, Sequence[Device]], waiting: Mapping[Request, int]) -> None:
        """``held`` is all that claims have by now of each GPU that has changed, ``waiting`` how many pods wait."""

    def due(self) -> Iterable[str]:
        """Nodes whose slices are to be written now; they count as written."""

    def due_in_s(self) -> float:
        """When to ask again if nothing changes."""


class Peer:
    """Never changes."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def contents(self, node: str) -> Mapping[str, Content]:
        return peer_slices(pool_of(node), self._fleet.nodes[node])

    def changed(self, held: Mapping[str, Sequence[Device]], waiting: Mapping[Request, int]) -> None:
        pass

    def due(self) -> Iterable[str]:
        return ()

    def due_in_s(self) -> float:
        return math.inf


class Fitting:
    """Node plugins alone: what is held, and everything that still fits beside it; an allocation is an update."""

    def __init__(self, fleet: Fleet) -> None:
        self._nodes = {node: {entry.gpu.uuid: entry for entry in gpus} for node, gpus in fleet.nodes.items()}
        self._node_of = {entry.gpu.uuid: entry.node for entry in fleet}
        self._builders = {node: SliceBuilder(pool_of(node)) for node in fleet.nodes}
        self._changed: dict[str, float] = {}
        """When the slices of each node have to be written."""

    def offers(self, entry: FleetGpu) -> tuple[Device, ...]:
        """What the GPU offers."""
        return possible(entry)

    @property
    def lag_s(self) -> float:
        """How long slices may say nothing of what was given out."""
        return 0.0

    def published(self, entry: FleetGpu) -> PublishedGpu:
        """What the slices have of the GPU."""
        divided = bool(entry.shares or entry.shared)
        return PublishedGpu(entry.gpu, entry.number, tuple(merged(entry.held)), self.offers(entry), divided=divided)

    def contents(self, node: str) -> Mapping[str, Content]:
        return self._builders[node].build(map(self.published, self._nodes[node].values()))

    def changed(self, held: Mapping[str, Sequence[Device]], waiting: Mapping[Request, int]) -> None:
        for uuid, devices in held.items():
            node = self._node_of[uuid]
            self._nodes[node][uuid] = self._nodes[node][uuid].holding(devices)
            self.write_in(node, self.lag_s)

    def write_in(self, node: str, seconds: float) -> None:
        """The slices of ``node`` are to be written within so many seconds."""
        self._changed[node] = min(self._changed.get(node, math.inf), time.monotonic() + seconds)

    def due(self) -> Iterable[str]:
        now = time.monotonic()
        nodes = [node for node, when in self._changed.items() if when <= now]
        for node in nodes:
            del self._changed[node]
        return nodes

    def due_in_s(self) -> float:
        return max(0.0, min(self._changed.values(), default=math.inf) - time.monotonic())

    def fleet(self) -> Fleet:
        """The fleet as it is now."""
        return Fleet.of(entry for gpus in self._nodes.values() for entry in gpus.values())


class Complete(Fitting):
    """Nodes that publish every device, whatever is held."""

    def published(self, entry: FleetGpu) -> PublishedGpu:
        return PublishedGpu(entry.gpu, entry.number, (), entry.devices, constant=True)

    def changed(self, held: Mapping[str, Sequence[Device]], waiting: Mapping[Request, int]) -> None:
        pass


class CuratedAlways(Fitting):
    """Node plugins that follow a controller: the product's choice of offers, and its rule when to tell what is held.

    An offer stays until something held overlaps it; the product takes others back, too, once they have stood unused
    for a while, which is longer than a measurement.
    """

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self._curator = CountersPlanner()
        self._keys = {device.spot.kind for entry in fleet.nodes["node-0000"] for device in entry.devices}
        self._offers: dict[str, frozenset[Offer]] = {}
        self._offer({})

    @property
    def lag_s(self) -> float:
        return HELD_LAG_SECONDS

    def offers(self, entry: FleetGpu) -> tuple[Device, ...]:
        asked = self._offers.get(entry.gpu.uuid, frozenset())
        return tuple(d for d in possible(entry) if d.offer in asked) if asked else ()

    def published(self, entry: FleetGpu) -> PublishedGpu:
        gpu = super().published(entry)
        return gpu if entry.state.left else replace(gpu, closed=frozenset(d.name for d in gpu.shared))

    def changed(self, held: Mapping[str, Sequence[Device]], waiting: Mapping[Request, int]) -> None:
        super().changed(held, waiting)
        gib = max((request.gib for request in waiting), default=0)
        standing = self._standing(gib)
        count = Counter[OfferKind]()
        for request, pods in waiting.items():
            count[request.key] += pods
        if any(standing[key] < max(self._curator.offers, count[key]) for key in self._keys):
            self._offer(waiting)

    def _standing(self, gib: int) -> Counter[OfferKind]:
        """How many claims can still get an offer of each key, those of shared devices with ``gib`` each."""
        entries = [self._nodes[self._node_of[uuid]][uuid] for uuid in self._offers]
        standing = Counter(device.spot.kind for entry in entries for device in self.offers(entry))
        open_gpus = (entry for entry in entries if Offer(entry.gpu.uuid, Spot(SHARED)) in self._offers[entry.gpu.uuid])
        return standing | Counter({SHARED: sum(entry.state.left // max(1, gib) for entry in open_gpus)})

    def _offer(self, waiting: Mapping[Request, int]) -> None:
        demands = [Demand(request.key, gib=request.gib) for request, count in waiting.items() for _ in range(count)]
        asked = AskedKinds(gib=max((request.gib for request in waiting), default=0))
        published = [offer for offers in self._offers.values() for offer in offers]
        for offer in self._curator.curate(self.fleet(), demands, published, published, asked):
            standing = self._offers.get(offer.gpu, frozenset())
            if offer not in standing:
                self._offers[offer.gpu] = standing | {offer}
                self.write_in(self._node_of[offer.gpu], 0.0)


class Curated(CuratedAlways):
    """The same in a large cluster: a node of which nothing is offered is not published."""

    def contents(self, node: str) -> Mapping[str, Content]:
        gpus = [self.published(entry) for entry in self._nodes[node].values()]
        offers = any(gpu.is_offering for gpu in gpus)
        return self._builders[node].build(replace(gpu, unpublished=not offers) for gpu in gpus)


class CuratedByGpu(CuratedAlways):
    """The same, but a GPU of which nothing is offered is not published, whatever its node offers."""

    def published(self, entry: FleetGpu) -> PublishedGpu:
        found = super().published(entry)
        return replace(found, unpublished=not found.is_offering)


PUBLISHING: Mapping[Layout, Callable[[Fleet], Publishing]] = {
    Layout.PEER: Peer,
    Layout.COMPLETE: Complete,
    Layout.FITTING: Fitting,
    Layout.CURATED_ALWAYS: CuratedAlways,
    Layout.CURATED_BY_GPU: CuratedByGpu,
    Layout.CURATED: Curated,
}


def devices_published(publishing: Publishing, nodes: Iterable[str]) -> Iterator[int]:
    """How many devices each node publishes."""
    for node in nodes:
        yield sum(len(content.get("devices", ())) for content in publishing.contents(node).values())
