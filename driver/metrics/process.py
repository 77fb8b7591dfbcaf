"""The process itself: memory, processor time, file descriptors, threads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

TASKS = Path("/proc/self/task")


def process_registry() -> CollectorRegistry:
    """A registry of our own with the process's metrics. Nothing goes into the library's global one."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # one more series for each of ours, which nobody asks for
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(ThreadCount())
    return registry


class ThreadCount(Collector):
    """The library's own collector lacks it; gRPC's native threads count too."""

    def collect(self) -> Iterable[Metric]:
        count = sum(1 for _ in TASKS.iterdir())
        yield GaugeMetricFamily("process_threads", "Number of threads, those of native libraries included.", count)
