"""Offers for schedulers that subtract counters: enough for the pending claims, at placements of least fragmentation.

The scheduler picks a node and its first device that fits; it only chooses well if nothing else is offered.

The choice is stable while nothing changes. An offer is exchanged, or all offers of a kind are chosen anew, only if that
gains more than the stickiness (for a new choice: on average per offer).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from controller.cluster.fleet import Fleet
from controller.cluster.unheld_devices import UnheldDevices
from controller.curation.offer_draft import STICKINESS, OfferDraft
from controller.curation.overdue_claims import OverdueClaims
from controller.curation.planner import PlannedOffers
from controller.curation.ranked_fleet import NO_CANDIDATES, FleetPlace, RankedFleet
from controller.curation.shared_offers import SharedSelection
from controller.demand.demand import Demand, Eligible, demand_of
from controller.demand.device_search import ROUNDING
from controller.demand.pending_claims import Queue
from controller.demand.requirements import NOTHING_ASKED, AskedKinds
from driver.model.offer import SHARED, DeviceKind, Offer, OfferKind, Spot
from driver.placement.ranking import RankedGpu, Ranking

EXTRA_EXCHANGES = 8
"""The limit of exchanges beyond the number of published offers, far above any that was observed."""

PASSES = 8
"""The limit of passes. It is even: of two choices that alternate for ever, every decision ends with the same one."""


class CountersPlanner:
    """Plans for schedulers that subtract counters: offers may overlap, and the scheduler chooses among them.

    Offers for pending claims of different kinds, new and present ones, overlap only where there is not enough room:
    then the allocation of one claim takes no offer away from another, and a burst of pods needs few decisions.

    ``offers``: the number of offers of each kind without pending claims. ``stickiness``: an offer is replaced only if
    the new one saves more fragmentation than this, in memory slices; all offers of a kind are chosen anew only if that
    saves more per offer on average.
    """

    def __init__(self, ranking: Ranking | None = None, offers: int = 2, stickiness: float = STICKINESS) -> None:
        self.ranking = ranking or Ranking()
        self.offers = offers
        self.stickiness = stickiness
        self._ranked: RankedFleet | None = None
        self._overdue_claims = OverdueClaims()
        self._overlapping_offers: frozenset[Offer] = frozenset()
        """The last plan has these offers only because they overlap larger ones: they are not the best of their kind."""

    @property
    def next_s(self) -> float | None:
        return self._overdue_claims.next_s

    def plan(self, queue: Queue, devices: UnheldDevices, announced: Collection[Offer]) -> PlannedOffers:
        """Offers that serve the demand of pending claims, and ``offers`` of each default kind if there is room.

        Published offers of a kind that is in demand are kept: the scheduler may just have given one to a claim.
        ``announced`` offers count as present, too: otherwise decisions that follow each other quickly would choose them
        anew.
        """
        demands = demand_of(queue, self._overdue_claims.widened(queue))
        requested = frozenset(demand.kind for demand in demands)
        protected = [offer for offer in devices.offered if offer.spot.kind in requested]
        present = devices.offered.union(announced)
        offers = self.curate(queue.feasibility.fleet, demands, present, protected, queue.asked)
        return PlannedOffers(offers, requested)

    def curate(
        self,
        fleet: Fleet,
        demands: Collection[Demand] = (),
        published: Collection[Offer] = (),
        protected: Collection[Offer] = (),
        asked: AskedKinds = NOTHING_ASKED,
        passes: int = PASSES,
    ) -> tuple[Offer, ...]:
        """The offers of the default kinds and of the kinds in demand, in a fixed order.

        ``published`` are the present offers, ``protected`` those among them that the scheduler may just have given to
        a pending claim: they stay while they are possible. Demand for kinds that the fleet lacks is ignored.
        ``asked``: the kinds that all claims and templates ask for, pending or not. Larger kinds are chosen first, and
        avoid only present offers of smaller ones: several kinds are chosen again until they stay, in up to ``passes``.
        """
        ranked = self._ranked
        if ranked is None or ranked.fleet is not fleet:
            ranked = self._ranked = RankedFleet(fleet, self.ranking, ranked)
        requested = {demand.kind for demand in demands}
        present = {offer: place for offer in published if (place := ranked.place(offer)) is not None}
        places = {offer: place for offer, place in present.items() if offer not in self._overlapping_offers}
        keep = frozenset(places[offer] for offer in protected if offer in places)
        chosen, for_pending = {*ranked.open_places}, tuple[FleetPlace, ...]()
        awaited = {place for place in places.values() if place.spot.kind in requested}
        default_kinds = ranked.default_kinds(asked)
        for kind in sorted(ranked.kinds, key=ranked.sizes.__getitem__, reverse=True):
            of_kind = {place for place in places.values() if place.spot.kind == kind}
            of_demands = [demand for demand in demands if demand.kind == kind]
            eligible_for_all = [demand.eligible for demand in of_demands if demand.all_devices]
            fixed = (keep & of_kind).union(*(ranked.places(kind, eligible) for eligible in eligible_for_all))
            default = Need(default_kinds.get(kind), self.offers if kind in default_kinds else 0)
            needs = () if kind == SHARED else needs_of(ranked, kind, of_demands, of_kind, default)
            awaited -= of_kind
            to_avoid = ((*for_pending, *sorted(awaited)), for_pending) if kind in requested else ()
            for avoided in dict.fromkeys((*to_avoid, ())):
                draft = OfferDraft(ranked, kind, avoided)
                selection: OfferSelection | SharedSelection = OfferSelection(draft, needs, fixed, self.stickiness)
                if kind == SHARED:
                    selection = SharedSelection(draft, of_demands, fixed, self.offers, asked.gib, self.stickiness)
                selection.choose(of_kind)
                if not avoided or selection.serves_all:
                    break
            for_pending += tuple(sorted(selection.draft.places)) if avoided in to_avoid else ()
            chosen |= selection.draft.places.union(selection.extra)
        smaller = overlapping_smaller_places(ranked, chosen, asked, present.values()) if asked.choices else set()
        self._overlapping_offers = frozenset(map(ranked.offer, smaller))
        offers = tuple(ranked.offer(place) for place in sorted(chosen | smaller))
        is_settled = len(requested) < 2 or present.keys() == {*offers} or passes == 1
        return offers if is_settled else self.curate(fleet, demands, offers, protected, asked, passes - 1)


@dataclass(frozen=True)
class Need:
    """At least ``count`` offers on the GPUs of ``eligible``."""

    eligible: Eligible
    count: int


class Exchange(NamedTuple):
    """``new`` replaces ``old`` and increases fragmentation by ``gain`` memory slices less.

    ``gain`` is infinite if ``old`` is a full GPU that could be offered as shares, and ``new`` is not.
    """

    gain: float
    old: FleetPlace
    new: FleetPlace


@dataclass
class OfferSelection:
    """Selects the offers of one kind, with all ``fixed`` ones; ``extra`` are those of them that don't fit together."""

    draft: OfferDraft
    needs: Sequence[Need]
    fixed: frozenset[FleetPlace]
    stickiness: float
    extra: list[FleetPlace] = field(default_factory=list)

    @property
    def serves_all(self) -> bool:
        """Whether every need has as many offers as it asks for."""
        return all(self.draft.count(need.eligible) >= need.count for need in self.needs)

    def choose(self, published: Collection[FleetPlace]) -> None:
        """Drafts the offers.

        A published offer that serves a need stays unless an exchange or a new selection gains more than the stickiness.
        """
        exchangeable = sorted(set(published) - self.fixed)
        self._start()
        self._improve(exchangeable)
        if self._may_be_suboptimal() and self._start_anew():
            self._improve(exchangeable)

    def _start(self) -> None:
        """Drafts the fixed offers that fit together."""
        self.extra = []
        for place in sorted(self.fixed):
            if self.draft.admits(place):
                self.draft.add(place)
            else:
                self.extra.append(place)

    def _improve(self, published: Collection[FleetPlace]) -> None:
        for _ in range(len(published) + EXTRA_EXCHANGES):
            self._fill(published)
            self._prune()
            if not self._exchange():
                return

    def _may_be_suboptimal(self) -> bool:
        """Whether a new selection may be better although no single exchange is.

        Several places share a clique, and one of them is clearly worse than the best candidate.
        """
        fleet, drafted = self.draft.fleet, self.draft.places
        candidates = fleet.candidates.get(self.draft.kind, NO_CANDIDATES)
        if not candidates.ordered:
            return False
        best = candidates.ordered[0]
        drafted_in = Counter(place.clique for place in drafted)
        shared = (place for place in drafted if drafted_in[place.clique] > 1)
        return any(fleet.terms(place).growth - best.ranked.terms.growth > self.stickiness for place in shared)

    def _start_anew(self) -> bool:
        """Replaces the draft by one that starts from the fixed offers, if that gains enough; returns whether it did."""
        draft = OfferDraft(self.draft.fleet, self.draft.kind, self.draft.avoided)
        fresh = OfferSelection(draft, self.needs, self.fixed, self.stickiness)
        fresh._start()
        fresh._fill(())
        gain, offers = self.draft.growth - fresh.draft.growth, len(self.draft.places)
        if len(fresh.draft.places) != offers or gain <= self.stickiness * offers + ROUNDING:
            return False
        self.draft = fresh.draft
        return True

    def _fill(self, published: Iterable[FleetPlace]) -> None:
        """Serves each need, from published offers while they fit."""
        for need in self.needs:
            missing = need.count - self.draft.count(need.eligible)
            candidates = [place for place in published if self.draft.fleet.within(place, need.eligible)]
            while missing > 0:
                place = self._next(candidates, missing)
                if place is None:
                    best = self.draft.best(need.eligible)
                    if best is None:
                        break
                    place = best.place
                self.draft.add(place)
                missing -= 1 if self.draft.is_exclusive else self.draft.fleet.claims(place)

    def _next(self, candidates: list[FleetPlace], missing: int) -> FleetPlace | None:
        """The best of ``candidates`` that fits; any of them if all are needed."""
        candidates[:] = [place for place in candidates if self.draft.admits(place)]
        if len(candidates) <= missing:
            return candidates[0] if candidates else None
        return min(candidates, key=lambda place: (self.draft.rank(place), place))

    def _prune(self) -> None:
        """Removes offers that no need requires, the worst first."""
        if self.draft.count(None) <= self.needs[-1].count:
            return
        terms = self.draft.fleet.terms
        for place in sorted(self.draft.places - self.fixed, key=lambda place: (terms(place), place), reverse=True):
            if not self._needs_requiring(place):
                self.draft.remove(place)

    def _exchange(self) -> bool:
        """Makes the exchange that gains most, if there is one worth it."""
        exchanges = []
        for place in sorted(self.draft.places - self.fixed):
            narrow = [need.eligible for need in self._needs_requiring(place) if need.eligible is not None]
            eligible = frozenset.intersection(*narrow) if narrow else None
            terms, best = self.draft.instead_of(place, eligible)
            if best is not None:
                better = best.ranked.terms
                gain = math.inf if terms.ends_shares > better.ends_shares else terms.growth - better.growth
                exchanges.append(Exchange(gain, place, best.place))
        exchange = max(exchanges, default=None)
        if exchange is None or exchange.gain <= self.stickiness + ROUNDING:
            return False
        self.draft.remove(exchange.old)
        self.draft.add(exchange.new)
        return True

    def _needs_requiring(self, place: FleetPlace) -> list[Need]:
        """The needs that would have fewer offers than they ask for without ``place``."""
        fleet, count = self.draft.fleet, self.draft.count
        claims = 1 if self.draft.is_exclusive else fleet.claims(place)
        needs = (need for need in self.needs if fleet.within(place, need.eligible))
        return [need for need in needs if count(need.eligible) - claims < need.count]


