"""The fleet as ranked cliques: where every offer lies, and the best place of each clique (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from controller.fleet import Fleet, FleetGpu
from controller.offers import Eligible
from driver.model.device import DeviceKind
from driver.model.plan import Offer
from driver.placement import Key, Ranked, RankedClique, RankedGpu, Ranking, Spot, Terms


class Place(NamedTuple):
    """A spot on a GPU of the fleet: which clique, which GPU of it, where."""

    clique: int
    position: int
    spot: Spot


class Head(NamedTuple):
    """The best place of one clique, in the order of preference."""

    ranked: Ranked
    clique: int

    @property
    def place(self) -> Place:
        return Place(self.clique, self.ranked.position, self.ranked.spot)


class Floor:
    """One state of the fleet.

    ``before`` is an earlier one: what was found for cliques that are the same holds on, so that a change on one GPU
    costs the ranking of one clique.
    """

    def __init__(self, fleet: Fleet, ranking: Ranking, before: Floor | None = None) -> None:
        self.groups = list(fleet.cliques.values())
        self._same = _same(before.groups, self.groups) if before else ()
        self.cliques = [self._clique(at, ranking, before) for at in range(len(self.groups))]
        self._found = {e.gpu.uuid: (at, i) for at, group in enumerate(self.groups) for i, e in enumerate(group)}
        self.keys = sorted(frozenset[Key]().union(*(gpu.offered for gpu in self._gpus())), key=str)
        self.heads = {key: self._heads(key, before) for key in self.keys}
        """By key, the best place of each clique that has one."""

    def uuid(self, place: Place) -> str:
        return self.groups[place.clique][place.position].gpu.uuid

    def within(self, place: Place, eligible: Eligible) -> bool:
        return eligible is None or self.uuid(place) in eligible

    def terms(self, place: Place) -> Terms:
        """The terms of ``place`` as the fleet stands."""
        return self.cliques[place.clique].rank(place.position, place.spot)

    def offer(self, place: Place) -> Offer:
        (kind, profile), at = place.spot
        start = at if kind is DeviceKind.PARTITION else None
        return Offer(self.uuid(place), kind, profile, start, at if kind is DeviceKind.SHARE else None)

    def place(self, offer: Offer) -> Place | None:
        """Where ``offer`` lies; None if its GPU is gone or it is not possible beside what is held."""
        if offer.gpu not in self._found:
            return None
        clique, position = self._found[offer.gpu]
        spot = Spot(Key(offer.type, offer.profile), offer.start or offer.index or 0)
        return Place(clique, position, spot) if self.cliques[clique].admits(position, spot) else None

    def positions(self, eligible: Eligible) -> Mapping[int, list[int]]:
        """The GPUs of ``eligible`` that are there, by clique."""
        wanted = self._found.keys() if eligible is None else eligible & self._found.keys()
        found: dict[int, list[int]] = defaultdict(list)
        for clique, position in sorted(self._found[uuid] for uuid in wanted):
            found[clique].append(position)
        return found

    def places(self, key: Key, eligible: Eligible) -> Iterator[Place]:
        """Every possible place of ``key`` on the GPUs of ``eligible``."""
        for clique, positions in self.positions(eligible).items():
            for position in positions:
                for spot in self.cliques[clique].gpus[position].places(key):
                    yield Place(clique, position, spot)

    def _gpus(self) -> set[RankedGpu]:
        return {gpu for clique in self.cliques for gpu in clique.gpus}

    def _clique(self, at: int, ranking: Ranking, before: Floor | None) -> RankedClique:
        if before is not None and at in self._same:
            return before.cliques[at]
        return ranking.clique(tuple(ranking.gpu(entry.state) for entry in self.groups[at]))

    def _heads(self, key: Key, before: Floor | None) -> dict[int, Head]:
        known = before.heads.get(key) if before is not None else None
        heads = {} if known is None else {at: head for at, head in known.items() if at in self._same}
        for at in range(len(self.cliques)):
            if (known is None or at not in self._same) and (best := self.cliques[at].best(key)) is not None:
                heads[at] = Head(best, at)
        return heads


def _same(before: Sequence[tuple[FleetGpu, ...]], after: Sequence[tuple[FleetGpu, ...]]) -> Collection[int]:
    """The places at which the same clique stands in both."""
    return {at for at, (was, now) in enumerate(zip(before, after, strict=False)) if was == now}
