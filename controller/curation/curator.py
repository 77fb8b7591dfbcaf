"""The offers of the cluster: placements that cause the least fragmentation, enough for the pending claims (pure).

The scheduler picks a node and its first device that fits; it only chooses well if nothing else is offered.

The choice is stable while nothing changes: it serves every need and has no offer that no need requires; neither the
exchange of one offer nor, on average, a new selection gains more than the stickiness.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from controller.cluster.fleet import Fleet
from controller.curation.ranked_fleet import NO_CANDIDATES, CliqueCandidate, CliqueCandidates, FleetSpot, RankedFleet
from controller.demand.demand import Demand, Eligible
from driver.model.offer import Offer, OfferKind
from driver.placement.occupancy import GpuState
from driver.placement.ranking import RankedClique, Ranking, Terms

ROUNDING = 1e-6
"""Smaller gains, in memory slices, are ignored."""

EXTRA_EXCHANGES = 8
"""The limit of exchanges beyond the number of published offers, far above any that was observed."""


class Curator:
    """Chooses the offers of a fleet. The result depends on the arguments only; remembered rankings save time.

    ``offers``: the number of offers of each key without pending claims. ``stickiness``: an offer is exchanged for one
    whose growth of fragmentation is less by more than this, in memory slices; all of a key, if that gains as much on
    average.
    """

    def __init__(self, ranking: Ranking | None = None, offers: int = 2, stickiness: float = 0.5) -> None:
        self.ranking = ranking or Ranking()
        self.offers = offers
        self.stickiness = stickiness
        self._ranked: RankedFleet | None = None

    def curate(
        self,
        fleet: Fleet,
        demands: Iterable[Demand] = (),
        published: Collection[Offer] = (),
        protected: Collection[Offer] = (),
    ) -> tuple[Offer, ...]:
        """The offers of every key that ``fleet`` has, in a fixed order.

        ``published`` are the present offers, ``protected`` those among them that the scheduler may just have given to
        a pending claim: they stay while they are possible. Demand for keys that the fleet lacks is ignored.
        """
        ranked = self._ranked
        if ranked is None or ranked.fleet is not fleet:
            ranked = self._ranked = RankedFleet(fleet, self.ranking, ranked)
        by_key: defaultdict[OfferKind, list[Demand]] = defaultdict(list)
        for demand in demands:
            by_key[demand.key].append(demand)
        located = {offer: ranked.place(offer) for offer in published}
        places = {offer: place for offer, place in located.items() if place is not None}
        keep = {places[offer] for offer in protected if offer in places}
        chosen: set[FleetSpot] = set()
        for key in ranked.keys:
            of_key = {place for place in places.values() if place.spot.kind == key}
            whole = [demand.eligible for demand in by_key[key] if demand.everything]
            fixed = (of_key & keep).union(*(ranked.places(key, eligible) for eligible in whole))
            needs = needs_of(ranked, key, by_key[key], of_key, self.offers)
            selection = OfferSelection(OfferDraft(ranked, key), needs, frozenset(fixed), self.stickiness)
            selection.choose(of_key)
            chosen |= selection.places
        return tuple(ranked.offer(place) for place in sorted(chosen))


class OfferDraft:
    """The drafted places of ``key``, and the best of the places that are left.

    ``growth``: memory slices by which fragmentation grows if all drafted places are allocated.
    """

    def __init__(self, fleet: RankedFleet, key: OfferKind) -> None:
        self.fleet = fleet
        self.key = key
        self.places: set[FleetSpot] = set()
        self.growth = 0.0
        self._cliques = list(fleet.cliques)
        self._base: dict[Eligible, CliqueCandidates] = {None: fleet.candidates.get(key, NO_CANDIDATES)}
        """The best place of each clique on the fleet."""
        self._changed: set[int] = set()
        """Cliques that differ from the fleet."""
        self._of_changed: dict[Eligible, dict[int, CliqueCandidate | None]] = defaultdict(dict)
        """The candidates of changed cliques, computed on demand."""

    def admits(self, place: FleetSpot) -> bool:
        return self._cliques[place.clique].admits(place.position, place.spot)

    def state(self, clique: int, position: int) -> GpuState:
        return self._cliques[clique].gpus[position].state

    def rank(self, place: FleetSpot) -> Terms:
        """The terms of ``place``, which must be free, together with all drafted places."""
        return self._cliques[place.clique].rank(place.position, place.spot)

    def add(self, place: FleetSpot) -> None:
        self.places.add(place)
        self.growth += self._cliques[place.clique].growth(place.position, place.spot)
        self._change(place.clique, self._cliques[place.clique].after(place.position, place.spot))

    def remove(self, place: FleetSpot) -> None:
        self._change(place.clique, self._without(place))
        self.places.remove(place)
        self.growth -= self._cliques[place.clique].growth(place.position, place.spot)

    def count(self, eligible: Eligible) -> int:
        if eligible is None:
            return len(self.places)
        return sum(1 for place in self.places if self.fleet.uuid(place) in eligible)

    def best(self, eligible: Eligible) -> CliqueCandidate | None:
        return min(self._candidates(eligible), default=None)

    def instead_of(self, place: FleetSpot, eligible: Eligible) -> tuple[Terms, CliqueCandidate | None]:
        """The terms of ``place`` with the other drafted places, and the best candidate on ``eligible`` without it."""
        clique = self._without(place)
        others = self._candidates(eligible, but=place.clique)
        candidates = [candidate for candidate in others if candidate.clique != place.clique]
        same_clique = self._candidate(place.clique, clique, eligible)
        if same_clique is not None:
            candidates.append(same_clique)
        return clique.rank(place.position, place.spot), min(candidates, default=None)

    def _without(self, place: FleetSpot) -> RankedClique:
        gpu = self.fleet.cliques[place.clique].gpus[place.position]
        for other in sorted(self.places):
            if other[:2] == place[:2] and other != place:
                gpu = gpu.after(other.spot)
        return self._cliques[place.clique].with_gpu(place.position, gpu)

    def _change(self, at: int, clique: RankedClique) -> None:
        self._cliques[at] = clique
        self._changed.add(at)
        for candidates in self._of_changed.values():
            candidates.pop(at, None)

    def _candidates(self, eligible: Eligible, but: int | None = None) -> Iterator[CliqueCandidate]:
        """The candidates of changed cliques and the best of the others; may leave out that of ``but``."""
        if eligible not in self._base:
            cliques = self.fleet.positions(eligible)
            candidates = {at: self._candidate(at, self.fleet.cliques[at], eligible) for at in cliques}
            self._base[eligible] = NO_CANDIDATES.changed(candidates)
        excluded, ordered = self._changed | {but}, self._base[eligible].ordered
        unchanged = (candidate for candidate in ordered if candidate.clique not in excluded)
        yield from islice(unchanged, 1)
        of_changed = self._of_changed[eligible]
        for at in self._changed - {but}:
            if at not in of_changed:
                of_changed[at] = self._candidate(at, self._cliques[at], eligible)
            candidate = of_changed[at]
            if candidate is not None:
                yield candidate

    def _candidate(self, at: int, clique: RankedClique, eligible: Eligible) -> CliqueCandidate | None:
        if eligible is None:
            best = clique.best(self.key)
        else:
            best = clique.best_among(self.key, self.fleet.positions(eligible).get(at, ()))
        return None if best is None else CliqueCandidate(best, at)


@dataclass(frozen=True)
class Need:
    """At least ``count`` offers on the GPUs of ``eligible``."""

    eligible: Eligible
    count: int


class Exchange(NamedTuple):
    """``old`` for ``new``, which grows fragmentation by ``gain`` memory slices less.

    Infinite: ``old`` is a full GPU that is divided into shares, ``new`` is not.
    """

    gain: float
    old: FleetSpot
    new: FleetSpot


@dataclass
class OfferSelection:
    """Selects the offers of one key. ``extra`` are fixed offers that don't fit together with the others."""

    draft: OfferDraft
    needs: Sequence[Need]
    fixed: frozenset[FleetSpot]
    stickiness: float
    extra: list[FleetSpot] = field(default_factory=list)

    @property
    def places(self) -> set[FleetSpot]:
        return self.draft.places | set(self.extra)

    def choose(self, published: Collection[FleetSpot]) -> None:
        """Drafts the offers; keeps those of ``published`` that still serve a need."""
        exchangeable = sorted(set(published) - self.fixed)
        self._start(self.draft)
        self._improve(exchangeable)
        if self._may_be_suboptimal() and self._start_anew():
            self._improve(exchangeable)

    def _start(self, draft: OfferDraft) -> None:
        """Drafts the fixed offers that fit together."""
        self.extra = []
        for place in sorted(self.fixed):
            if draft.admits(place):
                draft.add(place)
            else:
                self.extra.append(place)

    def _improve(self, published: Collection[FleetSpot]) -> None:
        for _ in range(len(published) + EXTRA_EXCHANGES):
            self._fill(published)
            self._prune()
            if not self._exchange():
                return

    def _may_be_suboptimal(self) -> bool:
        """Whether places in one clique might be a bad choice together, although no exchange of one of them helps.

        They are not if each of them alone is about as good as the best candidate.
        """
        fleet, drafted = self.draft.fleet, self.draft.places
        candidates = fleet.candidates.get(self.draft.key, NO_CANDIDATES)
        if not candidates.ordered:
            return False
        best = candidates.ordered[0]
        drafted_in = Counter(place.clique for place in drafted)
        shared = (place for place in drafted if drafted_in[place.clique] > 1)
        return any(fleet.terms(place).growth - best.ranked.terms.growth > self.stickiness for place in shared)

    def _start_anew(self) -> bool:
        """Takes the selection made without published offers, if that gains enough."""
        fresh = OfferSelection(OfferDraft(self.draft.fleet, self.draft.key), self.needs, self.fixed, self.stickiness)
        fresh._start(fresh.draft)
        fresh._fill(())
        gain, offers = self.draft.growth - fresh.draft.growth, len(self.draft.places)
        if len(fresh.draft.places) != offers or gain <= self.stickiness * offers + ROUNDING:
            return False
        self.draft = fresh.draft
        return True

    def _fill(self, published: Iterable[FleetSpot]) -> None:
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
                missing -= 1

    def _next(self, candidates: list[FleetSpot], missing: int) -> FleetSpot | None:
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
            if not self._tight(place):
                self.draft.remove(place)

    def _exchange(self) -> bool:
        """Makes the exchange that gains most, if there is one worth it."""
        exchanges = []
        for place in sorted(self.draft.places - self.fixed):
            narrow = [need.eligible for need in self._tight(place) if need.eligible is not None]
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

    def _tight(self, place: FleetSpot) -> list[Need]:
        """The needs that can't do without ``place``."""
        within, count = self.draft.fleet.within, self.draft.count
        return [need for need in self.needs if within(place, need.eligible) and count(need.eligible) <= need.count]


