"""Choosing the offers of one key (pure).

The choice is such that it stays when nothing changed: it serves every need, holds no offer that no need asks for, no
exchange of one offer gains more than the stickiness, nor on average does choosing all of them anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from controller.board import Board
from controller.floor import NO_HEADS, Place
from controller.needs import Need
from controller.offers import Eligible
from driver.placement import Terms

ROUNDING = 1e-6
"""A gain of less, in memory slices, is none."""

MOST_EXCHANGES = 8
"""So many more exchanges than offers stand: far more than were ever seen, an end all the same."""


class Exchange(NamedTuple):
    """``old`` for ``new``, which grows fragmentation by ``gain`` memory slices less; the terms beside the others."""

    gain: float
    old: Place
    new: Place
    terms: Terms
    better: Terms


@dataclass
class Selection:
    """The offers of one key in the making. ``extra`` are fixed ones that don't fit beside the others."""

    board: Board
    needs: Sequence[Need]
    fixed: frozenset[Place]
    stickiness: float
    extra: list[Place] = field(default_factory=list)
    exchanged: list[Exchange] = field(default_factory=list)

    @property
    def places(self) -> set[Place]:
        """What shall be offered."""
        return self.board.seated | set(self.extra)

    def choose(self, published: Collection[Place]) -> None:
        """Seats what shall be offered, of ``published`` what still serves."""
        standing = sorted(set(published) - self.fixed)
        self._start(self.board)
        self._improve(standing)
        if self._doubtful() and self._start_anew():
            self._improve(standing)

    def _start(self, board: Board) -> None:
        """Seats what is fixed, as far as it fits side by side."""
        self.extra = []
        for place in sorted(self.fixed):
            if board.admits(place):
                board.seat(place)
            else:
                self.extra.append(place)

    def _improve(self, standing: Collection[Place]) -> None:
        for _ in range(len(standing) + MOST_EXCHANGES):
            self._fill(standing)
            self._prune()
            if not self._exchange():
                return

    def _doubtful(self) -> bool:
        """Whether places that share a clique might each be as good as any beside the other, and together a bad choice.

        They are not if each of them alone is about as good as the best there is.
        """
        floor, seated = self.board.floor, self.board.seated
        heads = floor.heads.get(self.board.key, NO_HEADS)
        if not heads.ordered:
            return False
        best = heads.ordered[0]
        beside = Counter(place.clique for place in seated)
        shared = (place for place in seated if beside[place.clique] > 1)
        return any(floor.terms(place).growth - best.ranked.terms.growth > self.stickiness for place in shared)

    def _start_anew(self) -> bool:
        """Takes what would be chosen if nothing were published, if that gains enough."""
        fresh = Selection(Board(self.board.floor, self.board.key), self.needs, self.fixed, self.stickiness)
        fresh._start(fresh.board)
        fresh._fill(())
        gain, offers = self.board.growth - fresh.board.growth, len(self.board.seated)
        if len(fresh.board.seated) != offers or gain <= self.stickiness * offers + ROUNDING:
            return False
        terms = self.board.floor.terms
        old, new = self.board.seated - fresh.board.seated, fresh.board.seated - self.board.seated
        for before, after in zip(sorted(old), sorted(new), strict=True):
            self.exchanged.append(Exchange(gain / len(old), before, after, terms(before), terms(after)))
        self.board = fresh.board
        return True

    def _fill(self, standing: Iterable[Place]) -> None:
        """Serves each need, from what stands as long as that fits."""
        for need in self.needs:
            missing = need.count - self.board.count(need.eligible)
            candidates = [place for place in standing if self.board.floor.within(place, need.eligible)]
            while missing > 0:
                place = self._next(candidates, missing) or self._new(need)
                if place is None:
                    break
                self.board.seat(place)
                missing -= 1

    def _next(self, candidates: list[Place], missing: int) -> Place | None:
        """The best of ``candidates`` that fits; any, where all are needed."""
        candidates[:] = [place for place in candidates if self.board.admits(place)]
        if len(candidates) <= missing:
            return candidates[0] if candidates else None
        return min(candidates, key=lambda place: (self.board.rank(place), place))

    def _new(self, need: Need) -> Place | None:
        best = self.board.best(need.eligible)
        return None if best is None else best.place

    def _prune(self) -> None:
        """Takes away what no need asks for, the worst first."""
        if self.board.count(None) <= self.needs[-1].count:
            return
        for place in sorted(self.board.seated - self.fixed, key=lambda p: (self.board.floor.terms(p), p), reverse=True):
            if not self._tight(place):
                self.board.unseat(place)

    def _exchange(self) -> bool:
        """Makes the exchange that gains most, if there is one worth it."""
        found = [self._best_exchange(place) for place in sorted(self.board.seated - self.fixed)]
        best = max((exchange for exchange in found if exchange is not None), default=None)
        if best is None:
            return False
        self.board.unseat(best.old)
        self.board.seat(best.new)
        self.exchanged.append(best)
        return True

    def _best_exchange(self, place: Place) -> Exchange | None:
        """The best place for ``place`` that serves the same needs, if it gains more than the stickiness."""
        eligible = _intersection(need.eligible for need in self._tight(place))
        terms, best = self.board.instead_of(place, eligible)
        gain = terms.growth - best.ranked.terms.growth if best is not None else 0.0
        if best is None or gain <= self.stickiness + ROUNDING:
            return None
        return Exchange(gain, place, best.place, terms, best.ranked.terms)

    def _tight(self, place: Place) -> list[Need]:
        """The needs that would lack ``place``."""
        within, count = self.board.floor.within, self.board.count
        return [need for need in self.needs if within(place, need.eligible) and count(need.eligible) <= need.count]


def _intersection(sets: Iterable[Eligible]) -> Eligible:
    narrow = [eligible for eligible in sets if eligible is not None]
    return frozenset.intersection(*narrow) if narrow else None
