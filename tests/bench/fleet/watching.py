"""What processes and the API server did, second by second."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise

from driver.kube.client import KubeClient
from tests.bench.usage import cpu_s, memory_mb

PERIOD_S = 2.0
WRITE = re.compile(
    r'^apiserver_request_total\{[^}]*[{,]resource="(?P<resource>[^"]*)"[^}]*verb="(?P<verb>POST|PUT|PATCH|APPLY|DELETE)"'
    r"[^}]*\} (?P<count>[0-9.e+]+)$",
    re.MULTILINE,
)


def writes_so_far(client: KubeClient) -> dict[str, float]:
    """How many writes the API server has answered, by resource."""
    found: dict[str, float] = {}
    for match in WRITE.finditer(client.get("/metrics").decode()):
        found[match["resource"]] = found.get(match["resource"], 0.0) + float(match["count"])
    return found


@dataclass
class Writes:
    """Successive counts of writes at the API server, by resource: (seconds, counts)."""

    client: KubeClient
    began: float = field(default_factory=time.monotonic)
    counts: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)

    def mark(self, what: str) -> None:
        """Something happened now."""
        self.marks.append((time.monotonic() - self.began, what))

    def run(self, stop: threading.Event) -> None:
        """Look every PERIOD_S until ``stop`` is set."""
        while not stop.wait(PERIOD_S):
            self.counts.append((time.monotonic() - self.began, writes_so_far(self.client)))

    def per_second(self, resources: frozenset[str] | None = None) -> list[tuple[float, float]]:
        """(seconds, writes a second since the look before), of all resources or of some."""
        sums = [
            (at, sum(count for each, count in now.items() if resources is None or each in resources))
            for at, now in self.counts
        ]
        return [(at, (now - was) / (at - before)) for (before, was), (at, now) in pairwise(sums)]


@dataclass
class Usage:
    """Of one process, from ``start`` on."""

    pid: int
    at: float = 0.0
    cpu: float = 0.0

    def start(self) -> Usage:
        self.at, self.cpu = time.monotonic(), cpu_s(self.pid)
        return self

    @property
    def core_share(self) -> float:
        """Seconds of CPU a second."""
        return (cpu_s(self.pid) - self.cpu) / (time.monotonic() - self.at)

    @property
    def rss_mb(self) -> float:
        return memory_mb(self.pid)
