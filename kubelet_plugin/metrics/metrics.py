"""The node plugin's metrics for Prometheus, all listed in docs/metrics.md; loaded only if metrics are asked for.

No label contains the name of a claim, a pod or a GPU, or of any other object of which there may be many.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from driver.errors import ApiError, ClaimError, HardwareError, StateError, TesseraError
from driver.http import Page
from driver.kube.client import RequestObserver
from driver.kube.events import Type
from driver.kube.types import Reference
from driver.metrics import METRICS_PATH, SECONDS, ApiMetrics, metrics_page, process_registry
from driver.model.device import DeviceKind
from driver.model.health import ConditionType
from driver.steps import Moment
from kubelet_plugin.checkpoint.locks import KeyedLocks, LockTimeoutError
from kubelet_plugin.checkpoint.records import ClaimRecord
from kubelet_plugin.checkpoint.store import Checkpoint
from kubelet_plugin.claims.allocation import ClaimReference
from kubelet_plugin.claims.preparer import PreparedDevice
from kubelet_plugin.claims.steps import Observer, Step
from kubelet_plugin.dra.service import ClaimService
from kubelet_plugin.health.conditions import FaultKind
from kubelet_plugin.health.monitor import UNHEALTHY
from kubelet_plugin.metrics.instrumentation import GaugeSources, Instrumentation
from kubelet_plugin.status.events import Reason, RecordEvent

FAILURES = ((ClaimError, "claim"), (HardwareError, "hardware"), (ApiError, "api"), (StateError, "state"))
LOCK, OTHER, DEFECT = "lock", "other", "defect"
RESULTS = SUCCESS, ERROR = "success", "error"

ORPHANS = ("claim", "cdi-spec", "record")
REPAIRS = {Reason.REPAIRED: "device", Reason.RELEASED_LATE: "release", Reason.RECORD_REBUILT: "record"}
"""Kinds of repairs, by the reason of the Event that reports them."""

EVENT_FAILURES = {
    Reason.REPAIR_FAILED: "device-lost",
    Reason.ORPHAN_IN_USE: "orphan-in-use",
    Reason.RECORD_MISSING: "record-missing",
    Reason.RECORD_UNREADABLE: "record-unreadable",
    UNHEALTHY: "gpu",
}
"""Kinds of failures other than a failed prepare or unprepare, by the reason of the Event that reports them."""


def failure_kind(error: Exception) -> str:
    """The kind of failure of a prepare or unprepare."""
    if isinstance(error, LockTimeoutError):
        return LOCK
    if not isinstance(error, TesseraError):
        return DEFECT
    return next((kind for type_, kind in FAILURES if isinstance(error, type_)), OTHER)


class Metrics(Instrumentation):
    """Counters, histograms and gauges of the node plugin. Thread-safe."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or process_registry()
        self._durations()
        self._counters()
        self.requests: RequestObserver | None = ApiMetrics(self.registry).observe

    def _durations(self) -> None:
        histogram = partial(Histogram, registry=self.registry, buckets=SECONDS)
        prepare = histogram(
            "tessera_prepare_duration_seconds", "Time to prepare one claim, waiting for locks included.", ["result"]
        )
        unprepare = histogram(
            "tessera_unprepare_duration_seconds", "Time to unprepare one claim, waiting for locks included.", ["result"]
        )
        step = histogram("tessera_step_duration_seconds", "Duration of a completed step.", ["step"])
        # All series exist from the start, so that the first event is visible as an increase; this is also faster.
        self._prepare = {result: prepare.labels(result).observe for result in RESULTS}
        self._unprepare = {result: unprepare.labels(result).observe for result in RESULTS}
        self._step = {each: step.labels(each.value).observe for each in Step}
        self._publish = histogram("tessera_publish_duration_seconds", "Time to write the slices after one change.")
        self._wait = histogram(
            "tessera_lock_wait_seconds", "Time to acquire the lock of a claim, or the locks of all its GPUs."
        )

    def _counters(self) -> None:
        counter = partial(Counter, registry=self.registry)
        self._writes = counter("tessera_slice_writes_total", "ResourceSlices written or deleted.")
        self._orphans = counter(
            "tessera_orphans_total", "Orphans found: devices, CDI specs or records without a claim.", ["kind"]
        )
        self._repairs = counter("tessera_repairs_total", "Automatic repairs.", ["kind"])
        self._faults = counter("tessera_faults_total", "Failures, by kind.", ["kind"])
        known = ((self._orphans, ORPHANS), (self._repairs, REPAIRS.values()))
        faults = (*(kind for _, kind in FAILURES), LOCK, DEFECT, *EVENT_FAILURES.values())
        for family, kinds in (*known, (self._faults, faults)):
            for kind in kinds:
                family.labels(kind)

    def register_gauges(self, sources: GaugeSources) -> None:
        self.registry.register(NodeGauges(sources, time.time))

    def measure_steps(self, observer: Observer) -> Observer:
        return StepClock(observer, lambda step, seconds: self._step[step](seconds))

    def locks(self) -> KeyedLocks:
        return MeasuredLocks(self._wait.observe)

    def measure_work(self, work: ClaimService) -> ClaimService:
        return MeasuredWork(
            work, self._prepared, self._unprepared, lambda error: self._count_failure(failure_kind(error))
        )

    def slices_written(self, slices: int, seconds: float) -> None:
        self._writes.inc(slices)
        self._publish.observe(seconds)

    def count_events(self, record: RecordEvent) -> RecordEvent:
        return CountedEvents(record, self._event)

    def count_orphan(self, kind: str) -> None:
        self._orphans.labels(kind).inc()

    def _count_failure(self, kind: str) -> None:
        self._faults.labels(kind).inc()

    def pages(self) -> Mapping[str, Page]:
        return {METRICS_PATH: metrics_page(self.registry)}

    def _event(self, reason: str) -> None:
        if reason in REPAIRS:
            self._repairs.labels(REPAIRS[Reason(reason)]).inc()
        elif reason in EVENT_FAILURES:
            self._count_failure(EVENT_FAILURES[reason])

    def _prepared(self, result: str, seconds: float) -> None:
        self._prepare[result](seconds)

    def _unprepared(self, result: str, seconds: float) -> None:
        self._unprepare[result](seconds)


