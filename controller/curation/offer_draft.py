"""Places that are drafted as offers, together with the best places that are left for one kind (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from itertools import chain, islice

from controller.curation.ranked_fleet import NO_CANDIDATES, CliqueCandidate, CliqueCandidates, FleetPlace, RankedFleet
from controller.demand.demand import Eligible
from driver.model.offer import DeviceKind, OfferKind
from driver.placement.occupancy import GpuState
from driver.placement.ranking import RankedClique, Terms

STICKINESS = 0.5
"""An offer replaces a published one only if its growth of fragmentation is less by more than this, in memory slices."""


class OfferDraft:
    """The drafted places, of any kind, and the best of the places that are left for ``kind``.

    ``growth``: memory slices by which fragmentation grows if all drafted places are allocated. ``avoided``: places
    that no drafted one may overlap; of those that overlap each other, the first ones. ``is_exclusive``: one claim gets
    a place of ``kind``, not several as of a shared partition.
    """

    def __init__(self, fleet: RankedFleet, kind: OfferKind, avoided: Collection[FleetPlace] = ()) -> None:
        self.fleet = fleet
        self.kind = kind
        self.places: set[FleetPlace] = set()
        self.growth = 0.0
        self.is_exclusive = kind.type is not DeviceKind.SHARED_PARTITION
        self._cliques = list(fleet.cliques)
        self._base: dict[Eligible, CliqueCandidates] = {None: fleet.candidates.get(kind, NO_CANDIDATES)}
        """The best place of each clique on the fleet."""
        self._changed: set[int] = set()
        """Cliques that differ from the fleet."""
        self._of_changed: dict[Eligible, dict[int, CliqueCandidate | None]] = defaultdict(dict)
        """The candidates of changed cliques, computed on demand."""
        self.avoided: list[FleetPlace] = []
        for place in avoided:
            if self.admits(place):
                self.avoided.append(place)
                self._change(place.clique, self._cliques[place.clique].after(place.position, place.spot))

    def admits(self, place: FleetPlace) -> bool:
        return self._cliques[place.clique].admits(place.position, place.spot)

    def state(self, clique: int, position: int) -> GpuState:
        return self._cliques[clique].gpus[position].state

    def rank(self, place: FleetPlace) -> Terms:
        """The terms of ``place``, which must be free, together with all drafted places."""
        return self._cliques[place.clique].rank(place.position, place.spot)

    def add(self, place: FleetPlace) -> None:
        self.places.add(place)
        self.growth += self._cliques[place.clique].rank(place.position, place.spot).growth
        self._change(place.clique, self._cliques[place.clique].after(place.position, place.spot))

    def remove(self, place: FleetPlace) -> None:
        self._change(place.clique, self._without(place))
        self.places.remove(place)
        self.growth -= self._cliques[place.clique].rank(place.position, place.spot).growth

    def count(self, eligible: Eligible) -> int:
        """The number of claims that can get the drafted places."""
        places = [place for place in self.places if eligible is None or self.fleet.uuid(place) in eligible]
        return len(places) if self.is_exclusive else sum(map(self.fleet.claims, places))

    def best(self, eligible: Eligible) -> CliqueCandidate | None:
        return min(self._candidates(eligible), default=None)

    def instead_of(self, place: FleetPlace, eligible: Eligible) -> tuple[Terms, CliqueCandidate | None]:
        """The terms of ``place`` with the other drafted places, and the best candidate on ``eligible`` without it."""
        clique = self._without(place)
        others = self._candidates(eligible, but=place.clique)
        same_clique = self._candidate(place.clique, clique, eligible)
        candidates = [*others] if same_clique is None else [*others, same_clique]
        return clique.rank(place.position, place.spot), min(candidates, default=None)

    def _without(self, place: FleetPlace) -> RankedClique:
        gpu = self.fleet.cliques[place.clique].gpus[place.position]
        others = (other for other in chain(self.places, self.avoided) if other[:2] == place[:2] and other != place)
        for other in sorted(others):
            gpu = gpu.after(other.spot)
        return self._cliques[place.clique].with_gpu(place.position, gpu)

    def _change(self, number: int, clique: RankedClique) -> None:
        self._cliques[number] = clique
        self._changed.add(number)
        for candidates in self._of_changed.values():
            candidates.pop(number, None)

    def _candidates(self, eligible: Eligible, but: int | None = None) -> Iterator[CliqueCandidate]:
        """The candidates of changed cliques and the best of the others, without those of clique ``but``."""
        if eligible not in self._base:
            cliques = self.fleet.positions(eligible)
            candidates = {number: self._candidate(number, self.fleet.cliques[number], eligible) for number in cliques}
            self._base[eligible] = NO_CANDIDATES.changed(candidates)
        excluded, ordered = self._changed | {but}, self._base[eligible].ordered
        unchanged = (candidate for candidate in ordered if candidate.clique not in excluded)
        yield from islice(unchanged, 1)
        of_changed = self._of_changed[eligible]
        for number in self._changed - {but}:
            if number not in of_changed:
                of_changed[number] = self._candidate(number, self._cliques[number], eligible)
            candidate = of_changed[number]
            if candidate is not None:
                yield candidate

    def _candidate(self, number: int, clique: RankedClique, eligible: Eligible) -> CliqueCandidate | None:
        if eligible is None:
            best = clique.best(self.kind)
        else:
            best = clique.best_among(self.kind, self.fleet.positions(eligible).get(number, ()))
        return None if best is None else CliqueCandidate(best, number)
