"""Devices that are published without being offered, for tools that count published devices (pure).

Kueue, for example, admits a claim only if as many published devices match its selectors as it asks for, held or tainted
ones included (pkg/dra/claims.go); a Workload that finds too few at the wrong moment may wait for ever. Curation offers
two devices of each kind, and none of a kind that has no room. So a constant set of devices is listed: published with
the taint of devices that are not offered, whether they are held or beside held devices, as shared counters keep the
scheduler from allocating both. The scheduler skips a tainted device before it evaluates selectors.

For Workloads that wait in Kueue's queue (``controller.demand.queued_workloads``) as many devices are listed as their
claims ask for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain, islice, zip_longest
from typing import NamedTuple

from controller.cluster.fleet import Fleet, FleetGpu, Hardware
from controller.demand.queued_workloads import Countable
from driver.model.offer import FULL, Offer, OfferKind, Spot


class ProductKind(NamedTuple):
    """A kind of device of one product: selectors most often name a product."""

    product: str
    kind: OfferKind


class ListedDevices:
    """Chooses what is listed. A device stays listed as long as its GPU can be that device.

    ``minimum``: how many devices of each kind are listed of every product; None: of full GPUs as many as the largest
    node has, of other kinds ``offers``.
    """

    def __init__(self, minimum: Mapping[OfferKind, int] | None, offers: int) -> None:
        self._minimum, self._offers = minimum, offers
        self._listed: frozenset[Offer] = frozenset()
        self._queued: frozenset[Offer] = frozenset()
        """Those listed for queued Workloads only."""
        self._hardware: Hardware | None = None
        self._wanted: Mapping[ProductKind, int] = {}

    def update(self, fleet: Fleet, nodes: Collection[str], queued: Iterable[Countable] = ()) -> frozenset[Offer]:
        """The devices to list, on GPUs of ``nodes``, which follow their plans; some may be offered at present.

        ``queued``: what queued Workloads need; it is listed until they are admitted.
        """
        if fleet.hardware is not self._hardware:
            self._hardware, self._wanted = fleet.hardware, self._wanted_in(fleet)
        kept = {each for each in self._listed if _is_possible(fleet, each, nodes)}
        counted = Counter(_kind_of(fleet.gpus[offer.gpu], offer) for offer in kept)
        missing = {kind: count - counted[kind] for kind, count in self._wanted.items() if count > counted[kind]}
        if missing:
            kept |= {*_chosen(fleet, missing, kept, nodes)}
        self._listed = frozenset(kept)
        self._queued = frozenset(self._for_queued(fleet, nodes, queued))
        return self._listed | self._queued

    def _for_queued(self, fleet: Fleet, nodes: Collection[str], queued: Iterable[Countable]) -> set[Offer]:
        """What is missing beside the minimum, as far as possible what was listed before."""
        found: set[Offer] = set()
        before = {each for each in self._queued if each not in self._listed and _is_possible(fleet, each, nodes)}
        for each in queued:
            counted = sum(1 for one in chain(self._listed, found) if _counts(each, one.gpu, one.spot))
            if counted < each.needed:
                again = sorted((one for one in before - found if _counts(each, one.gpu, one.spot)), key=str)
                more = _possible(fleet, each, {*self._listed, *found, *again}, nodes)
                found |= {*islice(chain(again, more), each.needed - counted)}
        return found

    def _wanted_in(self, fleet: Fleet) -> Mapping[ProductKind, int]:
        per_node: defaultdict[str, Counter[str]] = defaultdict(Counter)
        found: dict[ProductKind, int] = {}
        for entry in fleet:
            product = entry.gpu.product_name
            per_node[product][entry.node] += 1
            for kind in entry.unheld.state.offered():
                count = self._offers if self._minimum is None else self._minimum.get(kind, 0)
                found[ProductKind(product, kind)] = count
        if self._minimum is None:
            found |= {each: max(per_node[each.product].values()) for each in found if each.kind == FULL}
        return {each: count for each, count in found.items() if count}


def _is_possible(fleet: Fleet, offer: Offer, nodes: Collection[str]) -> bool:
    entry = fleet.gpus.get(offer.gpu)
    return entry is not None and entry.node in nodes and entry.unheld.state.admits(offer.spot)


def _chosen(
    fleet: Fleet, missing: Mapping[ProductKind, int], taken: Collection[Offer], nodes: Collection[str]
) -> Iterator[Offer]:
    """So many devices of each kind, none of ``taken``, as far as there are any.

    They are taken from the nodes in turn: while its slices change, the pool of a node is incomplete for a moment.
    """
    for each, count in missing.items():
        on_nodes = (_on_node(gpus, each) for node, gpus in fleet.nodes.items() if node in nodes)
        in_turn = chain.from_iterable(zip_longest(*on_nodes))
        yield from islice((offer for offer in in_turn if offer is not None and offer not in taken), count)


def _on_node(gpus: Iterable[FleetGpu], wanted: ProductKind) -> Iterator[Offer]:
    for entry in gpus:
        if entry.gpu.product_name == wanted.product:
            spots = (spot for spot in entry.layout.devices if spot.kind == wanted.kind)
            yield from (Offer(entry.gpu.uuid, spot) for spot in spots if entry.unheld.state.admits(spot))


def _kind_of(entry: FleetGpu, offer: Offer) -> ProductKind:
    return ProductKind(entry.gpu.product_name, offer.spot.kind)


def _counts(wanted: Countable, gpu: str, spot: Spot) -> bool:
    """Whether the device at ``spot`` of ``gpu`` is one of ``wanted``."""
    return any(
        kind.key == spot.kind and gpu in gpus and (kind.starts is None or spot.at in kind.starts)
        for kind, gpus in wanted.kinds.items()
    )


def _possible(fleet: Fleet, wanted: Countable, taken: Collection[Offer], nodes: Collection[str]) -> Iterator[Offer]:
    """The devices of ``wanted`` that may be listed, none of ``taken``."""
    for entry in fleet:
        if entry.node in nodes and any(entry.gpu.uuid in gpus for gpus in wanted.kinds.values()):
            for spot in entry.layout.devices:
                offer = Offer(entry.gpu.uuid, spot)
                if _counts(wanted, entry.gpu.uuid, spot) and offer not in taken and entry.unheld.state.admits(spot):
                    yield offer
