"""Prometheus metrics of every process: the process, its API requests, unreadable objects, and the /metrics page.

Imported only if metrics are served.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from driver.http import Page, PageRequest, Reply

METRICS_PATH = "/metrics"

TASKS = Path("/proc/self/task")

SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 45.0)
"""Upper bounds of the buckets of every duration, up to the kubelet's deadline for a prepare."""

NO_ANSWER = "error"

RESOURCE_PATH = re.compile(
    r"(?:/api/v1|/apis/[^/]+/[^/]+)(?:/namespaces/[^/]+(?=/[^/]+))?"
    r"/(?P<resource>[^/]+)(?:/(?P<name>[^/]+)(?:/(?P<part>[^/]+))?)?"
)

OTHER = "other"
"""Resource of a path that names none (/version): the label must have few values."""

VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


def metrics_page(registry: CollectorRegistry) -> Page:
    """A page with the current values of ``registry``, in the format that the client accepts."""

    def answer(request: PageRequest) -> Reply:
        encoder, content_type = choose_encoder(request.accept)
        return Reply(HTTPStatus.OK, encoder(registry), content_type)

    return answer


def process_registry() -> CollectorRegistry:
    """A registry with the metrics of the process: memory, processor time, file descriptors, threads.

    The library's global registry is not used.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]  # would add a series to each metric
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(ThreadCount())
    return registry


class ThreadCount(Collector):
    """The number of threads, which the library's own collector lacks; includes gRPC's native threads."""

    def collect(self) -> Iterable[Metric]:
        count = sum(1 for _ in TASKS.iterdir())
        yield GaugeMetricFamily("process_threads", "Number of threads, those of native libraries included.", count)


class UnreadableObjects(Collector):
    """The number of objects that can't be read, by kind; counted at each scrape."""

    def __init__(self, count: Callable[[], Mapping[str, int]]) -> None:
        self._count = count

    def collect(self) -> Iterable[Metric]:
        """One gauge, with a series for each kind with unreadable objects."""
        gauge = GaugeMetricFamily(
            "tessera_unreadable_objects", "Objects that the controller can't read.", labels=["kind"]
        )
        for kind, number in self._count().items():
            gauge.add_metric([kind], number)
        yield gauge


class RbacRequest(NamedTuple):
    """A request in RBAC terms: ``verb`` ("get", "list", "watch", ...) and ``resource`` ("resourceclaims/status")."""

    verb: str
    resource: str


def rbac_request(method: str, path: str, query: Mapping[str, str] | None = None) -> RbacRequest:
    """The verb and resource of one HTTP request; server-side apply is a patch, as in a Role."""
    match = RESOURCE_PATH.fullmatch(path)
    if match is None:
        return RbacRequest(method.lower(), OTHER)
    resource = f"{match['resource']}/{match['part']}" if match["part"] else match["resource"]
    if method != "GET":
        return RbacRequest(VERBS.get(method, method.lower()), resource)
    if match["name"]:
        return RbacRequest("get", resource)
    return RbacRequest("watch" if "watch" in (query or {}) else "list", resource)


class ApiMetrics:
    """Counts and times the requests of a KubeClient (its ``observe``)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        requests = Counter(
            "tessera_api_requests_total",
            f'Requests to the API server; code "{NO_ANSWER}" if no complete response arrived.',
            ["verb", "resource", "code"],
            registry=registry,
        )
        duration = Histogram(
            "tessera_api_request_duration_seconds",
            "Duration of a request to the API server; of a watch, the time until it began.",
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
        request = rbac_request(method, path, query)
        self._requests(*request, NO_ANSWER if status is None else str(status)).inc()
        self._duration(*request).observe(seconds)
