"""NodePrepareResources over the plugin's unix socket, against a real API server, with a simulator without delay.

There is no kubelet in between: what is measured is the plugin's own answer, as the kubelet would wait for it. The
claims of a series come back to back, so that whatever the plugin does after an answer meets the next call.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.bench.bare import bare_ms
from tests.bench.kubelet import Kubelet, allocated_claim, bench_plugin
from tests.bench.results import Figure
from tests.harness.cluster import Cluster
from tests.harness.progress import Progress
from tests.support.metrics import families, port_in, total
from tests.support.plugin import READY_S, PluginProcess

GPUS = 8
CLAIMS = 100
"""Of a series: the 99th percentile is the worst but one."""

RUNS = 5
STARTS = 5
"""Processes whose first prepare is measured."""

SPACED_S = (0.02, 0.25)
"""Shortest and longest pause of a series whose calls meet what the plugin does after each answer."""

SETTLE_S = 1.0
"""Between two series: longer than anything waits that the plugin does after an answer."""

Times = list[float]


@dataclass(frozen=True)
class Claims:
    """Allocated claims of one node: ``full`` and ``mig`` go round its GPUs, ``each`` has one full GPU each."""

    full: Sequence[Any]
    mig: Sequence[Any]
    each: Sequence[Any]

    @classmethod
    def create(cls, cluster: Cluster, node: str, prefix: str, count: int) -> Claims:
        claim = partial(allocated_claim, cluster)
        return cls(
            [claim(f"{prefix}-full-{i}", node, "gpu-0") for i in range(count)],
            [claim(f"{prefix}-mig-{i}", node, f"gpu-{i % GPUS}-mig-1g10gb-{i // GPUS % 7}") for i in range(count)],
            [claim(f"{prefix}-each-{i}", node, f"gpu-{i}") for i in range(GPUS)],
        )


def figures(cluster: Cluster, progress: Progress, where: str) -> list[Figure]:
    """Everything about preparing, in milliseconds; ``where`` is the machine. About a minute and a half."""
    with progress.part("first prepare of a process, and its API requests", 25):
        first, requests = _first_of_a_process(cluster)
    with bench_plugin(cluster) as plugin:
        claims = Claims.create(cluster, plugin.node.name, "bench", CLAIMS)
        kubelet = Kubelet(plugin.socket).connect()
        with progress.part(f"prepare and unprepare {CLAIMS} claims, {RUNS + 1} times each way", 60):
            found = _measured(kubelet, claims)
        kubelet.close()
        with progress.part("the bare path, for comparison", 5):
            bare = bare_ms(cluster, plugin.node.name, claims.full)
    found += _with_measured_latency(cluster, progress)
    found += [
        Figure("prepare.bare_path.p50_ms", bare, "ms", None, None, where),
        Figure("prepare.first.p50_ms", first, "ms", None, None, where),
        Figure("prepare.api_requests", requests, "", 1, 1, where),
    ]
    return [Figure(f.name, f.value, f.unit, f.target, f.peer, where) for f in found]


def _measured(kubelet: Kubelet, claims: Claims) -> list[Figure]:
    full, unprepare = _runs(lambda: _back_to_back(kubelet, claims.full))
    with _prepared(kubelet, claims.each[1:]):
        busy, _ = _runs(lambda: _back_to_back(kubelet, claims.full))
        repeat, _ = _runs(lambda: ([kubelet.prepare(claims.each[1]) * 1000 for _ in range(CLAIMS)], []))
    parallel, _ = _runs(lambda: _together(kubelet, claims.each, lambda: kubelet.prepare_at_once(claims.each)))
    batch, _ = _runs(lambda: _together(kubelet, claims.each, lambda: kubelet.prepare(*claims.each)))
    mig, unprepare_mig = _runs(lambda: _back_to_back(kubelet, claims.mig))
    spaced, _ = _runs(lambda: _back_to_back(kubelet, claims.mig[:20], SPACED_S), 2)

    def figure(name: str, value: float, target: float | None, peer: float | None = None) -> Figure:
        return Figure(f"{name}_ms", value, "ms", target, peer, "")

    return [
        figure("prepare.full.p50", _median_of(50, full), 2.8, 3.5),
        figure("prepare.full.p99", _median_of(99, full), 6, 6.4),
        figure("prepare.full.busy.p50", _median_of(50, busy), 3, 14.6),
        figure("prepare.mig.p50", _median_of(50, mig), 5),
        figure("prepare.mig.p99", _median_of(99, mig), 12),
        figure("prepare.mig.spaced.p50", _median_of(50, spaced), None),
        figure("prepare.parallel8", _median_of(50, parallel), 20, 719),
        figure("prepare.batch8", _median_of(50, batch), 20, 76),
        figure("prepare.repeat.p50", _median_of(50, repeat), 2, 2.3),
        figure("unprepare.p50", _median_of(50, unprepare), 1.3, 1.3),
        figure("unprepare.mig.p50", _median_of(50, unprepare_mig), None),
    ]


def _with_measured_latency(cluster: Cluster, progress: Progress) -> list[Figure]:
    """The same where NVML calls take as long as on an H200; partitions, whose cutting takes a second, are left out."""
    with bench_plugin(cluster, "bench-measured", sim_latency="measured") as plugin:
        node = plugin.node.name
        claims = [allocated_claim(cluster, f"measured-{i}", node, "gpu-0") for i in range(CLAIMS)]
        kept = allocated_claim(cluster, "measured-kept", node, "gpu-1")
        kubelet = Kubelet(plugin.socket).connect()
        with progress.part("prepare with NVML calls as slow as on an H200", 20):
            full, unprepare = _runs(lambda: _back_to_back(kubelet, claims))
            with _prepared(kubelet, [kept]):
                repeat, _ = _runs(lambda: ([kubelet.prepare(kept) * 1000 for _ in range(CLAIMS)], []))
        kubelet.close()
    series = {"prepare.full": full, "prepare.repeat": repeat, "unprepare": unprepare}
    return [
        Figure(f"{name}.measured.p50_ms", _median_of(50, runs), "ms", None, None, "") for name, runs in series.items()
    ]


# Series of calls: each gives two lists of milliseconds, of preparing and of unpreparing


def _runs(series: Callable[[], tuple[Times, Times]], count: int = RUNS) -> tuple[list[Times], list[Times]]:
    """``series`` so many times, after one that warms up."""
    series()
    gc.collect()
    gc.disable()  # a pause of ours is none of the plugin's
    try:
        found = []
        for _ in range(count):
            time.sleep(SETTLE_S)
            found.append(series())
    finally:
        gc.enable()
    return [prepared for prepared, _ in found], [unprepared for _, unprepared in found]


def _back_to_back(
    kubelet: Kubelet, claims: Sequence[Any], pause_s: tuple[float, float] = (0, 0)
) -> tuple[Times, Times]:
    """Each claim is prepared and unprepared before the next, with pauses from the one length to the other."""
    prepared, unprepared = [], []
    for index, claim in enumerate(claims):
        prepared.append(kubelet.prepare(claim) * 1000)
        unprepared.append(kubelet.unprepare(claim) * 1000)
        time.sleep(pause_s[0] + (pause_s[1] - pause_s[0]) * index / len(claims))
    return prepared, unprepared


def _together(kubelet: Kubelet, claims: Sequence[Any], prepare: Callable[[], float]) -> tuple[Times, Times]:
    """All of ``claims`` prepared by ``prepare``, a few times."""
    prepared = []
    for _ in range(10):
        prepared.append(prepare() * 1000)
        kubelet.unprepare(*claims)
    return prepared, []


@contextmanager
def _prepared(kubelet: Kubelet, claims: Sequence[Any]) -> Iterator[None]:
    kubelet.prepare(*claims)
    yield
    kubelet.unprepare(*claims)


def _median_of(percent: int, runs: Sequence[Times]) -> float:
    """The median over ``runs`` of each run's percentile."""
    return statistics.median(sorted(run)[math.ceil(len(run) * percent / 100) - 1] for run in runs)


