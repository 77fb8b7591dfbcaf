"""Who comes when, asks for what, and stays how long: the same trace for the simulation and the real scheduler."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from driver.model.gpu import Gpu
from driver.model.offer import FULL, DeviceKind, OfferKind

NODE_GPUS = 8


@dataclass(frozen=True)
class Request:
    """``count`` devices of ``key``, all of one clique. ``gib``: how much of a shared device."""

    key: OfferKind
    count: int = 1
    gib: int = 0

    def slices(self, gpu: Gpu) -> int:
        """Memory slices that it takes."""
        profile = gpu.profile_named(self.key.profile) if self.key.profile else None
        return self.count * (profile.placements[0].size if profile else gpu.memory_slices)

    def __str__(self) -> str:
        return f"{self.count} x {self.key}" if self.count > 1 else str(self.key)


class Arrival(NamedTuple):
    """``at`` and ``duration`` in units of the mean duration."""

    at: float
    request: Request
    duration: float


@dataclass(frozen=True)
class Mix:
    """How likely each request is."""

    name: str
    weights: Mapping[Request, float]

    def mean_slices(self, gpu: Gpu) -> float:
        return sum(weight * request.slices(gpu) for request, weight in self.weights.items()) / sum(
            self.weights.values()
        )


def _partition(profile: str) -> Request:
    return Request(OfferKind(DeviceKind.PARTITION, profile))


PROFILES = tuple(_partition(name) for name in ("7g.80gb", "4g.40gb", "3g.40gb", "2g.20gb", "1g.20gb", "1g.10gb"))
KEPT_PROFILES = PROFILES[1:]
"""Those of which unasked offers are kept: not one as large as the GPU."""

FULL_GPU, FULL_NODE = Request(FULL), Request(FULL, NODE_GPUS)

UNIFORM = Mix("uniform", dict.fromkeys(PROFILES, 1 / 6))
SKEW_SMALL = Mix("skew-small", dict(zip(PROFILES, (0.05, 0.10, 0.10, 0.20, 0.25, 0.30), strict=True)))
SKEW_BIG = Mix("skew-big", dict(zip(PROFILES, (0.30, 0.25, 0.20, 0.10, 0.10, 0.05), strict=True)))
WITH_TRAINING = Mix(
    "training", dict(zip((FULL_NODE, FULL_GPU, *PROFILES[2:]), (0.02, 0.10, 0.13, 0.20, 0.15, 0.40), strict=True))
)
MIXES = (UNIFORM, SKEW_SMALL, SKEW_BIG)
"""The mixes of the reference (placement.md); WITH_TRAINING is our own, a third of its load asks for whole nodes."""


@dataclass(frozen=True)
class Scenario:
    """A cluster of equal nodes and what comes: Poisson arrivals, exponential durations of mean 1 or close to it.

    ``load`` is the memory slices asked for, on average and at once, of those there are. Arrivals before
    ``warm_up`` fill the cluster and don't count.
    """

    mix: Mix
    gpu: Gpu
    nodes: int = 12
    load: float = 1.0
    arrivals: int = 12_000
    warm_up: int = 3_000
    seed: int = 1

    @property
    def slices(self) -> int:
        """Memory slices of the cluster."""
        return self.nodes * NODE_GPUS * self.gpu.memory_slices

    def trace(self) -> list[Arrival]:
        """The arrivals in order of time; the same for the same scenario.

        Durations are stretched alike until the trace has exactly the load it names: else 12,000 arrivals are off by
        some percent, which is as much as the policies differ by.
        """
        rng = random.Random(f"{self.mix.name} {self.seed}")
        rate = self.load * self.slices / self.mix.mean_slices(self.gpu)
        times = list(accumulate(rng.expovariate(rate) for _ in range(self.arrivals)))
        requests = rng.choices(list(self.mix.weights), list(self.mix.weights.values()), k=self.arrivals)
        durations = [rng.expovariate(1.0) for _ in range(self.arrivals)]
        asked = sum(request.slices(self.gpu) * length for request, length in zip(requests, durations, strict=True))
        stretch = self.load * self.slices * times[-1] / asked
        return [Arrival(*each) for each in zip(times, requests, (stretch * d for d in durations), strict=True)]
