"""What is measured of a run on a real cluster: writes, CPU, refusals, means and percentiles."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from driver.kube.types import ObjectMeta
from driver.kube.watch_cache import Change

REFUSED_BY_FENCE = re.compile("Error scheduling pod.*Tessera is taking back")
"""What the fence's policy says (the chart's fence.yaml), as the scheduler logs it once for each refusal."""


class Meta(ObjectMeta, frozen=True, rename="camel"):
    generation: int = 0


@dataclass
class Writes:
    """Counts the writes to one resource; ``specs`` those that changed a spec where there is a status apart."""

    all: int = 0
    specs: int = 0

    def count(self, changes: Sequence[Change[Any]]) -> None:
        for change in changes:
            if change.new:
                self.all += 1
                self.specs += change.old is None or change.old.generation != change.new.generation


class Written(msgspec.Struct, frozen=True):
    metadata: Meta


def percentile(ordered: Sequence[float], part: float) -> float:
    return ordered[min(int(len(ordered) * part), len(ordered) - 1)] if ordered else 0.0


def mean(steps: Sequence[tuple[float, float]], since: float, until: float) -> float:
    """Mean over time of what changes at each of ``steps``."""
    ends = [at for at, _ in steps[1:]] + [until]
    total = sum(
        value * max(0.0, min(end, until) - max(at, since)) for (at, value), end in zip(steps, ends, strict=True)
    )
    return total / max(until - since, 1e-9)


def thinned(steps: Sequence[tuple[float, float]], every_s: float = 0.5) -> list[tuple[float, float]]:
    """One value for each ``every_s``, the last one."""
    found = {int(at / every_s): (round(at, 2), round(value, 4)) for at, value in steps if at >= 0}
    return list(found.values())


def count_refusals(log: Path) -> int:
    return sum(bool(REFUSED_BY_FENCE.search(line)) for line in log.read_text(errors="replace").splitlines())
