"""The node plugin's metrics for Prometheus, all listed in docs/metrics.md; loaded only if metrics are asked for.

No label contains the name of a claim, a pod or a GPU, or of any other object of which there may be many.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from driver.common_metrics import METRICS_PATH, SECONDS, ApiMetrics, metrics_page, process_registry
from driver.http import Page
from driver.kube.types import Claim
from driver.model.gpu_events_and_conditions import ConditionType
from driver.model.offer import DeviceKind
from driver.model.plan import NodeConditionType
from kubelet_plugin.checkpoint.records import Checkpoint, ClaimRecord
from kubelet_plugin.claims.claim_stores import ClaimStores
from kubelet_plugin.health.device_conditions import FAILING
from kubelet_plugin.health.device_health import GPU_UNHEALTHY, HealthMonitor
from kubelet_plugin.health.recorded_faults import FaultSource
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.metrics.metrics_interface import DEFECT, FAILURES, LOCK_FAILURE, Measurements, failure_kind
from kubelet_plugin.status.events import EventReason
from kubelet_plugin.step_names import NodeStep

RESULTS = SUCCESS, ERROR = "success", "error"

ORPHANS = ("claim", "cdi-spec", "record")
REPAIRS = {EventReason.REPAIRED: "device", EventReason.RELEASED_LATE: "release", EventReason.RECORD_REBUILT: "record"}
"""Kinds of repairs, by the reason of the Event that reports them."""

EVENT_FAILURES = {
    EventReason.REPAIR_FAILED: "device-lost",
    EventReason.ORPHAN_IN_USE: "orphan-in-use",
    EventReason.RECORD_MISSING: "record-missing",
    EventReason.RECORD_UNREADABLE: "record-unreadable",
    GPU_UNHEALTHY: "gpu",
}
"""Kinds of failures other than a failed prepare or unprepare, by the reason of the Event that reports them."""


READY_BUCKETS_SECONDS = (1.0, 2.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
"""Upper bounds of the buckets of the time in which a claim becomes ready: seconds to a day."""

REMEMBERED_CLAIMS = 1024
"""Claims of which is known whether they have become ready."""


class Metrics(Measurements):
    """Counters and histograms of the node plugin; ``registry`` also gets its ``NodeGauges``. Thread-safe."""

    def __init__(self) -> None:
        self.registry = process_registry()
        self._created: OrderedDict[str, float | None] = OrderedDict()
        """Creation of claims by uid (seconds since 1970); None: it has become ready."""
        self._durations()
        self._counters()
        self._requests = ApiMetrics(self.registry)

    def _durations(self) -> None:
        histogram = partial(Histogram, registry=self.registry, buckets=SECONDS)
        # All series exist from the start, so that the first event is visible as an increase; this is also faster.
        self._calls: dict[str, dict[str, Callable[[float], None]]] = {}
        for verb in ("prepare", "unprepare"):
            meaning = f"Time to {verb} one claim, waiting for locks included."
            call = histogram(f"tessera_{verb}_duration_seconds", meaning, ["result"])
            self._calls[verb] = {result: call.labels(result).observe for result in RESULTS}
        meaning = "Time from the creation of a claim until it is prepared for the first time."
        ready = Histogram(
            "tessera_claim_ready_duration_seconds", meaning, registry=self.registry, buckets=READY_BUCKETS_SECONDS
        )
        self._ready = ready.observe
        step = histogram("tessera_step_duration_seconds", "Duration of a completed step.", ["step"])
        self._steps = {name: step.labels(name.value).observe for name in NodeStep}
        self._publish = histogram("tessera_publish_duration_seconds", "Time to write the slices after one change.")
        meaning = "Time to acquire the lock of a claim, or the locks of all its GPUs."
        self._lock_wait = histogram("tessera_lock_wait_seconds", meaning)

    def _counters(self) -> None:
        counter = partial(Counter, registry=self.registry)
        self._writes = counter("tessera_slice_writes_total", "ResourceSlices written or deleted.")
        self._orphans = counter(
            "tessera_orphans_total", "Orphans found: devices, CDI specs or records without a claim.", ["kind"]
        )
        self._repairs = counter("tessera_repairs_total", "Automatic repairs.", ["kind"])
        self._faults = counter("tessera_faults_total", "Failures, by kind.", ["kind"])
        self._above_memory = Gauge(
            "tessera_claims_above_memory",
            "Claims that use more memory than they have.",
            registry=self.registry,
        )
        orphans_and_repairs = ((self._orphans, ORPHANS), (self._repairs, REPAIRS.values()))
        faults = (*(kind for _, kind in FAILURES), LOCK_FAILURE, DEFECT, *EVENT_FAILURES.values())
        for family, kinds in (*orphans_and_repairs, (self._faults, faults)):
            for kind in kinds:
                family.labels(kind)

    @contextmanager
    def measure(self, verb: str, claim: ClaimReference) -> Iterator[None]:
        observe, started = self._calls[verb], time.perf_counter()
        try:
            yield
        except Exception as error:
            observe[ERROR](time.perf_counter() - started)
            self._faults.labels(failure_kind(error)).inc()
            raise
        observe[SUCCESS](time.perf_counter() - started)
        created = self._created.get(claim.uid)
        if verb == "prepare" and created is not None:
            self._created[claim.uid] = None
            self._ready(max(0.0, time.time() - created))

    def claim_read(self, claim: Claim) -> None:
        uid, created = claim.metadata.uid, claim.metadata.creation_timestamp
        if created is not None and uid not in self._created:
            self._created[uid] = None if claim.status.devices else datetime.fromisoformat(created).timestamp()
            if len(self._created) > REMEMBERED_CLAIMS:
                self._created.popitem(last=False)

    def observe_request(
        self, method: str, path: str, query: Mapping[str, str] | None, status: int | None, seconds: float
    ) -> None:
        self._requests.observe(method, path, query, status, seconds)

    def lock_waited(self, seconds: float) -> None:
        self._lock_wait.observe(seconds)

    def observe_step(self, step: NodeStep, seconds: float) -> None:
        self._steps[step](seconds)

    def slices_written(self, slices: int, seconds: float) -> None:
        self._writes.inc(slices)
        self._publish.observe(seconds)

    def count_orphan(self, kind: str) -> None:
        self._orphans.labels(kind).inc()

    def count_event(self, reason: str) -> None:
        if reason in REPAIRS:
            self._repairs.labels(REPAIRS[EventReason(reason)]).inc()
        elif reason in EVENT_FAILURES:
            self._faults.labels(EVENT_FAILURES[reason]).inc()

    def set_claims_above_memory(self, claims: int) -> None:
        self._above_memory.set(claims)

    def pages(self) -> Mapping[str, Page]:
        return {METRICS_PATH: metrics_page(self.registry)}


FAULT_KINDS = (*(kind.value for kind in FaultSource), *(kind.value for kind in ConditionType), FAILING, "cordoned")


@dataclass(frozen=True)
class NodeGauges(Collector):
    """Gauges that are computed from memory at each scrape, in its thread. Nothing here may wait for hardware.

    ``published``: names of the devices in the slices. ``now``: the clock of file times (seconds since 1970).
    """

    node: ClaimStores
    published: Callable[[], set[str]]
    health: HealthMonitor
    now: Callable[[], float] = time.time

    def collect(self) -> Iterable[Metric]:
        node = self.node
        records = node.checkpoint.records()
        unfinished = [record for record in records if record.needs_release]
        releasing = [record for record in records if record.releasing]
        devices = [device for record in records for device in record.devices]
        cut = sum(1 for device in devices if device.partition is not None and not device.preexisting)
        yield GaugeMetricFamily("tessera_partitions", "Partitions that Tessera has cut for claims.", cut)
        yield GaugeMetricFamily(
            "tessera_prepared_claims", "Claims whose devices are ready for their pods.", len(records) - len(unfinished)
        )
        yield GaugeMetricFamily(
            "tessera_releasing_claims", "Claims whose devices still have to be released.", len(releasing)
        )
        yield GaugeMetricFamily(
            "tessera_oldest_unfinished_claim_age_seconds",
            "Age of the oldest checkpoint record of a claim that is being prepared or released; 0 without any.",
            oldest_seconds(node.checkpoint, unfinished, self.now()),
        )
        held = _by_type(device.kind for device in devices)
        free = self.published() - {device.device for device in devices}
        offers = _by_type(device.kind for name in free if (device := node.inventory.device(name)) is not None)
        meaning = "Devices of claims that are prepared, being prepared or being released."
        yield _counts("tessera_held_devices", meaning, "type", held)
        yield _counts("tessera_offers", "Published devices that no such claim holds.", "type", offers)
        yield GaugeMetricFamily("tessera_gpus", "GPUs of this node, healthy or not.", len(node.inventory.gpus))
        devices_by_gpu = (node.inventory.devices_on(gpu) for gpu in node.inventory.gpus)
        unhealthy = sum(any(map(self.health.unhealthy_reason, of_gpu)) for of_gpu in devices_by_gpu)
        yield GaugeMetricFamily("tessera_unhealthy_gpus", "GPUs with at least one unhealthy device.", unhealthy)
        faults = {**dict.fromkeys(FAULT_KINDS, 0), **self.health.faults_by_kind()}
        conditions = dict.fromkeys((kind.value for kind in NodeConditionType), 0)
        conditions |= {condition.type: 1 for condition in self.health.node_conditions.current()}
        meaning = "1 while something is wrong with the node as a whole."
        yield _counts("tessera_node_conditions", meaning, "type", conditions)
        yield _counts("tessera_gpu_faults", "Current faults of GPUs; kind cordoned: cordoned GPUs.", "kind", faults)


def oldest_seconds(checkpoint: Checkpoint, records: Iterable[ClaimRecord], now: float) -> float:
    """Seconds since the oldest of ``records`` was written, without records that were deleted meanwhile."""
    written = []
    for record in records:
        try:
            written.append(checkpoint.path(record.uid).stat().st_mtime)
        except OSError:
            continue
    return max(0.0, now - min(written, default=now))


def _counts(name: str, meaning: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(name, meaning, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def _by_type(kinds: Iterable[DeviceKind]) -> dict[str, int]:
    """The number of devices of each type, including 0."""
    all_kinds = list(kinds)
    return {kind.value: all_kinds.count(kind) for kind in DeviceKind}
