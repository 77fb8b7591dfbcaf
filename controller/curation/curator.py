"""The offers of the cluster: placements that cause the least fragmentation, enough for the pending claims (pure).

The scheduler picks a node and its first device that fits; it only chooses well if nothing else is offered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from controller.cluster.fleet import Fleet
from controller.curation.offer_draft import OfferDraft
from controller.curation.offer_selection import OfferSelection, needs_of
from controller.curation.ranked_fleet import Place, RankedFleet
from controller.demand.demand import Demand
from driver.model.plan import Offer
from driver.placement import Key, Ranking, Terms


@dataclass(frozen=True)
class CurationSettings:
    """The number of offers, and how readily they are exchanged.

    ``offers``: the number of offers of each key without pending claims. ``stickiness``: an offer is exchanged for one
    whose growth of fragmentation is less by more than this, in memory slices; all of a key, if that gains as much on
    average.
    """

    offers: int = 2
    stickiness: float = 0.5


@dataclass(frozen=True)
class TakenBack:
    """A published offer to withdraw.

    ``gone``: it is allocated, or impossible beside allocated devices. ``worse``: ``better`` takes its
    place. ``surplus``: fewer are needed. ``terms`` are the offer's own.
    """

    offer: Offer
    reason: Literal["gone", "worse", "surplus"]
    terms: Terms | None = None
    better: Terms | None = None


@dataclass(frozen=True)
class Curation:
    """The offers, with the terms of each in the present fleet, and the withdrawn ones. Both are sorted."""

    offers: Mapping[Offer, Terms]
    taken_back: tuple[TakenBack, ...] = ()


class Curator:
    """Chooses the offers of a fleet. The result depends on the arguments only; remembered rankings save time."""

    def __init__(self, ranking: Ranking | None = None, settings: CurationSettings | None = None) -> None:
        self.ranking = ranking or Ranking()
        self.settings = settings or CurationSettings()
        self._ranked: RankedFleet | None = None

    def curate(
        self,
        fleet: Fleet,
        demands: Iterable[Demand] = (),
        published: Collection[Offer] = (),
        protected: Collection[Offer] = (),
    ) -> Curation:
        """The offers of every key that ``fleet`` has.

        ``published`` are the present offers, ``protected`` those among them that the scheduler may just have given to
        a pending claim: they stay as long as they are possible. Demand for keys that the fleet lacks is ignored.
        """
        ranked = self._ranked = RankedFleet(fleet, self.ranking, self._ranked)
        by_key: defaultdict[Key, list[Demand]] = defaultdict(list)
        for demand in demands:
            by_key[demand.key].append(demand)
        standing = {offer: place for offer in published if (place := ranked.place(offer)) is not None}
        keep = {standing[offer] for offer in protected if offer in standing}
        offers: dict[Place, Terms] = {}
        better: dict[Place, Terms] = {}
        for key in ranked.keys:
            places = {place for place in standing.values() if place.spot.key == key}
            selection = self._select(ranked, key, by_key[key], places, keep)
            offers |= {place: ranked.terms(place) for place in selection.places}
            better |= {exchange.old: exchange.better for exchange in selection.exchanged}
        taken = [TakenBack(offer, "gone") for offer in published if offer not in standing]
        for offer, place in standing.items():
            if place in better and place not in offers:
                taken.append(TakenBack(offer, "worse", ranked.terms(place), better[place]))
            elif place not in offers:
                taken.append(TakenBack(offer, "surplus", ranked.terms(place)))
        ordered = {ranked.offer(place): offers[place] for place in sorted(offers)}
        return Curation(ordered, tuple(sorted(taken, key=lambda entry: str(entry.offer))))

    def _select(
        self, fleet: RankedFleet, key: Key, demands: list[Demand], standing: set[Place], keep: set[Place]
    ) -> OfferSelection:
        fixed = standing & keep
        for demand in demands:
            if demand.everything:
                fixed |= set(fleet.places(key, demand.eligible))
        needs = needs_of(fleet, key, demands, standing, self.settings.offers)
        selection = OfferSelection(OfferDraft(fleet, key), needs, frozenset(fixed), self.settings.stickiness)
        selection.choose(standing)
        return selection
