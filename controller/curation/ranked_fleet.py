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


class FleetSpot(NamedTuple):
    """A spot on a GPU of the fleet, by clique and by position of the GPU in its clique."""

    clique: int
    position: int
    spot: Spot


class CliqueCandidate(NamedTuple):
    """The best place of one clique, in the order of preference."""

    ranked: Ranked
    clique: int

    @property
    def place(self) -> FleetSpot:
        return FleetSpot(self.clique, self.ranked.position, self.ranked.spot)


class CliqueCandidates(NamedTuple):
    """The best place of each clique that has one, also in order; few change at a time."""

    by_clique: dict[int, CliqueCandidate]
    ordered: list[CliqueCandidate]

    def changed(self, new: Mapping[int, CliqueCandidate | None]) -> CliqueCandidates:
        by_clique, ordered = dict(self.by_clique), list(self.ordered)
        for at, candidate in new.items():
            before = by_clique.pop(at, None)
            if before is not None:
                del ordered[bisect_left(ordered, before)]
            if candidate is not None:
                by_clique[at] = candidate
                insort(ordered, candidate)
        return CliqueCandidates(by_clique, ordered)


NO_CANDIDATES = CliqueCandidates({}, [])


class RankedFleet:
    """One state of ``fleet``.

    Rankings of unchanged cliques are taken over from ``before``, an earlier state, so that a change on one GPU costs
    the ranking of one clique.
    """

    def __init__(self, fleet: Fleet, ranking: Ranking, before: RankedFleet | None = None) -> None:
        self.fleet, self.hardware = fleet, fleet.hardware
        self.groups = list(fleet.cliques.values())
        same = before if before is not None and before.hardware is self.hardware else None
        changed = range(len(self.groups)) if same is None else _changed(same.groups, self.groups)
        self.cliques: list[RankedClique] = [] if same is None else list(same.cliques)
        for at in changed:
            self.cliques[at : at + 1] = [ranking.clique(tuple(ranking.gpu(gpu.state) for gpu in self.groups[at]))]
        positions = ((gpu, (at, place)) for at, group in enumerate(self.groups) for place, gpu in enumerate(group))
        self.position_of: Mapping[str, tuple[int, int]] = (
            {gpu.gpu.uuid: position for gpu, position in positions} if same is None else same.position_of
        )
        """Clique and position of every GPU; the same while the hardware is."""
        self.of_sets: dict[frozenset[str], Mapping[int, list[int]]] = {} if same is None else same.of_sets
        """The positions of sets of GPUs, as ``positions`` returns them."""
        self.keys = sorted(frozenset[OfferKind]().union(*{clique.offered for clique in self.cliques}), key=str)
        self.candidates = {key: self._candidates(key, same, changed) for key in self.keys}
        """By key, the best place of each clique that has one."""

    def uuid(self, place: FleetSpot) -> str:
        return self.groups[place.clique][place.position].gpu.uuid

    def within(self, place: FleetSpot, eligible: Eligible) -> bool:
        return eligible is None or self.uuid(place) in eligible

    def terms(self, place: FleetSpot) -> Terms:
        return self.cliques[place.clique].rank(place.position, place.spot)

    def offer(self, place: FleetSpot) -> Offer:
        return Offer(self.uuid(place), place.spot)

    def place(self, offer: Offer) -> FleetSpot | None:
        """The place of ``offer``; None if its GPU is gone or it is impossible next to allocated devices."""
        if offer.gpu not in self.position_of:
            return None
        clique, position = self.position_of[offer.gpu]
        spot = offer.spot
        return FleetSpot(clique, position, spot) if self.cliques[clique].admits(position, spot) else None

    def positions(self, eligible: Eligible) -> Mapping[int, list[int]]:
        if eligible is None:
            return {at: list(range(len(group))) for at, group in enumerate(self.groups)}
        if eligible not in self.of_sets:
            if len(self.of_sets) >= MAX_SETS:
                self.of_sets.clear()
            by_clique: dict[int, list[int]] = defaultdict(list)
            for clique, position in sorted(self.position_of[uuid] for uuid in eligible if uuid in self.position_of):
                by_clique[clique].append(position)
            self.of_sets[eligible] = by_clique
        return self.of_sets[eligible]

    def places(self, key: OfferKind, eligible: Eligible) -> Iterator[FleetSpot]:
        for clique, positions in self.positions(eligible).items():
            for position in positions:
                for spot in self.cliques[clique].gpus[position].places(key):
                    yield FleetSpot(clique, position, spot)

    def _candidates(self, key: OfferKind, before: RankedFleet | None, changed: Collection[int]) -> CliqueCandidates:
        candidates = before.candidates.get(key) if before is not None else None
        if candidates is None:
            candidates, changed = NO_CANDIDATES, range(len(self.cliques))
        best_of = {at: self.cliques[at].best(key) for at in changed}
        return candidates.changed(
            {at: None if best is None else CliqueCandidate(best, at) for at, best in best_of.items()}
        )


def _changed(before: Sequence[tuple[FleetGpu, ...]], after: Sequence[tuple[FleetGpu, ...]]) -> list[int]:
    pairs = enumerate(zip(before, after, strict=True))
    return [at for at, (was, now) in pairs if was is not now and was != now]
