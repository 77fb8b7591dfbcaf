"""Requests to the API server, counted and timed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Histogram

from driver.kube.requests import what_is_asked

SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 45.0)
"""Upper bounds of the buckets of every duration, up to the kubelet's deadline for a prepare."""

NO_ANSWER = "error"


class ApiMetrics:
    """To be told of every request by a KubeClient (its ``observe``)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        requests = Counter(
            "tessera_api_requests_total",
            f'Requests to the API server; code "{NO_ANSWER}" where no whole answer came.',
            ["verb", "resource", "code"],
            registry=registry,
        )
        duration = Histogram(
            "tessera_api_request_duration_seconds",
            "Time of a request to the API server; of a watch the time until it began.",
            ["verb", "resource"],
            registry=registry,
            buckets=SECONDS,
        )
        # Looking up a child by its labels takes longer than counting.
        self._requests = cache(requests.labels)
        self._duration = cache(duration.labels)

    def observe(
        self, method: str, path: str, query: Mapping[str, str] | None, status: int | None, seconds: float
    ) -> None:
        asked = what_is_asked(method, path, query)
        self._requests(*asked, NO_ANSWER if status is None else str(status)).inc()
        self._duration(*asked).observe(seconds)