def needs_of(
    fleet: RankedFleet, key: OfferKind, demands: Sequence[Demand], published: Collection[FleetSpot], at_least: int
) -> list[Need]:
    """The needs that follow from ``demands`` for ``key``, the narrowest first; the last one is for the whole fleet.

    The need of a set of GPUs includes those of its subsets. ``published`` are the places of present offers,
    ``at_least`` is the number of offers without demand.
    """
    if not demands:
        return [Need(None, at_least)]
    asked = [Need(demand.eligible, demand.count) for demand in demands if not demand.together]
    unmet: set[Demand] = set()  # equal demands can't be met either: what is asked of a group only grows
    for demand in demands:
        if demand.together and demand not in unmet:
            group = _group(fleet, key, demand, asked, published)
            if group is None:
                unmet.add(demand)
            else:
                asked.append(Need(group, demand.count))
    sets = {need.eligible for need in asked if need.eligible is not None}
    needs = [Need(eligible, _within(asked, eligible)) for eligible in sets]
    needs.sort(key=lambda need: (len(need.eligible or ()), sorted(need.eligible or ())))
    return [*needs, Need(None, max(at_least, sum(need.count for need in asked)))]


def _within(asked: Iterable[Need], eligible: frozenset[str]) -> int:
    return sum(need.count for need in asked if need.eligible is not None and need.eligible <= eligible)


def _group(
    fleet: RankedFleet, key: OfferKind, demand: Demand, asked: Sequence[Need], published: Collection[FleetSpot]
) -> frozenset[str] | None:
    """The set of GPUs to serve a demand for devices together: one that already serves it, or the cheapest.

    The next selection may move to a set that other offers made cheaper; prices only fall, so this ends.
    """
    scored = []
    for group in demand.together:
        eligible = group if demand.eligible is None else group & demand.eligible
        price = _price(OfferDraft(fleet, key), eligible, _within(asked, eligible) + demand.count, published)
        if price is not None:
            scored.append((price, sorted(eligible), eligible))
    return min(scored)[-1] if scored else None


def _price(
    draft: OfferDraft, eligible: frozenset[str], count: int, published: Collection[FleetSpot]
) -> tuple[int, bool, float] | None:
    """The price of ``count`` devices on ``eligible``; None if they don't fit.

    The number of full GPUs that are divided into shares, whether offers are missing, and the growth of
    fragmentation.
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
