"""What the cluster offers: of everything possible, the placements that hurt least, and enough for who waits (pure).

The scheduler takes a node and there the first device that fits; it can only choose well if nothing else is offered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from controller.board import Board
from controller.fleet import Fleet
from controller.floor import Floor, Place
from controller.needs import needs_of
from controller.offers import Curation, CurationSettings, Demand, TakenBack
from controller.selection import Selection
from driver.model.plan import Offer
from driver.placement import Key, Ranking, Terms


class Curator:
    """Chooses the offers of a fleet. The result follows from the arguments; what is remembered saves time only."""

    def __init__(self, ranking: Ranking | None = None, settings: CurationSettings | None = None) -> None:
        self.ranking = ranking or Ranking()
        self.settings = settings or CurationSettings()
        self._floor: Floor | None = None

    def curate(
        self,
        fleet: Fleet,
        demands: Iterable[Demand] = (),
        published: Collection[Offer] = (),
        protected: Collection[Offer] = (),
    ) -> Curation:
        """The offers of every key that ``fleet`` has.

        ``published`` are those that stand now, ``protected`` the ones among them that a waiting claim may just have
        been given: they stay as long as they are possible. Demand for a key that the fleet doesn't have is ignored.
        """
        floor = self._floor = Floor(fleet, self.ranking, self._floor)
        waiting: defaultdict[Key, list[Demand]] = defaultdict(list)
        for demand in demands:
            waiting[demand.key].append(demand)
        standing = {offer: place for offer in published if (place := floor.place(offer)) is not None}
        keep = {standing[offer] for offer in protected if offer in standing}
        offers: dict[Place, Terms] = {}
        better: dict[Place, Terms] = {}
        for key in floor.keys:
            places = {place for place in standing.values() if place.spot.key == key}
            selection = self._select(floor, key, waiting[key], places, keep)
            offers |= {place: floor.terms(place) for place in selection.places}
            better |= {exchange.old: exchange.better for exchange in selection.exchanged}
        taken = [TakenBack(offer, "gone") for offer in published if offer not in standing]
        for offer, place in standing.items():
            if place in better and place not in offers:
                taken.append(TakenBack(offer, "worse", floor.terms(place), better[place]))
            elif place not in offers:
                taken.append(TakenBack(offer, "surplus", floor.terms(place)))
        ordered = {floor.offer(place): offers[place] for place in sorted(offers)}
        return Curation(ordered, tuple(sorted(taken, key=lambda entry: str(entry.offer))))

    def _select(
        self, floor: Floor, key: Key, demands: list[Demand], standing: set[Place], keep: set[Place]
    ) -> Selection:
        fixed = standing & keep
        for demand in demands:
            if demand.everything:
                fixed |= set(floor.places(key, demand.eligible))
        needs = needs_of(floor, key, demands, standing, self.settings.offers)
        selection = Selection(Board(floor, key), needs, frozenset(fixed), self.settings.stickiness)
        selection.choose(standing)
        return selection
