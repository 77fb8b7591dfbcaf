"""The same pods of three priorities with preemption and without it, in simulated time: who waits how long.

Simulated are the stock scheduler (it binds what fits, the highest priority first) over the controller's offers, as in
``tests.bench.placement``, and the turns of the leader; the victims are those of the product's search. An evicted pod
has saved its work: it waits again, for the rest of its time.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from itertools import count
from statistics import mean, median

from driver.model.device import Device
from tests.bench.placement.experiment import plain_gpu
from tests.bench.placement.policies import curated
from tests.bench.placement.simulation import Simulation
from tests.bench.placement.trace import UNIFORM, Arrival, Scenario
from tests.bench.preempt.report import Measured, Results
from tests.support.preemption import NOW, Contest, names
from tests.support.queues import profile

NODES, LOAD, PRIORITIES = 2, 1.2, 3
HOURS = 4.0
"""Mean time that a pod holds its device."""

LATENCY_HOURS = (5 + 30 + 4) / 3600
"""Half the interval of turns, the grace period, and the time from the last deallocation to the binding."""

PODS_PER_TURN = 5


@dataclass
class SimulatedPod:
    """``left``: hours for which it still needs its device. ``waited``: hours until it was bound first."""

    name: str
    arrival: Arrival
    priority: int
    came: float
    left: float
    counts: bool
    waited: float | None = None
    bound: float = 0.0
    devices: tuple[Device, ...] = ()


@dataclass
class MixOutcome:
    """``waits``: hours by priority, of all pods that count: until each was bound first, or the run ended.

    ``held``: the mean part of the memory slices that was allocated.
    """

    waits: dict[int, list[float]] = field(default_factory=lambda: {priority: [] for priority in range(PRIORITIES)})
    evicted: int = 0
    held: float = 0.0


class Mixture:
    """One run over the arrivals of a seed."""

    def __init__(self, arrivals: int, seed: int, *, preempts: bool) -> None:
        scenario = Scenario(UNIFORM, plain_gpu(), NODES, LOAD, arrivals, arrivals // 4, seed)
        self._simulation, self._preempts = Simulation(scenario, curated(2)), preempts
        rng = random.Random(seed)
        self._pods = [
            SimulatedPod(
                f"pod-{number}",
                arrival,
                rng.randrange(PRIORITIES),
                arrival.at * HOURS,
                arrival.duration * HOURS,
                number >= scenario.warm_up,
            )
            for number, arrival in enumerate(scenario.trace())
        ]
        self._slices = scenario.slices
        self._waiting: list[SimulatedPod] = []
        self._running: dict[str, SimulatedPod] = {}
        self._reserved_for: SimulatedPod | None = None
        self._sequence = count()
        self._events: list[tuple[float, int, str, SimulatedPod, float]] = []
        self._victims: list[SimulatedPod] = []
        self.outcome = MixOutcome()

    def run(self) -> MixOutcome:
        for pod in self._pods:
            self._at(pod.came, "comes", pod)
        begins, ends = next(pod.came for pod in self._pods if pod.counts), self._pods[-1].came
        now, slice_hours = 0.0, 0.0
        while self._events and self._events[0][0] <= ends:
            at, _, what, pod, token = heapq.heappop(self._events)
            slice_hours += max(0.0, at - max(now, begins)) * sum(self._simulation._used.values())
            now = at
            if what == "comes":
                self._waiting.append(pod)
            elif what == "ends" and pod.name in self._running and pod.bound == token:
                self._release(pod)
            elif what == "freed":
                self._hand_over(now, pod)
            self._schedule(now)
            self._look(now)
        for pod in self._pods:
            if pod.counts:
                self.outcome.waits[pod.priority].append(ends - pod.came if pod.waited is None else pod.waited)
        self.outcome.held = slice_hours / (ends - begins) / self._slices
        return self.outcome

    def _at(self, at: float, what: str, pod: SimulatedPod, token: float = 0.0) -> None:
        heapq.heappush(self._events, (at, next(self._sequence), what, pod, token))

    def _in_order(self) -> list[SimulatedPod]:
        return sorted(self._waiting, key=lambda pod: (-pod.priority, pod.came))

    def _schedule(self, now: float) -> None:
        """Bind what fits. The devices that are reserved are still held by those that end."""
        refused = set()
        for pod in self._in_order():
            if pod.arrival.request not in refused and not self._bind(now, pod):
                refused.add(pod.arrival.request)

    def _bind(self, now: float, pod: SimulatedPod) -> bool:
        pod.devices = self._simulation._admit(pod.arrival)
        if not pod.devices:
            return False
        self._waiting.remove(pod)
        self._running[pod.name] = pod
        pod.bound = now
        pod.waited = now - pod.came if pod.waited is None else pod.waited
        self._at(now + pod.left, "ends", pod, now)
        return True

    def _release(self, pod: SimulatedPod) -> None:
        self._simulation._change(pod.devices, held=False)
        del self._running[pod.name]

    def _look(self, now: float) -> None:
        """A turn of the leader: at most one pod is preempted for at a time."""
        if not self._preempts or self._reserved_for is not None:
            return
        for pod in self._candidates():
            if victims := self._victims_for(now, pod):
                self._reserved_for, self._victims = pod, victims
                self._at(now + LATENCY_HOURS, "freed", pod)
                return

    def _candidates(self) -> Iterator[SimulatedPod]:
        """The first of each kind: what makes no room for one makes none for another."""
        kinds = {(pod.priority, pod.arrival.request): pod for pod in reversed(self._in_order()) if pod.priority}
        yield from sorted(kinds.values(), key=lambda pod: (-pod.priority, pod.came))[:PODS_PER_TURN]

    def _victims_for(self, now: float, pod: SimulatedPod) -> list[SimulatedPod]:
        contest = Contest(list(self._simulation._gpus.values()))
        for running in self._running.values():
            devices, node = [device.name for device in running.devices], self._node_of(running)
            since = datetime.fromisoformat(NOW) - timedelta(hours=now - running.bound)
            contest.runs(running.name, node, *devices, priority=running.priority, since=since.isoformat())
        selector = profile(str(pod.arrival.request.key.profile))
        search = contest.search(selector=selector, priority=pod.priority)
        return [] if search.obstacle() else [self._running[name] for name in names(search.best())]

    def _node_of(self, pod: SimulatedPod) -> str:
        return self._simulation._gpus[pod.devices[0].gpu.uuid].node

    def _hand_over(self, now: float, pod: SimulatedPod) -> None:
        self._reserved_for = None
        if pod.name in self._running:
            return
        for victim in self._victims:
            if victim.name in self._running:
                victim.left -= now - victim.bound
                self._release(victim)
                self._waiting.append(victim)
                self.outcome.evicted += 1
        self._bind(now, pod)


def measure(arrivals: int, seeds: int, results: Results) -> None:
    """The runs of a seed, without preemption and with it, have the same arrivals."""
    without, with_it = list[MixOutcome](), list[MixOutcome]()
    for seed in range(1, seeds + 1):
        without.append(Mixture(arrivals, seed, preempts=False).run())
        with_it.append(Mixture(arrivals, seed, preempts=True).run())
    figures = []
    for priority in reversed(range(PRIORITIES)):
        before, after = _minutes(without, priority), _minutes(with_it, priority)
        target = mean(before) / 10 if priority == PRIORITIES - 1 else None
        figures += [
            Measured(f"simulated wait, priority {priority}, mean", mean(after), "min", target, mean(before)),
            Measured("... median", median(after), "min", None, median(before)),
        ]
    free, free_before = (100 * mean(1 - outcome.held for outcome in outcomes) for outcomes in (with_it, without))
    figures.append(Measured("slices that are not allocated", free, "%", free_before, free_before))
    figures.append(Measured("evictions", sum(outcome.evicted for outcome in with_it), "pods", None, None))
    figures.append(Measured("pods", sum(len(waits) for of in with_it for waits in of.waits.values()), "", None, None))
    runs = {"without": list(map(asdict, without)), "with": list(map(asdict, with_it))}
    results.add("mix", figures, runs)


def _minutes(outcomes: Sequence[MixOutcome], priority: int) -> list[float]:
    return [hours * 60 for outcome in outcomes for hours in outcome.waits[priority]]