def needs_of(
    fleet: RankedFleet, kind: OfferKind, demands: Sequence[Demand], published: Collection[FleetPlace], default: Need
) -> list[Need]:
    """The needs that follow from ``demands`` for ``kind``, the narrowest first; the last one is for the whole fleet.

    The need of a set of GPUs includes those of its subsets. ``published`` are the places of present offers,
    ``default``: the offers of the kind to make even without demand.
    """
    if not demands and default.eligible is None:
        return [default]
    asked = [Need(demand.eligible, demand.count) for demand in demands if not demand.together]
    unmet: set[Demand] = set()  # equal demands can't be met either: what is asked of a group only grows
    for demand in demands:
        if demand.together and demand not in unmet:
            group = _group(fleet, kind, demand, asked, published)
            if group is None:
                unmet.add(demand)
            else:
                asked.append(Need(group, demand.count))
    sets = {need.eligible for need in (*asked, default) if need.eligible is not None}
    counts = {eligible: _within(asked, eligible) for eligible in sets}
    if default.eligible is not None:
        counts[default.eligible] = max(counts[default.eligible], default.count)
    needs = [Need(eligible, count) for eligible, count in counts.items()]
    needs.sort(key=lambda need: (len(need.eligible or ()), sorted(need.eligible or ())))
    return [*needs, Need(None, max(default.count, sum(need.count for need in asked)))]


