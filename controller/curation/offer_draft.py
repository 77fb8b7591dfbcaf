"""A draft of the offers of one key: the cliques of the fleet as if all drafted places were allocated (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice

from controller.curation.ranked_fleet import NO_CANDIDATES, Candidate, Candidates, Place, RankedFleet
from controller.demand.demand import Eligible
from driver.placement import Key, RankedClique, Terms


class OfferDraft:
    """The drafted places of ``key``, and the best of the places that are left.

    ``growth``: memory slices by which fragmentation grows if all drafted places are allocated.
    """

    def __init__(self, fleet: RankedFleet, key: Key) -> None:
        self.fleet = fleet
        self.key = key
        self.places: set[Place] = set()
        self.growth = 0.0
        self._cliques = list(fleet.cliques)
        self._base: dict[Eligible, Candidates] = {None: fleet.candidates.get(key, NO_CANDIDATES)}
        self._changed: set[int] = set()
        """Cliques that differ from the fleet."""
        self._known: dict[Eligible, dict[int, Candidate | None]] = defaultdict(dict)
        """The candidates of changed cliques, computed on demand."""

    def admits(self, place: Place) -> bool:
        return self._cliques[place.clique].admits(place.position, place.spot)

    def rank(self, place: Place) -> Terms:
        """The terms of ``place``, which must be free, beside all drafted places."""
        return self._cliques[place.clique].rank(place.position, place.spot)

    def add(self, place: Place) -> None:
        self.places.add(place)
        self.growth += self._cliques[place.clique].growth(place.position, place.spot)
        self._change(place.clique, self._cliques[place.clique].after(place.position, place.spot))

    def remove(self, place: Place) -> None:
        self._change(place.clique, self._without(place))
        self.places.remove(place)
        self.growth -= self._cliques[place.clique].growth(place.position, place.spot)

    def count(self, eligible: Eligible) -> int:
        """The number of drafted places on the GPUs of ``eligible``."""
        if eligible is None:
            return len(self.places)
        return sum(1 for place in self.places if self.fleet.uuid(place) in eligible)

    def best(self, eligible: Eligible) -> Candidate | None:
        """The best place that is left on the GPUs of ``eligible``."""
        return min(self._candidates(eligible), default=None)

    def instead_of(self, place: Place, eligible: Eligible) -> tuple[Terms, Candidate | None]:
        """The terms of ``place`` beside the other drafted places, and the best candidate on ``eligible`` without it."""
        clique = self._without(place)
        candidates = [each for each in self._candidates(eligible, but=place.clique) if each.clique != place.clique]
        own = self._candidate(place.clique, clique, eligible)
        best = min([*candidates, own] if own else candidates, default=None)
        return clique.rank(place.position, place.spot), best

    def _without(self, place: Place) -> RankedClique:
        """The clique of ``place`` without that place."""
        gpu = self.fleet.cliques[place.clique].gpus[place.position]
        for other in sorted(self.places):
            if other[:2] == place[:2] and other != place:
                gpu = gpu.after(other.spot)
        return self._cliques[place.clique].with_gpu(place.position, gpu)

    def _change(self, at: int, clique: RankedClique) -> None:
        self._cliques[at] = clique
        self._changed.add(at)
        for candidates in self._known.values():
            candidates.pop(at, None)

    def _candidates(self, eligible: Eligible, but: int | None = None) -> Iterator[Candidate]:
        """The candidates of changed cliques and the best of the others; may leave out that of ``but``."""
        excluded = self._changed | {but}
        unchanged = (each for each in self._candidates_of(eligible).ordered if each.clique not in excluded)
        yield from islice(unchanged, 1)
        known = self._known[eligible]
        for at in self._changed - {but}:
            if at not in known:
                known[at] = self._candidate(at, self._cliques[at], eligible)
            if (candidate := known[at]) is not None:
                yield candidate

    def _candidates_of(self, eligible: Eligible) -> Candidates:
        """The best place of each clique on the fleet."""
        if eligible not in self._base:
            found = (self._candidate(at, self.fleet.cliques[at], eligible) for at in self.fleet.positions(eligible))
            candidates = [candidate for candidate in found if candidate is not None]
            self._base[eligible] = Candidates({each.clique: each for each in candidates}, sorted(candidates))
        return self._base[eligible]

    def _candidate(self, at: int, clique: RankedClique, eligible: Eligible) -> Candidate | None:
        if eligible is None:
            found = clique.best(self.key)
        else:
            found = clique.best_among(self.key, self.fleet.positions(eligible).get(at, ()))
        return None if found is None else Candidate(found, at)
