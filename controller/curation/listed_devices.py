"""Devices that are published without being offered, for tools that count published devices (pure).

Kueue, for example, admits a claim only if as many published devices match its selectors as it asks for, held or tainted
ones included (pkg/dra/claims.go). Curation offers two devices of each kind, and none of a kind that has no room. What
is missing is listed: published with the taint of devices that are not offered, beside held devices, too, as shared
counters keep the scheduler from allocating both. The scheduler skips a tainted device before it evaluates selectors.

For Workloads that wait in Kueue's queue (``controller.demand.queued_workloads``) as many devices are listed as their
claims ask for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import NamedTuple

from controller.cluster.fleet import Fleet, FleetGpu, Hardware, offer_at, spot_for
from controller.demand.queued_workloads import Countable
from driver.model.plan import Offer
from driver.placement.state import FULL, OfferKind, Spot, key_of, spot_of


class ProductKind(NamedTuple):
    """A kind of device of one product: selectors most often name a product."""

    product: str
    kind: OfferKind


class ListedDevices:
    """Chooses what is listed. A device stays listed until it is offered, allocated or impossible.

    ``minimum``: how many devices of each kind are to be published of every product; None: of full GPUs as many as the
    largest node has, of other kinds ``offers``.
    """

    def __init__(self, minimum: Mapping[OfferKind, int] | None, offers: int) -> None:
        self._minimum, self._offers = minimum, offers
        self._listed: frozenset[Offer] = frozenset()
        self._queued: frozenset[Offer] = frozenset()
        """Those listed for queued Workloads only."""
        self._hardware: Hardware | None = None
        self._wanted: Mapping[ProductKind, int] = {}

    def update(
        self,
        fleet: Fleet,
        offers: Collection[Offer],
        is_published: Callable[[FleetGpu, str], bool],
        nodes: Collection[str],
        queued: Iterable[Countable] = (),
    ) -> frozenset[Offer]:
        """The devices to list beside ``offers``, on GPUs of ``nodes``, which follow their plans.

        ``is_published``: whether the device of this name of a GPU is in the slices. ``queued``: what queued Workloads
        need; it is listed until they are admitted.
        """
        if fleet.hardware is not self._hardware:
            self._hardware, self._wanted = fleet.hardware, self._wanted_in(fleet)
        kept = {each for each in self._listed if each not in offers and self._is_possible(fleet, each, nodes)}
        counted = Counter(
            _kind_of(fleet.gpus[offer.gpu], offer) for offer in (*offers, *kept) if offer.gpu in fleet.gpus
        )
        missing = {kind: count - counted[kind] for kind, count in self._wanted.items() if count > counted[kind]}
        if missing:
            kept |= {*_chosen(fleet, _without_held(fleet, missing, is_published), {*offers, *kept}, nodes)}
        self._listed = frozenset(kept)
        self._queued = frozenset(self._for_queued(fleet, {*offers, *kept}, is_published, nodes, queued))
        return self._listed | self._queued

    def _for_queued(
        self,
        fleet: Fleet,
        published: Collection[Offer],
        is_published: Callable[[FleetGpu, str], bool],
        nodes: Collection[str],
        queued: Iterable[Countable],
    ) -> set[Offer]:
        """What is missing beside ``published``, as far as possible what was listed before."""
        found: set[Offer] = set()
        before = {each for each in self._queued if each not in published and self._is_possible(fleet, each, nodes)}
        for each in queued:
            missing = each.needed - sum(1 for one in (*published, *found) if _counts(each, one.gpu, spot_for(one)))
            if missing > 0:
                devices = (one for entry in fleet for one in entry.held if is_published(entry, one.name))
                held = (one for one in devices if _counts(each, one.gpu.uuid, spot_of(one)))
                missing -= sum(1 for _ in islice(held, missing))
            if missing > 0:
                again = sorted((one for one in before - found if _counts(each, one.gpu, spot_for(one))), key=str)
                more = _free(fleet, each, {*published, *found, *again}, nodes)
                found |= {*islice(chain(again, more), missing)}
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

    def _is_possible(self, fleet: Fleet, offer: Offer, nodes: Collection[str]) -> bool:
        entry = fleet.gpus.get(offer.gpu)
        if entry is None or entry.node not in nodes:
            return False
        held = {device.name for device in entry.held}
        return entry.name(offer) not in held and entry.unheld.state.admits(spot_for(offer))


def _without_held(
    fleet: Fleet, missing: Mapping[ProductKind, int], is_published: Callable[[FleetGpu, str], bool]
) -> dict[ProductKind, int]:
    """``missing`` less the held full GPUs that are published.

    A held partition leaves the slices with its claim, and Kueue does not try a Workload again that then finds none.
    """
    left = dict(missing)
    for entry in fleet:
        for device in entry.held:
            each = ProductKind(entry.gpu.product_name, key_of(device))
            if each.kind == FULL and each in left and is_published(entry, device.name):
                left[each] -= 1
                if not left[each]:
                    del left[each]
        if not left:
            break
    return left


def _chosen(
    fleet: Fleet, missing: Mapping[ProductKind, int], taken: Collection[Offer], nodes: Collection[str]
) -> Iterator[Offer]:
    """So many free devices of each kind, none of ``taken``, as far as there are any."""
    left = dict(missing)
    for entry in fleet:
        if not left:
            return
        kinds = [each for each in left if each.product == entry.gpu.product_name] if entry.node in nodes else []
        held = {device.name for device in entry.held} if kinds else set()
        for each in kinds:
            spots = (spot for spot, name in entry.layout.names.items() if spot.key == each.kind and name not in held)
            offers = (offer_at(entry.gpu.uuid, spot) for spot in spots if entry.unheld.state.admits(spot))
            found = list(islice((offer for offer in offers if offer not in taken), left[each]))
            yield from found
            left[each] -= len(found)
            if not left[each]:
                del left[each]


def _kind_of(entry: FleetGpu, offer: Offer) -> ProductKind:
    return ProductKind(entry.gpu.product_name, OfferKind(offer.type, offer.profile))


def _counts(wanted: Countable, gpu: str, spot: Spot) -> bool:
    """Whether the device at ``spot`` of ``gpu`` is one of ``wanted``."""
    return any(
        kind.key == spot.key and gpu in gpus and (kind.starts is None or spot.at in kind.starts)
        for kind, gpus in wanted.kinds.items()
    )


def _free(fleet: Fleet, wanted: Countable, taken: Collection[Offer], nodes: Collection[str]) -> Iterator[Offer]:
    """The devices of ``wanted`` that may be listed, none of ``taken``."""
    for entry in fleet:
        if entry.node in nodes and any(entry.gpu.uuid in gpus for gpus in wanted.kinds.values()):
            held = {device.name for device in entry.held}
            for spot, name in entry.layout.names.items():
                offer, is_wanted = offer_at(entry.gpu.uuid, spot), _counts(wanted, entry.gpu.uuid, spot)
                if is_wanted and name not in held and offer not in taken and entry.unheld.state.admits(spot):
                    yield offer
