"""The stock scheduler over simulated nodes: least allocated node first, there the first device that fits.

Least allocated counts what pods request of CPU and memory; all pods being alike, that is their number.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from controller.cluster.fleet import Fleet, FleetGpu
from driver.model.device import Device
from driver.model.gpu import Gpu
from tests.bench.placement.policies import Policy
from tests.bench.placement.trace import NODE_GPUS, Arrival, Request, Scenario


@dataclass
class Outcome:
    """What became of the arrivals after the warm-up.

    ``served`` counts all that were admitted, the warm-up's too; ``held`` is the mean part of the memory slices that
    were held.
    """

    arrived: Counter[Request] = field(default_factory=Counter)
    admitted: Counter[Request] = field(default_factory=Counter)
    served: int = 0
    slice_time: float = 0.0
    time: float = 0.0
    slices: int = 0

    @property
    def acceptance(self) -> float:
        return self.admitted.total() / max(self.arrived.total(), 1)

    @property
    def held(self) -> float:
        return self.slice_time / max(self.time * self.slices, 1e-9)


class Simulation:
    """One scenario under one policy."""

    def __init__(self, scenario: Scenario, policy: Policy) -> None:
        self._scenario = scenario
        self._policy = policy
        self._gpus = {entry.gpu.uuid: entry for entry in _nodes(scenario)}
        self._nodes: dict[str, list[str]] = {}
        for entry in self._gpus.values():
            self._nodes.setdefault(entry.node, []).append(entry.gpu.uuid)
        self._used = dict.fromkeys(self._nodes, 0)
        self._pods = dict.fromkeys(self._nodes, 0)
        self._rng = random.Random(scenario.seed)
        self._ends: list[tuple[float, int, tuple[Device, ...]]] = []

    def run(self, decided: Callable[[Arrival, bool, int], None] = lambda arrival, admitted, used: None) -> Outcome:
        """Every arrival is admitted at once or turned away; ``decided`` is told, with the memory slices then held."""
        outcome = Outcome(slices=self._scenario.slices)
        now = 0.0
        for number, arrival in enumerate(self._scenario.trace()):
            counts = number >= self._scenario.warm_up
            self._advance(now, arrival.at, outcome if counts else None)
            now = arrival.at
            devices = self._admit(arrival)
            outcome.served += bool(devices)
            if devices:
                heapq.heappush(self._ends, (arrival.at + arrival.duration, number, devices))
            if counts:
                outcome.arrived[arrival.request] += 1
                outcome.admitted[arrival.request] += bool(devices)
            decided(arrival, bool(devices), sum(self._used.values()))
        return outcome

    def _advance(self, since: float, until: float, outcome: Outcome | None) -> None:
        """Ends what ends before ``until``, and adds up what was held."""
        while self._ends and self._ends[0][0] <= until:
            end, _, devices = heapq.heappop(self._ends)
            self._count(since, end, outcome)
            since = end
            self._change(devices, held=False)
        self._count(since, until, outcome)

    def _count(self, since: float, until: float, outcome: Outcome | None) -> None:
        if outcome is not None:
            outcome.time += until - since
            outcome.slice_time += (until - since) * sum(self._used.values())

    def _admit(self, arrival: Arrival) -> tuple[Device, ...]:
        """The devices that the scheduler gives; none if nothing fits even after a refresh for this claim."""
        self._policy.refresh(Fleet.of(self._gpus.values()), None)
        devices = self._schedule(arrival.request)
        if not devices:
            self._policy.refresh(Fleet.of(self._gpus.values()), arrival.request)
            devices = self._schedule(arrival.request)
        self._change(devices, held=True)
        return devices

    def _schedule(self, request: Request) -> tuple[Device, ...]:
        for node in sorted(self._nodes, key=lambda node: (self._pods[node], self._rng.random())):
            offered = self._policy.offered([self._gpus[uuid] for uuid in self._nodes[node]], request.key)
            if len(offered) >= request.count:
                return tuple(offered[: request.count])
        return ()

    def _change(self, devices: Sequence[Device], *, held: bool) -> None:
        if devices:
            self._pods[self._gpus[devices[0].gpu.uuid].node] += 1 if held else -1
        for device in devices:
            entry = self._gpus[device.gpu.uuid]
            others = tuple(other for other in entry.held if other.name != device.name)
            changed = replace(entry, held=(*others, device) if held else others)
            vars(changed)["devices"] = entry.devices  # cached, and the same: holding adds no device
            self._gpus[device.gpu.uuid] = changed
            self._used[entry.node] += device.mask.bit_count() * (1 if held else -1)


def pooled(scenario: Scenario) -> Outcome:
    """The same trace if any free slices would do: what turning away costs without fragmentation."""
    outcome, free, ends = Outcome(slices=scenario.slices), scenario.slices, list[tuple[float, int]]()
    for number, (at, request, duration) in enumerate(scenario.trace()):
        while ends and ends[0][0] <= at:
            free += heapq.heappop(ends)[1]
        wanted = request.slices(scenario.gpu)
        admitted = wanted <= free
        if admitted:
            free -= wanted
            heapq.heappush(ends, (at + duration, wanted))
        if number >= scenario.warm_up:
            outcome.arrived[request] += 1
            outcome.admitted[request] += admitted
    return outcome


def _nodes(scenario: Scenario) -> list[FleetGpu]:
    return [
        FleetGpu(f"node-{node:03}", _gpu(scenario.gpu, node, number), number)
        for node in range(scenario.nodes)
        for number in range(NODE_GPUS)
    ]


def _gpu(gpu: Gpu, node: int, number: int) -> Gpu:
    return replace(gpu, uuid=f"GPU-{node:03}-{number}", index=number, minor=number, nvlink_clique="0")
