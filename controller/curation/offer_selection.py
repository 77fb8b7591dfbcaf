"""Choosing the offers of one key (pure).

The selection is stable while nothing changes: it serves every need and has no offer that no need requires; neither
the exchange of one offer nor, on average, a new selection gains more than the stickiness.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from controller.curation.offer_draft import OfferDraft
from controller.curation.ranked_fleet import NO_CANDIDATES, Place, RankedFleet
from controller.demand.demand import Demand, Eligible
from driver.placement import Key, Terms

ROUNDING = 1e-6
"""Smaller gains, in memory slices, are ignored."""

EXTRA_EXCHANGES = 8
"""The limit of exchanges beyond the number of published offers, far above any that was observed."""


@dataclass(frozen=True)
class Need:
    """At least ``count`` offers on the GPUs of ``eligible``."""

    eligible: Eligible
    count: int


class Exchange(NamedTuple):
    """``old`` for ``new``, which grows fragmentation by ``gain`` memory slices less; the terms beside the others.

    Infinite: ``old`` is a full GPU that is divided into shares, ``new`` is not.
    """

    gain: float
    old: Place
    new: Place
    terms: Terms
    better: Terms


@dataclass
class OfferSelection:
    """Selects the offers of one key. ``extra`` are fixed offers that don't fit beside the others."""

    draft: OfferDraft
    needs: Sequence[Need]
    fixed: frozenset[Place]
    stickiness: float
    extra: list[Place] = field(default_factory=list)
    exchanged: list[Exchange] = field(default_factory=list)

    @property
    def places(self) -> set[Place]:
        """The selected offers."""
        return self.draft.places | set(self.extra)

    def choose(self, published: Collection[Place]) -> None:
        """Drafts the offers; keeps those of ``published`` that still serve a need."""
        standing = sorted(set(published) - self.fixed)
        self._start(self.draft)
        self._improve(standing)
        if self._may_be_suboptimal() and self._start_anew():
            self._improve(standing)

    def _start(self, draft: OfferDraft) -> None:
        """Drafts the fixed offers that fit beside each other."""
        self.extra = []
        for place in sorted(self.fixed):
            if draft.admits(place):
                draft.add(place)
            else:
                self.extra.append(place)

    def _improve(self, standing: Collection[Place]) -> None:
        for _ in range(len(standing) + EXTRA_EXCHANGES):
            self._fill(standing)
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
        beside = Counter(place.clique for place in drafted)
        shared = (place for place in drafted if beside[place.clique] > 1)
        return any(fleet.terms(place).growth - best.ranked.terms.growth > self.stickiness for place in shared)

    def _start_anew(self) -> bool:
        """Takes the selection made without published offers, if that gains enough."""
        fresh = OfferSelection(OfferDraft(self.draft.fleet, self.draft.key), self.needs, self.fixed, self.stickiness)
        fresh._start(fresh.draft)
        fresh._fill(())
        gain, offers = self.draft.growth - fresh.draft.growth, len(self.draft.places)
        if len(fresh.draft.places) != offers or gain <= self.stickiness * offers + ROUNDING:
            return False
        terms = self.draft.fleet.terms
        old, new = self.draft.places - fresh.draft.places, fresh.draft.places - self.draft.places
        for before, after in zip(sorted(old), sorted(new), strict=True):
            self.exchanged.append(Exchange(gain / len(old), before, after, terms(before), terms(after)))
        self.draft = fresh.draft
        return True

    def _fill(self, standing: Iterable[Place]) -> None:
        """Serves each need, from published offers as long as they fit."""
        for need in self.needs:
            missing = need.count - self.draft.count(need.eligible)
            candidates = [place for place in standing if self.draft.fleet.within(place, need.eligible)]
            while missing > 0:
                place = self._next(candidates, missing) or self._new(need)
                if place is None:
                    break
                self.draft.add(place)
                missing -= 1

    def _next(self, candidates: list[Place], missing: int) -> Place | None:
        """The best of ``candidates`` that fits; any of them if all are needed."""
        candidates[:] = [place for place in candidates if self.draft.admits(place)]
        if len(candidates) <= missing:
            return candidates[0] if candidates else None
        return min(candidates, key=lambda place: (self.draft.rank(place), place))

    def _new(self, need: Need) -> Place | None:
        best = self.draft.best(need.eligible)
        return None if best is None else best.place

    def _prune(self) -> None:
        """Removes offers that no need requires, the worst first."""
        if self.draft.count(None) <= self.needs[-1].count:
            return
        for place in sorted(self.draft.places - self.fixed, key=lambda p: (self.draft.fleet.terms(p), p), reverse=True):
            if not self._tight(place):
                self.draft.remove(place)

    def _exchange(self) -> bool:
        """Makes the exchange that gains most, if there is one worth it."""
        found = [self._best_exchange(place) for place in sorted(self.draft.places - self.fixed)]
        best = max((exchange for exchange in found if exchange is not None), default=None)
        if best is None:
            return False
        self.draft.remove(best.old)
        self.draft.add(best.new)
        self.exchanged.append(best)
        return True

    def _best_exchange(self, place: Place) -> Exchange | None:
        """The best place for ``place`` that serves the same needs, if it gains more than the stickiness."""
        eligible = _intersection(need.eligible for need in self._tight(place))
        terms, best = self.draft.instead_of(place, eligible)
        if best is None:
            return None
        better = best.ranked.terms
        gain = math.inf if terms.ends_shares > better.ends_shares else terms.growth - better.growth
        return Exchange(gain, place, best.place, terms, better) if gain > self.stickiness + ROUNDING else None

    def _tight(self, place: Place) -> list[Need]:
        """The needs that can't do without ``place``."""
        within, count = self.draft.fleet.within, self.draft.count
        return [need for need in self.needs if within(place, need.eligible) and count(need.eligible) <= need.count]