Measure = Callable[[str, float], None]
"""(result, seconds)"""


class MeasuredWork:
    """Claim work that reports the duration and the error of each call."""

    def __init__(
        self, work: ClaimService, prepared: Measure, unprepared: Measure, failed: Callable[[Exception], None]
    ) -> None:
        self._work = work
        self._prepared = prepared
        self._unprepared = unprepared
        self._failed = failed

    def prepare(self, reference: ClaimReference) -> Sequence[PreparedDevice]:
        with self._measured(self._prepared):
            return self._work.prepare(reference)

    def unprepare(self, reference: ClaimReference) -> None:
        with self._measured(self._unprepared):
            self._work.unprepare(reference)

    @contextmanager
    def _measured(self, measure: Measure) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        except Exception as error:
            measure(ERROR, time.perf_counter() - started)
            self._failed(error)
            raise
        measure(SUCCESS, time.perf_counter() - started)


class MeasuredLocks(KeyedLocks):
    """Locks that report how many seconds it took to acquire them."""

    def __init__(self, waited: Callable[[float], None]) -> None:
        super().__init__()
        self._waited = waited

    @contextmanager
    def hold(self, keys: Iterable[str], owner: str) -> Iterator[None]:
        started = time.perf_counter()
        with super().hold(keys, owner):
            self._waited(time.perf_counter() - started)
            yield


