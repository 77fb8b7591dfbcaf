"""The trace on the real scheduler: pods that come one after the other and stay, until the fleet is full."""

from __future__ import annotations

from tests.bench.placement.fleet import Mode
from tests.bench.placement.real import Bench
from tests.bench.public_trace.replays import Decided, Filling, filling
from tests.bench.public_trace.tasks import GivenArrivals
from tests.harness.progress import Progress
from tests.support.chart import install
from tests.support.control_plane import control_plane

MODES = (Mode.LOWEST_START, Mode.BEST_FIRST, Mode.CURATED)
RATE = 10.0
"""Arrivals a second."""

PATIENCE_S = 10.0
"""A pod that waits longer is refused. Nothing ends, so what does not fit then never will; the scheduler tries pods
again after pauses that double from a second on."""


def filled(scenario: GivenArrivals, mode: Mode, progress: Progress) -> Filling:
    """A pod that is not bound within PATIENCE_S is refused. Raises AssertionError if anything is given out twice."""
    title = f"{len(scenario.given)} pods, {mode.value}"
    with progress.part(title, len(scenario.given) / RATE + 30), control_plane("bench-trace") as cluster:
        install(cluster)
        bench = Bench(cluster, mode, scenario, RATE, PATIENCE_S)
        assert not bench.run().overlaps
    used, steps = 0, list[Decided]()
    for fate in bench.fates:
        used += fate.arrival.request.slices(scenario.gpu) if fate.admitted else 0
        steps.append(Decided(fate.arrival.at, fate.arrival.request, fate.admitted, used / scenario.slices))
    return filling(steps)
