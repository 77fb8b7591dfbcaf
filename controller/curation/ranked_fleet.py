"""The fleet as ranked cliques: the place of each offer and the best place of each clique (pure)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from controller.cluster.fleet import Fleet, FleetGpu
from controller.demand.demand import Eligible
from driver.model.offer import Offer, OfferKind, Spot
from driver.placement.ranking import Ranked, RankedClique, Ranking, Terms

MAX_SETS = 64
"""Sets of GPUs of which the positions are remembered; the same sets are needed again and again."""


class Place(NamedTuple):
    """A spot on a GPU of the fleet, by clique and by position of the GPU in its clique."""

    clique: int
    position: int
    spot: Spot


class Candidate(NamedTuple):
    """The best place of one clique, in the order of preference."""

    ranked: Ranked
    clique: int

    @property
    def place(self) -> Place:
        return Place(self.clique, self.ranked.position, self.ranked.spot)


class Candidates:
    """The best place of each clique that has one, also in order; few change at a time."""

    def __init__(self, by_clique: dict[int, Candidate], ordered: list[Candidate]) -> None:
        self.by_clique = by_clique
        self.ordered = ordered

    def changed(self, new: Mapping[int, Candidate | None]) -> Candidates:
        by_clique, ordered = dict(self.by_clique), list(self.ordered)
        for at, candidate in new.items():
            before = by_clique.pop(at, None)
            if before is not None:
                del ordered[bisect_left(ordered, before)]
            if candidate is not None:
                by_clique[at] = candidate
                insort(ordered, candidate)
        return Candidates(by_clique, ordered)


NO_CANDIDATES = Candidates({}, [])


class RankedFleet:
    """One state of the fleet.

    Rankings of unchanged cliques are taken over from ``before``, an earlier state, so that a change on one GPU costs
    the ranking of one clique.
    """

    def __init__(self, fleet: Fleet, ranking: Ranking, before: RankedFleet | None = None) -> None:
        self.hardware = fleet.hardware
        self.groups = list(fleet.cliques.values())
        same = before if before is not None and before.hardware is self.hardware else None
        changed = range(len(self.groups)) if same is None else _changed(same.groups, self.groups)
        self.cliques: list[RankedClique] = [] if same is None else list(same.cliques)
        for at in changed:
            self.cliques[at : at + 1] = [ranking.clique(tuple(ranking.gpu(entry.state) for entry in self.groups[at]))]
        self.found: Mapping[str, tuple[int, int]] = (
            same.found
            if same
            else {entry.gpu.uuid: (at, i) for at, group in enumerate(self.groups) for i, entry in enumerate(group)}
        )
        """Clique and position of every GPU; the same as long as the hardware is."""
        self.known_positions: dict[frozenset[str], Mapping[int, list[int]]] = same.known_positions if same else {}
        self.keys = sorted(frozenset[OfferKind]().union(*{clique.offered for clique in self.cliques}), key=str)
        self.candidates = {key: self._candidates(key, same, changed) for key in self.keys}
        """By key, the best place of each clique that has one."""

    def uuid(self, place: Place) -> str:
        return self.groups[place.clique][place.position].gpu.uuid

    def within(self, place: Place, eligible: Eligible) -> bool:
        return eligible is None or self.uuid(place) in eligible

    def terms(self, place: Place) -> Terms:
        """The terms of ``place`` in the present fleet."""
        return self.cliques[place.clique].rank(place.position, place.spot)

    def offer(self, place: Place) -> Offer:
        return Offer(self.uuid(place), place.spot)

    def place(self, offer: Offer) -> Place | None:
        """The place of ``offer``; None if its GPU is gone or it is impossible beside allocated devices."""
        if offer.gpu not in self.found:
            return None
        clique, position = self.found[offer.gpu]
        spot = offer.spot
        return Place(clique, position, spot) if self.cliques[clique].admits(position, spot) else None

    def positions(self, eligible: Eligible) -> Mapping[int, list[int]]:
        """The GPUs of ``eligible`` in the fleet, by clique."""
        if eligible is None:
            return {at: list(range(len(group))) for at, group in enumerate(self.groups)}
        if eligible not in self.known_positions:
            if len(self.known_positions) >= MAX_SETS:
                self.known_positions.clear()
            found: dict[int, list[int]] = defaultdict(list)
            for clique, position in sorted(self.found[uuid] for uuid in eligible if uuid in self.found):
                found[clique].append(position)
            self.known_positions[eligible] = found
        return self.known_positions[eligible]

    def places(self, key: OfferKind, eligible: Eligible) -> Iterator[Place]:
        """Every possible place of ``key`` on the GPUs of ``eligible``."""
        for clique, positions in self.positions(eligible).items():
            for position in positions:
                for spot in self.cliques[clique].gpus[position].places(key):
                    yield Place(clique, position, spot)

    def _candidates(self, key: OfferKind, before: RankedFleet | None, changed: Collection[int]) -> Candidates:
        known = before.candidates.get(key) if before is not None else None
        places = changed if known is not None else range(len(self.cliques))
        found = ((at, self.cliques[at].best(key)) for at in places)
        candidates = {at: None if best is None else Candidate(best, at) for at, best in found}
        if known is not None:
            return known.changed(candidates)
        there = {at: candidate for at, candidate in candidates.items() if candidate is not None}
        return Candidates(there, sorted(there.values()))


def _changed(before: Sequence[tuple[FleetGpu, ...]], after: Sequence[tuple[FleetGpu, ...]]) -> list[int]:
    """The positions of the cliques that changed."""
    pairs = enumerate(zip(before, after, strict=True))
    return [at for at, (was, now) in pairs if was is not now and was != now]
