"""What grew though it should not have (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from statistics import median

from tests.soak.census import Census, Things

DEVICES = 2
"""At most, of one claim."""

ENOUGH = 6
"""Censuses of one process, after it has warmed up, below which nothing can be said of its growth."""

RSS_MIB = 3.0
"""What noise may be."""

THREADS, FDS = 16.0, 8.0
"""Pools of threads and connections grow up to their bounds whenever more claims than ever come at once; a leak of a few
each minute, let alone of one each claim, is more than that."""


@dataclass(frozen=True)
class Finding:
    """One line of the table; ``value`` may be ``allowed`` at most."""

    name: str
    value: float
    allowed: float

    @property
    def leaks(self) -> bool:
        return self.value > self.allowed


def findings(taken: Sequence[Census], left: Things, warm_s: float, served: int) -> list[Finding]:
    """``left`` was counted when all claims had ended; ``warm_s`` is how long a process may grow after its start."""
    return [
        *(Finding(f"{each.name} left at the end", getattr(left, each.name), 0) for each in fields(Things)),
        Finding("records without a claim", _most(c.things.records - c.alive for c in taken), 0),
        Finding("CDI specs without a claim", _most(c.things.specs - c.alive for c in taken), 0),
        Finding("partitions without a claim", _most(c.things.partitions - DEVICES * c.alive for c in taken), 0),
        Finding("memory growth, MiB", growth(taken, warm_s, lambda c: c.rss_mib), RSS_MIB),
        Finding("thread growth", growth(taken, warm_s, lambda c: c.threads), THREADS),
        Finding("descriptor growth", growth(taken, warm_s, lambda c: c.fds), FDS),
        Finding("slice growth", taken[-1].slices - taken[0].slices if taken else 0, 0),
        Finding("Events of ours", taken[-1].events if taken else 0, served),
    ]


def growth(taken: Iterable[Census], warm_s: float, value: Callable[[Census], float]) -> float:
    """The most that ``value`` grew in the life of one process: median of its last third less that of its first.

    A process that did not live long enough after ``warm_s`` does not count.
    """
    found = [0.0]
    for _, life in groupby(taken, lambda census: census.pid):
        counted = list(life)
        values = [value(census) for census in counted if census.at_s >= counted[0].at_s + warm_s]
        third = len(values) // 3
        if len(values) >= ENOUGH:
            found.append(median(values[-third:]) - median(values[:third]))
    return max(found)


def _most(values: Iterable[int]) -> int:
    return max(0, *values, 0)
