"""The node plugin's metrics for Prometheus. Every name is in docs/metrics.md; loaded only where they are asked for.

No label has the name of a claim, a pod, a GPU or anything else of which there may be many.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram

from driver.errors import ApiError, ClaimError, HardwareError, StateError, TesseraError
from driver.kube.transport import RequestObserver
from driver.metrics.api import SECONDS, ApiMetrics
from driver.metrics.endpoint import PATH, metrics_page
from driver.metrics.process import process_registry
from driver.web import Page
from kubelet_plugin.gauges import NodeGauges
from kubelet_plugin.health import UNHEALTHY
from kubelet_plugin.locks import KeyedLocks, LockTimeoutError
from kubelet_plugin.measured import RESULTS, CountedEvents, MeasuredLocks, MeasuredWork, StepClock
from kubelet_plugin.meter import Meter, Sources
from kubelet_plugin.service import ClaimWork
from kubelet_plugin.steps import Observer, Step
from kubelet_plugin.telling import Reason, Record

FAULTS = ((ClaimError, "claim"), (HardwareError, "hardware"), (ApiError, "api"), (StateError, "state"))
LOCK, OTHER, DEFECT = "lock", "other", "defect"

ORPHANS = ("claim", "cdi-spec", "record")
REPAIRS = {Reason.REPAIRED: "device", Reason.RELEASED_LATE: "release", Reason.RECORD_REBUILT: "record"}
"""By the Event that tells of it."""

TOLD_FAULTS = {
    Reason.REPAIR_FAILED: "device-lost",
    Reason.ORPHAN_IN_USE: "orphan-in-use",
    Reason.RECORD_UNREADABLE: "record-unreadable",
    UNHEALTHY: "gpu",
}
"""Faults that are no failed prepare or unprepare: by the Event, too."""


def fault_kind(error: Exception) -> str:
    """The word for what made a prepare or unprepare fail."""
    if isinstance(error, LockTimeoutError):
        return LOCK
    if not isinstance(error, TesseraError):
        return DEFECT
    return next((kind for type_, kind in FAULTS if isinstance(error, type_)), OTHER)


class Metrics(Meter):
    """Counts and times what the node plugin does. Thread-safe."""

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
        step = histogram("tessera_step_duration_seconds", "Time of a step that was carried out whole.", ["step"])
        # All there from the start, so that the first of anything is seen as an increase; and found more quickly.
        self._prepare = {result: prepare.labels(result).observe for result in RESULTS}
        self._unprepare = {result: unprepare.labels(result).observe for result in RESULTS}
        self._step = {each: step.labels(each.value).observe for each in Step}
        self._publish = histogram(
            "tessera_publish_duration_seconds", "Time to write the slices that one change made necessary."
        )
        self._wait = histogram(
            "tessera_lock_wait_seconds", "Time until a claim had its own lock, or those of all its GPUs."
        )

    def _counters(self) -> None:
        counter = partial(Counter, registry=self.registry)
        self._writes = counter("tessera_slice_writes_total", "ResourceSlices written or deleted.")
        self._orphans = counter("tessera_orphans_total", "Things found that no claim has any more.", ["kind"])
        self._repairs = counter("tessera_repairs_total", "Things made again or cleared away by itself.", ["kind"])
        self._faults = counter("tessera_faults_total", "Failures, by what failed.", ["kind"])
        known = ((self._orphans, ORPHANS), (self._repairs, REPAIRS.values()))
        faults = (*(kind for _, kind in FAULTS), LOCK, DEFECT, *TOLD_FAULTS.values())
        for family, kinds in (*known, (self._faults, faults)):
            for kind in kinds:
                family.labels(kind)

    def read_from(self, sources: Sources) -> None:
        self.registry.register(NodeGauges(sources, time.time))

    def observer(self, observer: Observer) -> Observer:
        return StepClock(observer, lambda step, seconds: self._step[step](seconds))

    def locks(self) -> KeyedLocks:
        return MeasuredLocks(self._wait.observe)

    def work(self, work: ClaimWork) -> ClaimWork:
        return MeasuredWork(work, self._prepared, self._unprepared, lambda error: self.fault(fault_kind(error)))

    def written(self, slices: int, seconds: float) -> None:
        self._writes.inc(slices)
        self._publish.observe(seconds)

    def told(self, record: Record) -> Record:
        return CountedEvents(record, self._event)

    def orphan(self, kind: str) -> None:
        self._orphans.labels(kind).inc()

    def fault(self, kind: str) -> None:
        self._faults.labels(kind).inc()

    def pages(self) -> Mapping[str, Page]:
        return {PATH: metrics_page(self.registry)}

    def _event(self, reason: str) -> None:
        if reason in REPAIRS:
            self._repairs.labels(REPAIRS[Reason(reason)]).inc()
        elif reason in TOLD_FAULTS:
            self.fault(TOLD_FAULTS[reason])

    def _prepared(self, result: str, seconds: float) -> None:
        self._prepare[result](seconds)

    def _unprepared(self, result: str, seconds: float) -> None:
        self._unprepare[result](seconds)
