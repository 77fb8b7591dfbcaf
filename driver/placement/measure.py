"""How much free memory the requests to come could not use: the fragmentation of GPUs and cliques (pure).

The measure is FGD (Weng et al., "Beware of Fragmentation", USENIX ATC'23) applied to MIG: over the classes of
request, each with its weight, the mean of the free memory slices that the class can't use. Classes are the
profiles, the full GPU, a share where the GPU is divided, and the whole clique: all GPUs that NVLink joins in one
node, which is what distributed training asks for. All amounts are memory slices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from driver.model.device import DeviceKind
from driver.placement.geometry import Geometry
from driver.placement.state import SHARE, GpuState

FULL_CLASS, SHARE_CLASS, CLIQUE_CLASS = "full", "share", "clique"


@dataclass(frozen=True)
class Weights:
    """How much each class counts: profile names, ``full``, ``share``, ``clique``; ``default`` for those not named.

    Only ratios matter. The default takes every class as equally likely.
    """

    of_class: Mapping[str, float] = field(default_factory=dict)
    default: float = 1.0

    def __getitem__(self, name: str) -> float:
        return self.of_class.get(name, self.default)


EQUAL = Weights()


class Measure:
    """Fragmentation under ``weights``, remembered by state."""

    def __init__(self, weights: Weights = EQUAL) -> None:
        self.weights = weights
        self._classes_of = lru_cache(1024)(self._weighted)

    def classes(self, state: GpuState) -> dict[str, float]:
        """The weight of each class a GPU can serve, alone or with its clique; together 1."""
        return self._classes_of(state.geometry, state.shares > 0)

    def _weighted(self, geometry: Geometry, shared: bool) -> dict[str, float]:
        names = [*geometry.windows, FULL_CLASS, CLIQUE_CLASS, *([SHARE_CLASS] if shared else [])]
        weights = {name: self.weights[name] for name in names}
        total = sum(weights.values()) or 1.0
        return {name: weight / total for name, weight in weights.items()}

    def unusable(self, state: GpuState) -> dict[str, float]:
        """For each class that one GPU serves, the free slices of this one that it can't use."""
        free = state.free
        found = {name: free - _covered(state, masks) for name, masks in state.geometry.windows.items()}
        found[FULL_CLASS] = 0.0 if state.whole else free
        if state.shares:
            found[SHARE_CLASS] = 0.0 if next(state.spots(SHARE), None) else free
        return found

    def fragmentation(self, state: GpuState) -> float:
        """The weighted mean of what the classes can't use of one GPU; the clique's part is its clique's."""
        classes = self.classes(state)
        return sum(classes[name] * amount for name, amount in self.unusable(state).items())


def _covered(state: GpuState, masks: tuple[int, ...]) -> int:
    """Slices under free placements; the limits beside memory are left aside, as in the paper."""
    if DeviceKind.PARTITION not in state.kinds or state.shared:
        return 0
    covered = 0
    for mask in masks:
        if not mask & state.mask:
            covered |= mask
    return covered.bit_count()
