"""What claims ask for, drawn at random."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

HARDWARE = "dgx-h100"
SHARES = 4
"""Of each GPU, beside its partitions and itself."""

LIFETIME_S = 3.0
"""Mean time that a pod keeps its devices: 200 claims a minute fill about half of the node."""
LIMIT_S = 20.0

SMALL, MIDDLE, LARGE, FULL, SHARE = (
    "gpu-inference-1g-10gb",
    "gpu-inference-2g-20gb",
    "gpu-inference-3g-40gb",
    "gpu-training",
    "gpu-dev",
)


@dataclass(frozen=True)
class Wish:
    """What one claim asks for: (class, count) of each of its requests; ``often`` is its weight."""

    name: str
    requests: tuple[tuple[str, int], ...]
    often: int


WISHES = (
    Wish("1g", ((SMALL, 1),), 36),
    Wish("2g", ((MIDDLE, 1),), 18),
    Wish("3g", ((LARGE, 1),), 10),
    Wish("full", ((FULL, 1),), 6),
    Wish("share", ((SHARE, 1),), 14),
    Wish("two 1g", ((SMALL, 2),), 8),
    Wish("1g and 2g", ((SMALL, 1), (MIDDLE, 1)), 6),
    Wish("full and 1g", ((FULL, 1), (SMALL, 1)), 2),
)


@dataclass(frozen=True)
class Fate:
    """One claim: what it asks for, how long it is used, and how often the kubelet says a thing twice."""

    wish: Wish
    lifetime_s: float
    prepares: int
    unprepares: int


def draw(random: Random) -> Fate:
    """A kubelet that restarts asks again: one claim of ten is prepared twice, one of ten unprepared twice."""
    [wish] = random.choices(WISHES, [each.often for each in WISHES])
    lifetime_s = min(random.expovariate(1 / LIFETIME_S), LIMIT_S)
    return Fate(wish, lifetime_s, *(2 if random.random() < 0.1 else 1 for _ in range(2)))
