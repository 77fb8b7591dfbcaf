"""What measuring the usage of claims costs the node plugin, on and off in the same run.

The simulated GPUs compute their counters in the plugin's own process, so real ones cost it less.
"""

from __future__ import annotations

import statistics
import time

from tests.bench.kubelet import Kubelet, allocated_claim, bench_plugin
from tests.bench.results import Figure
from tests.bench.usage import cpu_s, memory_mb
from tests.harness.cluster import Cluster
from tests.harness.progress import Progress

CLAIMS = 20
INTERVAL = "15s"
SETTLE_S = 20.0
"""Longer than new claims are sampled more often."""

WINDOW_S = 90.0
CYCLES = 50
PER_GPU = 5


def figures(cluster: Cluster, progress: Progress, where: str) -> list[Figure]:
    """CPU, memory and prepare latency of a node with 20 claims, with and without measuring. About 4 minutes."""
    found: dict[str, dict[str, float]] = {}
    with bench_plugin(cluster, "usage-first", metrics_address="127.0.0.1:0", usage_interval=INTERVAL):
        pass  # compiles to bytecode what the next processes load
    for name, interval in (("off", ""), ("on", INTERVAL)):
        with progress.part(f"a node with {CLAIMS} claims, usage {name}", 120):
            found[name] = _measured(cluster, f"usage-{name}", interval)
    on, off = found["on"], found["off"]
    return [
        Figure("usage.cpu_percent", 100 * (on["cpu"] - off["cpu"]) / WINDOW_S, "% core", 0.5, None, where),
        Figure("usage.memory_mib", on["memory"] - off["memory"], "MiB", 4, None, where),
        Figure("usage.prepare_on_p50_ms", on["prepare"], "ms", None, None, where),
        Figure("usage.prepare_off_p50_ms", off["prepare"], "ms", None, None, where),
    ]


def _measured(cluster: Cluster, node: str, interval: str) -> dict[str, float]:
    with bench_plugin(cluster, node, metrics_address="127.0.0.1:0", usage_interval=interval) as plugin:
        kubelet = Kubelet(plugin.socket).connect()
        for number in range(CLAIMS):
            device = f"gpu-{number // PER_GPU}-mig-1g10gb-{number % PER_GPU}"
            kubelet.prepare(allocated_claim(cluster, f"{node}-{number}", node, device))
        time.sleep(SETTLE_S)
        before = cpu_s(plugin.pid)
        time.sleep(WINDOW_S)
        cpu = cpu_s(plugin.pid) - before
        claims = [allocated_claim(cluster, f"{node}-more-{number}", node, "gpu-7") for number in range(CYCLES)]
        seconds = []
        for claim in claims:
            seconds.append(kubelet.prepare(claim))
            kubelet.unprepare(claim)
        kubelet.close()
        return {"cpu": cpu, "memory": memory_mb(plugin.pid, "RssAnon"), "prepare": 1000 * statistics.median(seconds)}
