"""Ranking of placements by fragmentation, and the order of offers within a node (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from typing import NamedTuple

from driver.model.device import Device
from driver.model.offer import FULL, SHARE, SHARED, DeviceKind, OfferKind, Spot
from driver.placement.measure import CLIQUE_CLASS, Measure
from driver.placement.occupancy import GpuState

DECIMALS = 9
"""Growth is rounded to this many decimals, because sums of weights have rounding errors."""

CLIQUES = 1 << 14
"""Size of the cache of clique states."""


class Terms(NamedTuple):
    """The terms by which placements are ranked; compared in order, smallest is best.

    ``ends_shares``: it is a full GPU that could be given away in shares instead. ``growth``: by how many memory slices
    the fragmentation of its GPU and clique grows (negative: it falls).
    ``free``: free memory slices of its GPU before, so that the fullest GPU is cut first; ``clique_free`` the same of
    its clique. ``left``: minus the number of placements, over all profiles, that stay possible on the GPU.
    ``at``: the first memory slice, or the number of the share. ``of_gpu``: the part of ``growth`` that is the GPU's
    own; the rest is its clique's.
    """

    ends_shares: bool
    growth: float
    free: float
    clique_free: float
    left: int
    at: int
    of_gpu: float


class Ranked(NamedTuple):
    """A place in a clique: the terms, which of the clique's GPUs, and where on it."""

    terms: Terms
    position: int
    spot: Spot


class LocalTerms(NamedTuple):
    """The terms that follow from the GPU alone, in their order; ``released``: free slices after minus before."""

    of_gpu: float
    left: int
    at: int
    released: float


class Ranking:
    """Ranks placements by a measure, with caches by state.

    States of one GPU are few (for an H100 some thousands) and stay; those of cliques come and go.
    """

    def __init__(self, measure: Measure | None = None) -> None:
        self.measure = measure or Measure()
        self.clique = lru_cache(CLIQUES)(partial(RankedClique, self))
        self._gpus: dict[GpuState, RankedGpu] = {}

    def gpu(self, state: GpuState) -> RankedGpu:
        """Return the one RankedGpu of ``state``."""
        ranked = self._gpus.get(state)
        if ranked is None:
            ranked = self._gpus[state] = RankedGpu(self, state)
        return ranked


class RankedGpu:
    """All GPUs in one state; compared by identity, because a ranking creates one per state."""

    def __init__(self, ranking: Ranking, state: GpuState) -> None:
        self.state = state
        self.free = state.free
        self.whole = state.whole
        self.offered = _one(frozenset(state.offered()))
        self.fragmentation = ranking.measure.fragmentation(state)
        self.clique_weight = ranking.measure.classes(state)[CLIQUE_CLASS]
        self._ranking = ranking
        self._places: dict[OfferKind, dict[Spot, LocalTerms]] = {}
        self._best: dict[OfferKind, LocalTerms | None] = {}
        self._after: dict[Spot, RankedGpu] = {}

    def places(self, key: OfferKind) -> Mapping[Spot, LocalTerms]:
        """Free places for a device of ``key``, with their terms."""
        places = self._places.get(key)
        if places is None:
            places = self._places[key] = {spot: self._local(spot) for spot in self.state.spots(key)}
        return places

    def best(self, key: OfferKind) -> LocalTerms | None:
        """The best place of ``key``, regardless of the clique."""
        if key not in self._best:
            self._best[key] = min(self.places(key).values(), default=None)
        return self._best[key]

    def ends_shares(self, key: OfferKind) -> bool:
        """Whether a device of ``key`` is the full GPU, and several claims could share the GPU."""
        return key == FULL and (SHARE in self.offered or SHARED in self.offered)

    def after(self, spot: Spot) -> RankedGpu:
        """Return the GPU after the allocation of ``spot``, which must be free."""
        ranked = self._after.get(spot)
        if ranked is None:
            ranked = self._after[spot] = self._ranking.gpu(self.state.take(spot))
        return ranked

    def _local(self, spot: Spot) -> LocalTerms:
        after = self.after(spot)
        of_gpu = round(after.fragmentation - self.fragmentation, DECIMALS)
        return LocalTerms(of_gpu, -placements_left(after.state), spot.at, after.free - self.free)


