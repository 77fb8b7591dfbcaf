"""The tasks of the trace as requests for full GPUs and partitions of an H100, and in which order they come."""

from __future__ import annotations

import csv
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from driver.model.offer import FULL, DeviceKind, OfferKind
from tests.bench.placement.experiment import plain_gpu
from tests.bench.placement.trace import NODE_GPUS, Arrival, Mix, Request, Scenario

FILE = Path(__file__).with_name("tasks.csv")
WHOLE = 1000
"""Thousandths of a GPU."""

LONGEST_S = 86_400.0
"""Tasks that take longer than a day count as a day: otherwise one in a hundred would be nearly all of the load."""

INFLATION = 1.3
"""Requests come until they exceed the fleet by this factor, as in the paper."""


class Rule(StrEnum):
    """Which part of a GPU decides which partition a task gets."""

    COMPUTE = "compute"
    MEMORY = "memory"


class Part(NamedTuple):
    """A profile, and which part of the GPU it has, by rule; 0.0: it is never chosen by that rule."""

    profile: str
    share: Mapping[Rule, float]


PARTS = (
    Part("1g.10gb", {Rule.COMPUTE: 1 / 7, Rule.MEMORY: 1 / 8}),
    Part("2g.20gb", {Rule.COMPUTE: 2 / 7, Rule.MEMORY: 2 / 8}),
    Part("3g.40gb", {Rule.COMPUTE: 3 / 7, Rule.MEMORY: 4 / 8}),
    Part("4g.40gb", {Rule.COMPUTE: 4 / 7, Rule.MEMORY: 0.0}),
)


class Task(NamedTuple):
    """``duration`` in seconds."""

    request: Request
    duration: float


@dataclass(frozen=True)
class GivenArrivals(Scenario):
    """A scenario whose arrivals are given instead of drawn."""

    given: tuple[Arrival, ...] = ()

    def trace(self) -> list[Arrival]:
        return list(self.given)


def tasks(rule: Rule) -> list[Task]:
    """All tasks, in order of arrival."""
    with FILE.open(newline="") as file:
        return [
            Task(
                Request(_kind(int(row["gpu_milli"]), rule), int(row["gpus"])),
                min(float(row["duration_s"]), LONGEST_S),
            )
            for row in csv.DictReader(file)
        ]


def inflation(rule: Rule, nodes: int, seed: int) -> GivenArrivals:
    """Tasks in a random order, one after the other, none of which ends."""
    base = _scenario(nodes, seed)
    drawn = _shuffled(rule, seed)
    asked = list(accumulate(task.request.slices(base.gpu) for task in drawn))
    drawn = drawn[: sum(total <= INFLATION * base.slices for total in asked)]
    return _given(base, [Arrival(float(at), task.request, math.inf) for at, task in enumerate(drawn)])


def churn(rule: Rule, nodes: int, seed: int, load: float) -> GivenArrivals:
    """Tasks in a random order at random moments (Poisson), which end after their durations, all stretched alike so that
    they ask for ``load`` times the fleet on average. The first quarter fills the fleet and does not count."""
    base = _scenario(nodes, seed)
    drawn = _shuffled(rule, seed)
    rng = random.Random(f"times {seed}")
    times = list(accumulate(rng.expovariate(1.0) for _ in drawn))
    asked = sum(task.request.slices(base.gpu) * task.duration for task in drawn)
    stretch = load * base.slices * times[-1] / asked
    arrivals = [Arrival(at, task.request, stretch * task.duration) for at, task in zip(times, drawn, strict=True)]
    return replace(_given(base, arrivals), load=load, warm_up=len(arrivals) // 4)


def _kind(milli: int, rule: Rule) -> OfferKind:
    """The smallest device that has at least that part of a GPU."""
    fitting = (part.profile for part in PARTS if part.share[rule] * WHOLE >= milli)
    profile = next(fitting, None)
    return OfferKind(DeviceKind.PARTITION, profile) if profile else FULL


def _scenario(nodes: int, seed: int) -> GivenArrivals:
    """Without arrivals."""
    return GivenArrivals(Mix("public trace", {}), plain_gpu(), nodes, warm_up=0, seed=seed)


def _shuffled(rule: Rule, seed: int) -> list[Task]:
    drawn = tasks(rule)
    random.Random(f"tasks {seed}").shuffle(drawn)
    return drawn


def _given(base: GivenArrivals, arrivals: Sequence[Arrival]) -> GivenArrivals:
    counts = Counter(arrival.request for arrival in arrivals)
    order = sorted(counts, key=lambda request: request.slices(base.gpu))
    mix = Mix(base.mix.name, {request: counts[request] / len(arrivals) for request in order})
    return replace(base, mix=mix, arrivals=len(arrivals), given=tuple(arrivals))


def gpus_of(scenario: Scenario) -> int:
    """How many GPUs the fleet has."""
    return scenario.nodes * NODE_GPUS
