"""Devices that are published without being offered, for tools that count published devices (pure).

Kueue, for example, admits a claim only if as many published devices match its selectors as it asks for, held and
tainted ones included (pkg/dra/claims.go). A Workload that finds too few at the wrong moment may wait forever, and
curation offers only two devices of each kind, and none of a kind that has no room.

So a constant set of devices is listed, which means: published with the taint of devices that are not offered. They may
be held, or overlap held devices: shared counters keep the scheduler from allocating both. The scheduler judges a device
in this order: in use, selectors, capacity, counters, taints.

For Workloads that wait in Kueue's queue (``controller.demand.queued_workload_claims``) as many devices are listed as
their claims ask for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain, islice, zip_longest
from typing import NamedTuple

from controller.cluster.fleet import Fleet, FleetGpu, Hardware
from controller.demand.queued_workload_claims import QueuedNeed
from driver.model.offer import FULL, Offer, OfferKind


class ProductKind(NamedTuple):
    """A kind of device of one product: selectors most often name a product."""

    product: str
    kind: OfferKind


class ListedDevices:
    """Chooses what is listed. A device stays listed while its GPU can be that device.

    ``minimum``: how many devices of each kind are listed of every product; None: of full GPUs as many as the largest
    node has, of other kinds ``offers``.
    """

    def __init__(self, minimum: Mapping[OfferKind, int] | None, offers: int) -> None:
        self._minimum, self._offers = minimum, offers
        self._listed: frozenset[Offer] = frozenset()
        self._queued: frozenset[Offer] = frozenset()
        """Those listed for queued Workloads only."""
        self._hardware: Hardware | None = None
        self._least: Mapping[ProductKind, int] = {}
        """How many devices of each kind are listed at least."""

    def update(self, fleet: Fleet, nodes: Collection[str], queued: Iterable[QueuedNeed] = ()) -> frozenset[Offer]:
        """The devices to list, on GPUs of ``nodes``, which follow their plans; some may be offered at present.

        ``queued``: what queued Workloads need; it is listed until they are admitted.
        """
        if fleet.hardware is not self._hardware:
            self._hardware, self._least = fleet.hardware, self._least_of(fleet)
        kept = {offer for offer in self._listed if _is_possible(fleet, offer, nodes)}
        counts = Counter(ProductKind(fleet.gpus[offer.gpu].gpu.product_name, offer.spot.kind) for offer in kept)
        missing = {kind: count - counts[kind] for kind, count in self._least.items() if count > counts[kind]}
        if missing:
            kept |= {*_chosen(fleet, missing, kept, nodes)}
        self._listed = frozenset(kept)
        self._queued = frozenset(self._for_queued(fleet, nodes, queued))
        return self._listed | self._queued

    def _for_queued(self, fleet: Fleet, nodes: Collection[str], queued: Iterable[QueuedNeed]) -> set[Offer]:
        """What queued Workloads need in addition to the minimum, preferably what was listed before."""
        chosen: set[Offer] = set()
        before = {offer for offer in self._queued - self._listed if _is_possible(fleet, offer, nodes)}
        for need in queued:
            missing = need.count - sum(1 for offer in chain(self._listed, chosen) if _serves(need, offer))
            if missing > 0:
                again = sorted((offer for offer in before - chosen if _serves(need, offer)), key=str)
                more = _possible(fleet, need, {*self._listed, *chosen, *again}, nodes)
                chosen |= {*islice(chain(again, more), missing)}
        return chosen

    def _least_of(self, fleet: Fleet) -> Mapping[ProductKind, int]:
        on_nodes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        counts: dict[ProductKind, int] = {}
        for gpu in fleet:
            product = gpu.gpu.product_name
            on_nodes[product][gpu.node] += 1
            for kind in gpu.unheld.state.offered():
                least = self._offers if self._minimum is None else self._minimum.get(kind, 0)
                counts[ProductKind(product, kind)] = least
        if self._minimum is None:
            full = [product_kind for product_kind in counts if product_kind.kind == FULL]
            counts |= {product_kind: max(on_nodes[product_kind.product].values()) for product_kind in full}
        return {product_kind: count for product_kind, count in counts.items() if count}


def _is_possible(fleet: Fleet, offer: Offer, nodes: Collection[str]) -> bool:
    gpu = fleet.gpus.get(offer.gpu)
    return gpu is not None and gpu.node in nodes and gpu.unheld.state.admits(offer.spot)


def _chosen(
    fleet: Fleet, missing: Mapping[ProductKind, int], taken: Collection[Offer], nodes: Collection[str]
) -> Iterator[Offer]:
    """So many devices of each kind, none of ``taken``; fewer if there are no more.

    They are taken from the nodes in turn: while its slices change, the pool of a node is incomplete for a moment.
    """
    for product_kind, count in missing.items():
        on_nodes = (_on_node(gpus, product_kind) for node, gpus in fleet.nodes.items() if node in nodes)
        in_turn = chain.from_iterable(zip_longest(*on_nodes))
        yield from islice((offer for offer in in_turn if offer is not None and offer not in taken), count)


def _on_node(gpus: Iterable[FleetGpu], product_kind: ProductKind) -> Iterator[Offer]:
    for gpu in gpus:
        if gpu.gpu.product_name == product_kind.product:
            for spot in gpu.layout.devices:
                if spot.kind == product_kind.kind and gpu.unheld.state.admits(spot):
                    yield Offer(gpu.gpu.uuid, spot)


def _serves(need: QueuedNeed, offer: Offer) -> bool:
    """Whether the device of ``offer`` is one of those that are needed."""
    return any(kind.has(offer.spot) and offer.gpu in gpus for kind, gpus in need.kinds.items())


def _possible(fleet: Fleet, need: QueuedNeed, taken: Collection[Offer], nodes: Collection[str]) -> Iterator[Offer]:
    """The needed devices that may be listed, none of ``taken``."""
    for gpu in fleet:
        if gpu.node in nodes and any(gpu.gpu.uuid in gpus for gpus in need.kinds.values()):
            for spot in gpu.layout.devices:
                offer = Offer(gpu.gpu.uuid, spot)
                if _serves(need, offer) and offer not in taken and gpu.unheld.state.admits(spot):
                    yield offer