class RankedClique:
    """GPUs of one clique, in a fixed order."""

    def __init__(self, ranking: Ranking, gpus: tuple[RankedGpu, ...]) -> None:
        self.gpus = gpus
        self._ranking = ranking
        self._free = sum(gpu.free for gpu in gpus)
        self._spoiled = self._free if all(gpu.whole for gpu in gpus) else 0.0
        self.offered = _one(frozenset[OfferKind]().union(*{gpu.offered for gpu in gpus}))
        self._best: dict[OfferKind, Ranked | None] = {}

    def admits(self, position: int, spot: Spot) -> bool:
        return spot in self.gpus[position].places(spot.kind)

    def rank(self, position: int, spot: Spot) -> Terms:
        """The terms of ``spot``, which must be possible, on the GPU at ``position``."""
        return self._terms(self.gpus[position], self.gpus[position].places(spot.kind)[spot], spot.kind)

    def best(self, key: OfferKind) -> Ranked | None:
        """The best place of ``key``, or None if there is none."""
        if key not in self._best:
            self._best[key] = self.best_among(key, range(len(self.gpus)))
        return self._best[key]

    def best_among(self, key: OfferKind, positions: Iterable[int]) -> Ranked | None:
        """The best place of ``key`` on the GPUs at ``positions``."""
        best = None
        for position in positions:
            gpu = self.gpus[position]
            local = gpu.best(key)
            if local is not None:
                ranked = (gpu.ends_shares(key), self._growth(gpu, local), gpu.free, local, position)
                best = ranked if best is None else min(best, ranked)
        if best is None:
            return None
        *_, local, position = best
        return Ranked(self._terms(self.gpus[position], local, key), position, Spot(key, local.at))

    def after(self, position: int, spot: Spot) -> RankedClique:
        """Return the clique after the allocation of ``spot``."""
        return self.with_gpu(position, self.gpus[position].after(spot))

    def with_gpu(self, position: int, gpu: RankedGpu) -> RankedClique:
        return self._ranking.clique((*self.gpus[:position], gpu, *self.gpus[position + 1 :]))

    def _growth(self, gpu: RankedGpu, local: LocalTerms) -> float:
        """A request for all GPUs loses what was free if this is the first cut, and what is taken now is not free."""
        return round(local.of_gpu + gpu.clique_weight * (self._spoiled + local.released), DECIMALS)

    def _terms(self, gpu: RankedGpu, local: LocalTerms, key: OfferKind) -> Terms:
        growth = self._growth(gpu, local)
        return Terms(gpu.ends_shares(key), growth, gpu.free, self._free, local.left, local.at, local.of_gpu)


@lru_cache(1024)
def _one(keys: frozenset[OfferKind]) -> frozenset[OfferKind]:
    """Return one shared set for equal ones: there are few sets and thousands of cliques."""
    return keys


def placements_left(state: GpuState) -> int:
    """The number of free placements of all profiles."""
    return sum(1 for masks in state.geometry.windows.values() for mask in masks if not mask & state.mask)


KIND_ORDER = (
    DeviceKind.SHARE,
    DeviceKind.PARTITION,
    DeviceKind.SHARED_PARTITION,
    DeviceKind.SHARED,
    DeviceKind.FULL,
)

RANKING = Ranking()
"""The ranking with equal weights; its only state is its caches."""

BLOCKED = LocalTerms(float("inf"), 0, 0, 0.0)
"""The terms of a blocked offer, which is sorted last."""


def order_offers(devices: Iterable[Device], occupied: Mapping[str, int]) -> list[Device]:
    """Sort ``devices`` in the order in which the scheduler should see them.

    Small devices first: a claim gets the first one that it matches, and should not get a whole GPU where a part will
    do. Shares, those of GPUs in use first, then profiles by their memory, inside a profile the best placement first,
    then shared and full GPUs. ``occupied`` maps a GPU's UUID to its taken memory slices.
    """
    offers = list(devices)
    by_uuid = {device.gpu.uuid: device.gpu for device in offers}
    gpus = {uuid: RANKING.gpu(GpuState.of(gpu, foreign=occupied.get(uuid, 0))) for uuid, gpu in by_uuid.items()}
    return sorted(offers, key=lambda device: _key(device, gpus[device.gpu.uuid]))


def full_first(devices: Iterable[Device], occupied: Mapping[str, int]) -> list[Device]:
    """As ``order_offers``, but full GPUs first: the order in which to choose where not all can be offered."""
    return sorted(order_offers(devices, occupied), key=lambda device: device.kind is not DeviceKind.FULL)


def _key(device: Device, gpu: RankedGpu) -> tuple[int, int, int, str, tuple[float, float, int, int], int, str]:
    kind, name = KIND_ORDER.index(device.kind), (len(device.name), device.name)
    if device.profile is None:
        return (kind, 0, 0, "", (0.0, -gpu.state.mask.bit_count(), 0, 0), *name)
    spot = device.spot
    local = gpu.places(spot.kind).get(spot, BLOCKED)
    size = (device.profile.memory_bytes, device.profile.compute_slices, device.profile.name)
    return (kind, *size, (local.of_gpu, gpu.free, local.left, local.at), *name)