class StepClock:
    """A step observer that also reports the duration of the step, without the time of the wrapped observer."""

    def __init__(self, observer: Observer, took: Callable[[Step, float], None]) -> None:
        self._observer = observer
        self._took = took
        self._own = threading.local()  # a step begins and ends in the same thread

    def __call__(self, step: Step, moment: Moment) -> None:
        started = vars(self._own)
        if moment == "after":
            self._took(step, time.perf_counter() - started.pop(step))
        self._observer(step, moment)
        if moment == "before":
            started[step] = time.perf_counter()


class CountedEvents:
    """Events that are also counted, by reason. Copies of a claim's Event on its pods are not counted."""

    def __init__(self, record: RecordEvent, count: Callable[[str], None]) -> None:
        self._record = record
        self._count = count

    def __call__(self, about: Reference, reason: str, message: str, kind: Type) -> None:
        if about.kind != "Pod":
            self._count(reason)
        self._record(about, reason, message, kind)


FAULT_KINDS = (*(kind.value for kind in FaultKind), *(kind.value for kind in ConditionType), "cordoned")


class NodeGauges(Collector):
    """Gauges that are computed from memory at each scrape. ``now`` is the clock of file times (seconds since 1970)."""

    def __init__(self, sources: GaugeSources, now: Callable[[], float]) -> None:
        self._sources = sources
        self._now = now

    def collect(self) -> Iterable[Metric]:
        node = self._sources.node
        records = node.checkpoint.records()
        unfinished = [record for record in records if record.needs_release]
        releasing = [record for record in records if record.releasing]
        devices = [device for record in records for device in record.devices]
        cut = sum(1 for device in devices if device.partition is not None and not device.existing)
        yield _gauge("tessera_partitions", "Partitions that Tessera has cut for claims.", cut)
        yield _gauge(
            "tessera_prepared_claims", "Claims whose devices are ready for their pods.", len(records) - len(unfinished)
        )
        yield _gauge("tessera_releasing_claims", "Claims whose devices still have to be released.", len(releasing))
        yield _gauge(
            "tessera_oldest_unfinished_claim_age_seconds",
            "Age of the oldest checkpoint record of a claim that is being prepared or released; 0 without any.",
            oldest_seconds(node.checkpoint, unfinished, self._now()),
        )
        held, offers = _by_type(device.kind for device in devices), self._offers({each.device for each in devices})
        meaning = "Devices of claims that are prepared, being prepared or being released."
        yield _counts("tessera_held_devices", meaning, "type", held)
        yield _counts("tessera_offers", "Published devices that no such claim holds.", "type", offers)
        yield _gauge("tessera_gpus", "GPUs of this node, healthy or not.", len(node.inventory.gpus))
        yield _gauge("tessera_unhealthy_gpus", "GPUs with at least one unhealthy device.", self._unhealthy())
        faults = {**dict.fromkeys(FAULT_KINDS, 0), **self._sources.faults()}
        yield _counts("tessera_gpu_faults", "Current faults of GPUs; kind cordoned: cordoned GPUs.", "kind", faults)

    def _offers(self, held: set[str]) -> Mapping[str, int]:
        inventory = self._sources.node.inventory
        known = (inventory.device(name) for name in self._sources.published() - held)
        return _by_type(device.kind for device in known if device is not None)

    def _unhealthy(self) -> int:
        inventory, reason = self._sources.node.inventory, self._sources.unhealthy_reason
        return sum(any(reason(device) for device in inventory.devices_on(gpu)) for gpu in inventory.gpus)


def oldest_seconds(checkpoint: Checkpoint, records: Iterable[ClaimRecord], now: float) -> float:
    """Seconds since the oldest of ``records`` was written, without records that were deleted meanwhile."""
    written = []
    for record in records:
        try:
            written.append(checkpoint.path(record.uid).stat().st_mtime)
        except OSError:
            continue
    return max(0.0, now - min(written, default=now))


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(name, meaning, value)


def _counts(name: str, meaning: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(name, meaning, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def _by_type(kinds: Iterable[DeviceKind]) -> dict[str, int]:
    """The number of devices of each type, including 0."""
    found = list(kinds)
    return {kind.value: found.count(kind) for kind in DeviceKind}
