"""The cluster's cliques while offers of one key are chosen: each chosen one counts as taken (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice

from controller.floor import NO_HEADS, Floor, Head, Heads, Place
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
        self._base: dict[Eligible, Heads] = {None: floor.heads.get(key, NO_HEADS)}
        self._changed: set[int] = set()
        """Cliques that are not as on the floor."""
        self._heads: dict[Eligible, dict[int, Head | None]] = defaultdict(dict)
        """Theirs, as far as they were asked for."""

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
        return min(self._candidates(eligible), default=None)

    def instead_of(self, place: Place, eligible: Eligible) -> tuple[Terms, Head | None]:
        """The terms of ``place`` beside the others that are seated, and the best on ``eligible`` if it weren't."""
        clique = self._without(place)
        heads = [head for head in self._candidates(eligible, but=place.clique) if head.clique != place.clique]
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
        self._changed.add(at)
        for heads in self._heads.values():
            heads.pop(at, None)

    def _candidates(self, eligible: Eligible, but: int | None = None) -> Iterator[Head]:
        """The heads of the cliques that have changed, and the best of the others; that of ``but`` may be left out."""
        passed = self._changed | {but}
        unchanged = (head for head in self._heads_of(eligible).ordered if head.clique not in passed)
        yield from islice(unchanged, 1)
        known = self._heads[eligible]
        for at in self._changed - {but}:
            if at not in known:
                known[at] = self._head(at, self._cliques[at], eligible)
            if (head := known[at]) is not None:
                yield head

    def _heads_of(self, eligible: Eligible) -> Heads:
        """The best place of each clique on the floor."""
        if eligible not in self._base:
            found = (self._head(at, self.floor.cliques[at], eligible) for at in self.floor.positions(eligible))
            heads = [head for head in found if head is not None]
            self._base[eligible] = Heads({head.clique: head for head in heads}, sorted(heads))
        return self._base[eligible]

    def _head(self, at: int, clique: RankedClique, eligible: Eligible) -> Head | None:
        if eligible is None:
            found = clique.best(self.key)
        else:
            found = clique.best_among(self.key, self.floor.positions(eligible).get(at, ()))
        return None if found is None else Head(found, at)
