"""The victims that the search finds, compared with every set of pods, in random fleets of H100.

A fleet has at most 2 nodes of 8 GPUs and 12 pods with devices. What is compared is the whole cost: highest priority,
pods that are not idle, number of pods, GPU hours and memory slices. CPU of the nodes is scarce, too.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timedelta

from tests.bench.placement.measures import percentile
from tests.bench.preempt.report import Measured, Results
from tests.support.preemption import NOW, PRIORITY, Contest
from tests.support.queues import FULL, fleet_gpu, profile

NODES, GPUS, PODS = 2, 8, 12
CPU_OF_NODE, MOST_CPU = 16, 4
MOST_HOURS = 48
IDLE = 0.3
"""Part of the pods whose devices have not been used for some hours."""


H100 = "NVIDIA H100 80GB HBM3"
LAYOUTS = (
    (),
    ("full",),
    ("mig-3g40gb-0", "mig-3g40gb-4"),
    ("mig-3g40gb-4", "mig-2g20gb-0", "mig-1g10gb-2"),
    ("mig-1g10gb-0", "mig-1g10gb-3", "mig-1g10gb-6"),
    ("mig-4g40gb-0",),
)
"""Devices that are held of one GPU."""

WANTED: Mapping[str, tuple[str, int]] = {
    "full": (FULL, GPUS),
    "3g.40gb": (profile("3g.40gb"), 4),
    "1g.10gb": (profile("1g.10gb"), 4),
    "7g.80gb": (profile("7g.80gb"), 2),
}
"""Selectors of the waiting pod, and the most devices that it asks for."""


NONE = "no set is enough"


class RandomFleet:
    """One fleet, and what its waiting pod asks for."""

    def __init__(self, rng: random.Random) -> None:
        nodes = ["a", "b"][: rng.randint(1, NODES)]
        layouts = {(node, number): rng.choice(LAYOUTS) for node in nodes for number in range(rng.randint(1, GPUS))}
        devices = [(node, _device(number, name)) for (node, number), names in layouts.items() for name in names]
        rng.shuffle(devices)
        held, pods = list[tuple[str, str]](), list[tuple[str, list[str]]]()
        while devices and len(pods) < PODS:
            node, first = devices.pop()
            more = [device for other, device in devices if other == node][: rng.choice((0, 0, 0, 1, 3))]
            devices = [(other, device) for other, device in devices if other != node or device not in more]
            pods.append((node, [first, *more]))
            held += [(node, device) for device in pods[-1][1]]
        gpus = [
            fleet_gpu(node, number, H100, *(name for name in names if (node, _device(number, name)) in held))
            for (node, number), names in layouts.items()
        ]
        self.contest = Contest(gpus, cpu=str(CPU_OF_NODE))
        free_cpu = dict.fromkeys(nodes, CPU_OF_NODE)
        for number, (node, devices_of_pod) in enumerate(pods):
            hours = rng.randint(0, MOST_HOURS)
            since = f"{datetime.fromisoformat(NOW) - timedelta(hours=hours):%Y-%m-%dT%H:%M:%SZ}"
            cpu, priority = min(rng.randint(0, MOST_CPU), free_cpu[node]), rng.randint(0, PRIORITY + 2)
            free_cpu[node] -= cpu
            self.contest.runs(f"p{number}", node, *devices_of_pod, since=since, cpu=cpu, priority=priority)
            if hours > 1 and rng.random() < IDLE:
                self.contest.is_idle(f"p{number}", rng.randint(1, hours - 1), node)
        selector, most = rng.choice(list(WANTED.values()))
        self.search = self.contest.search(selector=selector, count=rng.randint(1, most), cpu=rng.randint(0, MOST_CPU))

    def outcome(self) -> str | None:
        """How the search did; None: there is nothing to be searched."""
        if self.search.obstacle() is not None:
            return None
        preemption, best = self.search.best(), self.contest.cheapest_of_all()
        if preemption is None:
            return NONE if best is None else "not found"
        if best is None or preemption.cost < best:
            return "cheaper than possible"
        shown = "exact" if preemption.is_cheapest else "bounded"
        return f"equal, {shown}" if preemption.cost == best else f"more expensive, {shown}"


def _device(number: int, name: str) -> str:
    return f"gpu-{number}" if name == "full" else f"gpu-{number}-{name}"


def measure(fleets: int, seed: int, results: Results) -> None:
    """Of so many fleets in which a set of pods is enough; others are drawn meanwhile."""
    rng, outcomes, milliseconds = random.Random(seed), Counter[str](), list[float]()
    while outcomes.total() - outcomes[NONE] < fleets:
        fleet = RandomFleet(rng)
        if (outcome := fleet.outcome()) is not None:
            outcomes[outcome] += 1
            began = time.perf_counter()
            fleet.search.best()
            milliseconds.append((time.perf_counter() - began) * 1000)
    wrong = outcomes["not found"] + outcomes["cheaper than possible"]
    milliseconds.sort()
    figures = [
        Measured("random fleets", fleets, "", None, None),
        Measured(
            "sets that cost as much as the best of all",
            outcomes["equal, exact"] + outcomes["equal, bounded"],
            "",
            None,
            None,
        ),
        Measured("... not known to be the cheapest", outcomes["equal, bounded"], "", None, None),
        Measured("further fleets, in which no set is enough", outcomes[NONE], "", None, None),
        Measured(
            "sets that cost more", outcomes["more expensive, exact"] + outcomes["more expensive, bounded"], "", 0, None
        ),
        Measured("fleets in which only one of both is a set", wrong, "", 0, None),
        Measured("a search, p50", percentile(milliseconds, 0.5), "ms", None, None),
        Measured("... p99", percentile(milliseconds, 0.99), "ms", None, None),
    ]
    results.add("optimum", figures, {"outcomes": dict(outcomes), "search_ms": milliseconds})