def _intersection(sets: Iterable[Eligible]) -> Eligible:
    narrow = [eligible for eligible in sets if eligible is not None]
    return frozenset.intersection(*narrow) if narrow else None


def needs_of(
    fleet: RankedFleet, key: Key, demands: Sequence[Demand], standing: Collection[Place], at_least: int
) -> list[Need]:
    """The needs that follow from ``demands`` for ``key``, the narrowest first; the last one is for the whole fleet.

    The need of a set of GPUs includes those of its subsets. ``standing`` are the places of published offers,
    ``at_least`` is the number of offers without demand.
    """
    if not demands:
        return [Need(None, at_least)]
    asked = [Need(demand.eligible, demand.count) for demand in demands if not demand.together]
    for demand in demands:
        if demand.together and (group := _group(fleet, key, demand, asked, standing)) is not None:
            asked.append(Need(group, demand.count))
    sets = {need.eligible for need in asked if need.eligible is not None}
    needs = [Need(eligible, _within(asked, eligible)) for eligible in sets]
    needs.sort(key=lambda need: (len(need.eligible or ()), sorted(need.eligible or ())))
    return [*needs, Need(None, max(at_least, sum(need.count for need in asked)))]


def _within(asked: Iterable[Need], eligible: frozenset[str]) -> int:
    return sum(need.count for need in asked if need.eligible is not None and need.eligible <= eligible)


def _group(
    fleet: RankedFleet, key: Key, demand: Demand, asked: Sequence[Need], standing: Collection[Place]
) -> frozenset[str] | None:
    """The set of GPUs to serve a demand for devices together: one that already serves it, or the cheapest.

    The next selection may move to a set that other offers made cheaper; prices only fall, so this ends.
    """
    scored = []
    for group in demand.together:
        eligible = group if demand.eligible is None else group & demand.eligible
        price = _price(OfferDraft(fleet, key), eligible, _within(asked, eligible) + demand.count, standing)
        if price is not None:
            scored.append((price, sorted(eligible), eligible))
    return min(scored)[-1] if scored else None


def _price(
    draft: OfferDraft, eligible: frozenset[str], count: int, standing: Collection[Place]
) -> tuple[int, bool, float] | None:
    """The price of ``count`` devices on ``eligible``; None if they don't fit.

    The number of full GPUs that are divided into shares, whether offers are missing, and the growth of
    fragmentation.
    """
    stand = sum(1 for place in standing if draft.fleet.within(place, eligible))
    growth, shared = 0.0, 0
    while draft.count(eligible) < count:
        best = draft.best(eligible)
        if best is None:
            return None
        growth += best.ranked.terms.growth
        shared += best.ranked.terms.ends_shares
        draft.add(best.place)
    return shared, stand < count, round(growth, 6)