def _within(asked: Iterable[Need], eligible: frozenset[str]) -> int:
    return sum(need.count for need in asked if need.eligible is not None and need.eligible <= eligible)


def _group(
    fleet: RankedFleet, kind: OfferKind, demand: Demand, asked: Sequence[Need], published: Collection[FleetPlace]
) -> frozenset[str] | None:
    """The set of GPUs to serve a demand for devices together: one that already serves it, or the cheapest.

    The next decision may choose another set, because offers published for other demands made it cheaper. Offers of a
    kind in demand stay, so the choices settle, one demand after the other, while fleet and demands stay the same.
    """
    scored = []
    for group in demand.together:
        eligible = group if demand.eligible is None else group & demand.eligible
        # Most groups of a claim that nothing satisfies have too few places, and a draft of each would take long.
        is_exclusive = kind.type is not DeviceKind.SHARED_PARTITION
        if is_exclusive and sum(1 for _ in fleet.places(kind, eligible)) < demand.count:
            continue
        price = _price(OfferDraft(fleet, kind), eligible, _within(asked, eligible) + demand.count, published)
        if price is not None:
            scored.append((price, sorted(eligible), eligible))
    return min(scored)[-1] if scored else None


def _price(
    draft: OfferDraft, eligible: frozenset[str], count: int, published: Collection[FleetPlace]
) -> tuple[int, bool, float] | None:
    """The price of ``count`` devices on ``eligible``; None if they don't fit.

    How many of them are full GPUs that could be offered as shares, whether published offers are missing, and the growth
    of fragmentation.
    """
    published_count = sum(1 for place in published if draft.fleet.within(place, eligible))
    growth, shared = 0.0, 0
    while draft.count(eligible) < count:
        best = draft.best(eligible)
        if best is None:
            return None
        growth += best.ranked.terms.growth
        shared += best.ranked.terms.ends_shares
        draft.add(best.place)
    return shared, published_count < count, round(growth, 6)


