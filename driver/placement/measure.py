"""The fragmentation of GPUs and cliques: free memory that future requests cannot use (pure).

The measure is FGD (Weng et al., "Beware of Fragmentation", USENIX ATC'23) applied to MIG: over the classes of
request, each with its weight, the mean of the free memory slices that the class can't use. Classes are the
profiles, the full GPU, a share where the GPU is divided, a part of its shared device, and the whole clique: all GPUs
that NVLink joins in one node, which is what distributed training asks for. All amounts are memory slices.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from driver.model.offer import SHARE, DeviceKind
from driver.placement.occupancy import Geometry, GpuState

FULL_CLASS, SHARE_CLASS, SHARED_CLASS, CLIQUE_CLASS = "full", "share", "shared", "clique"


class Measure:
    """Fragmentation, cached by state.

    ``weights`` are by class: profile names, ``full``, ``share``, ``shared``, ``clique``; a class that is not named has
    the weight 1. Only ratios matter: without weights, every class is equally likely.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = weights or {}
        self._classes_of = lru_cache(1024)(self._weighted)

    def classes(self, state: GpuState) -> dict[str, float]:
        """The weight of each class a GPU can serve, alone or with its clique; together 1.

        Shares and the shared device count on top of that: a GPU must not seem worth less for other uses because it can
        also be shared.
        """
        return self._classes_of(state.geometry, state.shares > 0, state.room > 0)

    def _weighted(self, geometry: Geometry, divided: bool, shared: bool) -> dict[str, float]:
        names = [*geometry.windows, FULL_CLASS, CLIQUE_CLASS]
        total = sum(self._weights.get(name, 1.0) for name in names) or 1.0
        names += [SHARE_CLASS] * divided + [SHARED_CLASS] * shared
        return {name: self._weights.get(name, 1.0) / total for name in names}

    def unusable(self, state: GpuState) -> dict[str, float]:
        """For each class that one GPU can serve, the free slices of the GPU that it cannot use."""
        free = state.free
        slices = {name: free - _covered(state, masks) for name, masks in state.geometry.windows.items()}
        slices[FULL_CLASS] = 0.0 if state.whole else free
        if state.shares:
            slices[SHARE_CLASS] = 0.0 if next(state.spots(SHARE), None) else free
        if state.room:
            slices[SHARED_CLASS] = 0.0 if state.left else free
        return slices

    def fragmentation(self, state: GpuState) -> float:
        """The weighted mean of the unusable slices of one GPU; the class of the clique is not included."""
        classes = self.classes(state)
        return sum(classes[name] * amount for name, amount in self.unusable(state).items())


def _covered(state: GpuState, masks: tuple[int, ...]) -> int:
    """Slices under free placements; the limits beside memory are left aside, as in the paper."""
    if DeviceKind.PARTITION not in state.kinds or state.shared or state.used:
        return 0
    covered = 0
    for mask in masks:
        if not mask & state.mask:
            covered |= mask
    return covered.bit_count()
