"""The cluster's cliques while offers of one key are chosen: each chosen one counts as taken (pure)."""

from __future__ import annotations

from collections.abc import Mapping

from controller.floor import Floor, Head, Place
from controller.offers import Eligible
from driver.placement import Key, RankedClique, Terms


class Board:
    """Which places of ``key`` are seated, and which is the best of those that are left.

    ``growth``: by how many memory slices fragmentation grows if all that is seated is held.
    """

    def __init__(self, floor: Floor, key: Key) -> None:
        self.floor = floor
        self.key = key
        self.seated: set[Place] = set()
        self.growth = 0.0
        self._cliques = list(floor.cliques)
        self._heads: dict[Eligible, dict[int, Head]] = {None: dict(floor.heads.get(key, {}))}
        self._stale: dict[Eligible, set[int]] = {None: set()}
        self._eligible: dict[Eligible, Mapping[int, list[int]]] = {}

    def admits(self, place: Place) -> bool:
        return self._cliques[place.clique].admits(place.position, place.spot)

    def rank(self, place: Place) -> Terms:
        """The terms of ``place``, which must be free, beside all that is seated."""
        return self._cliques[place.clique].rank(place.position, place.spot)

    def seat(self, place: Place) -> None:
        self.seated.add(place)
        self.growth += self._cliques[place.clique].growth(place.position, place.spot)
        self._change(place.clique, self._cliques[place.clique].after(place.position, place.spot))

    def unseat(self, place: Place) -> None:
        self._change(place.clique, self._without(place))
        self.seated.remove(place)
        self.growth -= self._cliques[place.clique].growth(place.position, place.spot)

    def count(self, eligible: Eligible) -> int:
        """How many are seated on the GPUs of ``eligible``."""
        if eligible is None:
            return len(self.seated)
        return sum(1 for place in self.seated if self.floor.uuid(place) in eligible)

    def best(self, eligible: Eligible) -> Head | None:
        """The best place that is left on the GPUs of ``eligible``."""
        return min(self._heads_of(eligible).values(), default=None)

    def instead_of(self, place: Place, eligible: Eligible) -> tuple[Terms, Head | None]:
        """The terms of ``place`` beside the others that are seated, and the best on ``eligible`` if it weren't."""
        clique = self._without(place)
        heads = [head for at, head in self._heads_of(eligible, but=place.clique).items() if at != place.clique]
        own = self._head(place.clique, clique, eligible)
        best = min([*heads, own] if own else heads, default=None)
        return clique.rank(place.position, place.spot), best

    def _without(self, place: Place) -> RankedClique:
        """The clique of ``place`` as if that weren't seated."""
        gpu = self.floor.cliques[place.clique].gpus[place.position]
        for other in sorted(self.seated):
            if other[:2] == place[:2] and other != place:
                gpu = gpu.after(other.spot)
        return self._cliques[place.clique].with_gpu(place.position, gpu)

    def _change(self, at: int, clique: RankedClique) -> None:
        self._cliques[at] = clique
        for stale in self._stale.values():
            stale.add(at)

    def _heads_of(self, eligible: Eligible, but: int | None = None) -> dict[int, Head]:
        """The best place of each clique; that of the clique ``but`` may be out of date."""
        if eligible not in self._heads:
            self._eligible[eligible] = self.floor.positions(eligible)
            self._heads[eligible], self._stale[eligible] = {}, set(self._eligible[eligible])
        heads, stale = self._heads[eligible], self._stale[eligible]
        for at in stale - {but}:
            stale.remove(at)
            head = self._head(at, self._cliques[at], eligible)
            if head is not None:
                heads[at] = head
            else:
                heads.pop(at, None)
        return heads

    def _head(self, at: int, clique: RankedClique, eligible: Eligible) -> Head | None:
        if eligible is None:
            found = clique.best(self.key)
        else:
            found = clique.best_among(self.key, self._eligible[eligible].get(at, ()))
        return None if found is None else Head(found, at)