def overlapping_smaller_places(
    fleet: RankedFleet, offered: set[FleetPlace], asked: AskedKinds, published: Collection[FleetPlace]
) -> set[FleetPlace]:
    """For each of ``offered`` a smaller place that overlaps it, if some claim or template accepts both kinds.

    A claim that accepts both kinds gets the smaller device, which comes first in the slice. While the smaller device is
    held, shared counters exclude the larger one. Of several such places one of ``published`` is preferred. The smallest
    of ``offered`` come first: what overlaps them mostly overlaps the others, too.
    """
    sizes, overlapping = fleet.sizes, set[FleetPlace]()
    for place in sorted(offered, key=lambda place: (sizes[place.spot.kind], place)):
        for choice in asked.choices:
            if place.spot.kind in choice:
                memory_bytes = sizes[place.spot.kind].memory_bytes
                smaller = (kind for kind in choice if sizes[kind].memory_bytes < memory_bytes)
                gpu = fleet.cliques[place.clique].gpus[place.position]
                spots = _overlapping(gpu, place.spot, sorted(smaller, key=sizes.__getitem__))
                places = [FleetPlace(place.clique, place.position, spot) for spot in spots]
                if places and offered.isdisjoint(places) and overlapping.isdisjoint(places):
                    overlapping.add(next((smaller for smaller in places if smaller in published), places[0]))
    return overlapping


def _overlapping(gpu: RankedGpu, larger: Spot, kinds: Iterable[OfferKind]) -> list[Spot]:
    """The free spots that exclude ``larger``, of the first of ``kinds`` that has some; the best first."""
    for kind in kinds:
        places = gpu.places(kind)
        excluding = [spot for spot in places if larger not in gpu.after(spot).places(larger.kind)]
        if excluding:
            return sorted(excluding, key=places.__getitem__)
    return []