# What takes processes of its own


def _first_of_a_process(cluster: Cluster) -> tuple[float, float]:
    """Median milliseconds of the first prepare after a start, as soon as the slices are there; and the API requests
    that one prepare makes before it is answered, by the plugin's own count."""
    with bench_plugin(cluster, "bench-first", "127.0.0.1:0") as plugin:
        claim = allocated_claim(cluster, "bench-first", plugin.node.name, "gpu-0-mig-1g10gb-0")
        requests = _requests_of_one(plugin, claim)
        plugin.flags.metrics_address = ""
        times = [_first(plugin, claim) for _ in range(STARTS)]
    return statistics.median(times), requests


def _first(plugin: PluginProcess, claim: Any) -> float:
    plugin.stop()
    plugin.spawn()
    plugin.wait_published()
    kubelet = Kubelet(plugin.socket).connect()
    elapsed = kubelet.prepare(claim) * 1000
    kubelet.unprepare(claim)
    kubelet.close()
    return elapsed


def _requests_of_one(plugin: PluginProcess, claim: Any) -> float:
    """Requests that are over when the answer is there; what the plugin asks later, it asks after the answer."""
    port = port_in(plugin.log, READY_S)
    kubelet = Kubelet(plugin.socket).connect()
    time.sleep(SETTLE_S)
    before = total(families(port), "tessera_api_requests_total")
    kubelet.prepare(claim)
    asked = total(families(port), "tessera_api_requests_total") - before
    kubelet.unprepare(claim)
    kubelet.close()
    return asked
