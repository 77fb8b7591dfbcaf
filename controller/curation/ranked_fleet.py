"""The fleet as ranked cliques: the place of each offer and the best place of each clique (pure)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from controller.cluster.fleet import Fleet, FleetGpu
from controller.cluster.kind_sizes import KindSize, ProfileSizes, sizes_of
from controller.demand.demand import Eligible
from controller.demand.requirements import AskedKinds
from driver.model.offer import DeviceKind, Offer, OfferKind, Spot
from driver.placement.ranking import Ranked, RankedClique, Ranking, Terms

MAX_SETS = 64
"""Sets of GPUs of which the positions are remembered; the same sets are needed again and again."""


class FleetPlace(NamedTuple):
    """A spot on a GPU of the fleet, by clique and by position of the GPU in its clique."""

    clique: int
    position: int
    spot: Spot


class CliqueCandidate(NamedTuple):
    """The best place of one clique. The preferred candidate sorts first."""

    ranked: Ranked
    clique: int

    @property
    def place(self) -> FleetPlace:
        return FleetPlace(self.clique, self.ranked.position, self.ranked.spot)


class CliqueCandidates(NamedTuple):
    """The best place of each clique that has one: by clique, and all in the order of preference."""

    by_clique: dict[int, CliqueCandidate]
    ordered: list[CliqueCandidate]

    def changed(self, new: Mapping[int, CliqueCandidate | None]) -> CliqueCandidates:
        by_clique, ordered = dict(self.by_clique), list(self.ordered)
        for clique, candidate in new.items():
            before = by_clique.pop(clique, None)
            if before is not None:
                del ordered[bisect_left(ordered, before)]
            if candidate is not None:
                by_clique[clique] = candidate
                insort(ordered, candidate)
        return CliqueCandidates(by_clique, ordered)


NO_CANDIDATES = CliqueCandidates({}, [])


class RankedFleet:
    """The cliques of ``fleet``, ranked.

    Rankings of unchanged cliques are taken over from ``before``, an earlier state, so that a change on one GPU costs
    the ranking of one clique.
    """

    def __init__(self, fleet: Fleet, ranking: Ranking, before: RankedFleet | None = None) -> None:
        self.fleet = fleet
        self.gpus_by_clique = list(fleet.cliques.values())
        same = before if before is not None and before.fleet.hardware is fleet.hardware else None
        every = range(len(self.gpus_by_clique))
        changed = every if same is None else _changed(same.gpus_by_clique, self.gpus_by_clique)
        self.cliques: list[RankedClique] = [] if same is None else list(same.cliques)
        for clique in changed:
            ranked = ranking.clique(tuple(ranking.gpu(gpu.state) for gpu in self.gpus_by_clique[clique]))
            self.cliques[clique : clique + 1] = [ranked]  # appended if there is no earlier state, otherwise replaced
        self.position_of: dict[str, tuple[int, int]] = {} if same is None else same.position_of
        """Clique and position of every GPU; unchanged while the hardware is."""
        for clique, group in enumerate(self.gpus_by_clique) if same is None else ():
            self.position_of |= {gpu.gpu.uuid: (clique, position) for position, gpu in enumerate(group)}
        self.of_sets: dict[frozenset[str], Mapping[int, list[int]]] = {} if same is None else same.of_sets
        """The positions of sets of GPUs, as ``positions`` returns them."""
        self.kinds = sorted(frozenset[OfferKind]().union(*{clique.offered for clique in self.cliques}), key=str)
        self.sizes: Mapping[OfferKind, KindSize] = same.sizes if same is not None else sizes_of(fleet)
        self.profiles: ProfileSizes = same.profiles if same is not None else ProfileSizes.of(fleet)
        self.candidates = {kind: self._candidates(kind, same, changed) for kind in self.kinds}
        """By kind, the best place of each clique that has one."""

    def default_kinds(self, asked: AskedKinds) -> dict[OfferKind, Eligible]:
        """The kinds that are offered without pending claims, and the GPUs that offer them (None: all).

        These are full GPUs, shares, the smallest profile of each product, and larger profiles in ``asked``. Profiles as
        large as the GPU are excluded: a claim that matches several profiles takes the first that is offered. Shared
        devices are chosen in another way (``controller.curation.shared_offers``).
        """
        kinds, profiles = frozenset(self.kinds), self.profiles
        partitions = {**profiles.smallest, **dict.fromkeys(asked.kinds)}
        default = {kind: gpus for kind, gpus in partitions.items() if kind in kinds - profiles.whole}
        others = (kind for kind in kinds if kind.type not in {DeviceKind.PARTITION, DeviceKind.SHARED})
        return default | dict.fromkeys(others)

    def uuid(self, place: FleetPlace) -> str:
        return self.gpus_by_clique[place.clique][place.position].gpu.uuid

    def within(self, place: FleetPlace, eligible: Eligible) -> bool:
        return eligible is None or self.uuid(place) in eligible

    def claims(self, place: FleetPlace) -> int:
        """How many claims can get the device of ``place``: several, if it is a shared partition."""
        held = self.cliques[place.clique].gpus[place.position].state.left_of(place.spot)
        return held or place.spot.kind.instances

    @cached_property
    def open_places(self) -> set[FleetPlace]:
        """The held shared partitions that have room. They are always offered, for they are published anyway."""
        is_possible = any(kind.type is DeviceKind.SHARED_PARTITION for kind in self.kinds)
        sharing = (gpu for gpu in self.fleet if gpu.state.claims) if is_possible else ()
        return {FleetPlace(*self.position_of[gpu.gpu.uuid], spot) for gpu in sharing for spot in gpu.state.open_spots}

    def terms(self, place: FleetPlace) -> Terms:
        return self.cliques[place.clique].rank(place.position, place.spot)

    def offer(self, place: FleetPlace) -> Offer:
        return Offer(self.uuid(place), place.spot)

    def place(self, offer: Offer) -> FleetPlace | None:
        """The place of ``offer``; None if its GPU is gone or may not offer it now (held devices, fault, mode, use)."""
        if offer.gpu not in self.position_of:
            return None
        clique, position = self.position_of[offer.gpu]
        spot = offer.spot
        return FleetPlace(clique, position, spot) if self.cliques[clique].admits(position, spot) else None

    def positions(self, eligible: Eligible) -> Mapping[int, list[int]]:
        if eligible is None:
            return {clique: list(range(len(group))) for clique, group in enumerate(self.gpus_by_clique)}
        if eligible not in self.of_sets:
            if len(self.of_sets) >= MAX_SETS:
                self.of_sets.clear()
            by_clique: dict[int, list[int]] = defaultdict(list)
            for clique, position in sorted(self.position_of[uuid] for uuid in eligible if uuid in self.position_of):
                by_clique[clique].append(position)
            self.of_sets[eligible] = by_clique
        return self.of_sets[eligible]

    def places(self, kind: OfferKind, eligible: Eligible) -> Iterator[FleetPlace]:
        for clique, positions in self.positions(eligible).items():
            for position in positions:
                for spot in self.cliques[clique].gpus[position].places(kind):
                    yield FleetPlace(clique, position, spot)

    def _candidates(self, kind: OfferKind, before: RankedFleet | None, changed: Collection[int]) -> CliqueCandidates:
        candidates = before.candidates.get(kind) if before is not None else None
        if candidates is None:
            candidates, changed = NO_CANDIDATES, range(len(self.cliques))
        best_of = {clique: self.cliques[clique].best(kind) for clique in changed}
        return candidates.changed(
            {clique: None if best is None else CliqueCandidate(best, clique) for clique, best in best_of.items()}
        )


def _changed(before: Sequence[tuple[FleetGpu, ...]], after: Sequence[tuple[FleetGpu, ...]]) -> list[int]:
    pairs = enumerate(zip(before, after, strict=True))
    return [clique for clique, (was, now) in pairs if was is not now and was != now]
