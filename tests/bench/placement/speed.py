"""How long choosing takes: from nothing, after a change on one GPU, for a burst."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TypeVar

from controller.cluster.fleet import Fleet, FleetGpu
from controller.curation.counters_planner import CountersPlanner
from controller.demand.demand import Demand
from driver.model.gpu import Gpu
from driver.model.offer import DeviceKind, Offer, OfferKind
from tests.bench.placement.trace import NODE_GPUS
from tests.support.fleets import possible
from tests.support.gpus import gpu_of

T = TypeVar("T")

REFRESHES = 60
BURST = Demand(OfferKind(DeviceKind.PARTITION, "1g.10gb"), 100)


@dataclass(frozen=True)
class Speed:
    """Milliseconds of CPU time; a refresh follows a change on one GPU."""

    nodes: int
    from_nothing: float
    refresh_median: float
    refresh_worst: float
    burst_of_100: float

    def __str__(self) -> str:
        return (
            f"{self.nodes:5} nodes x {NODE_GPUS}: from nothing {self.from_nothing:.0f} ms, refresh after a change on "
            f"one GPU {self.refresh_median:.1f} ms (worst {self.refresh_worst:.0f}), "
            f"100 claims at once {self.burst_of_100:.0f} ms"
        )


def measure(nodes: int) -> Speed:
    """On ``nodes`` nodes of H100, each GPU with up to five partitions of any size."""
    rng = random.Random(nodes)
    gpus = {entry.gpu.uuid: entry for node in range(nodes) for entry in _node(node, rng)}
    curator, refreshes = CountersPlanner(), list[float]()
    offers, from_nothing = _timed(partial(_refresh, curator, gpus, ()))
    for _ in range(REFRESHES):
        uuid = rng.choice(offers).gpu if rng.random() < 0.5 else rng.choice(list(gpus))
        gpus = {**gpus, uuid: _changed(gpus[uuid], rng)}
        offers, took = _timed(partial(_refresh, curator, gpus, offers))
        refreshes.append(took)
    _, burst = _timed(lambda: curator.curate(Fleet.of(gpus.values()), [BURST], offers))
    return Speed(nodes, from_nothing, median(refreshes), max(refreshes), burst)


def _refresh(curator: CountersPlanner, gpus: dict[str, FleetGpu], published: Collection[Offer]) -> list[Offer]:
    return list(curator.curate(Fleet.of(gpus.values()), (), published))


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    started = time.process_time()
    result = work()
    return result, (time.process_time() - started) * 1e3


def _node(node: int, rng: random.Random) -> list[FleetGpu]:
    return [_filled(FleetGpu(f"node-{node:04}", _gpu(node, number), number), rng) for number in range(NODE_GPUS)]


def _gpu(node: int, number: int) -> Gpu:
    return replace(gpu_of(), uuid=f"GPU-{node}-{number}", index=number, minor=number, nvlink_clique="0")


def _filled(entry: FleetGpu, rng: random.Random) -> FleetGpu:
    for _ in range(rng.randrange(6)):
        fitting = [device for device in possible(entry) if device.kind is DeviceKind.PARTITION]
        if fitting:
            entry = replace(entry, held=(*entry.held, rng.choice(fitting)))
    return replace(entry)


def _changed(entry: FleetGpu, rng: random.Random) -> FleetGpu:
    """The GPU with one device more, or one less."""
    if entry.held and rng.random() < 0.5:
        return replace(entry, held=entry.held[1:])
    return replace(entry, held=(*entry.held, rng.choice(possible(entry)))) if possible(entry) else entry
