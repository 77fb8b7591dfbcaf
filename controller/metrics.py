"""The controller's own metrics, all listed in docs/metrics.md; loaded only if metrics are asked for."""

from __future__ import annotations

import time
from collections import Counter as Count
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from heapq import nsmallest
from itertools import product
from operator import itemgetter
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controller.cluster.cache import Snapshot
from controller.cluster.fleet import Fleet
from controller.demand.pending_claims import PendingClaim, Queue
from controller.eviction.evictor import Outcome, Trigger
from controller.report.larger_devices_taken import LargerDevicesTaken, TakenSize
from controller.report.slice_states import GpuUse, RequestedKinds, SliceState, capacity_of
from driver.kube.types import Claim, GpuNodePlan
from driver.model.offer import Offer, OfferKind
from driver.model.plan import FailureCause
from driver.model.shared_memory import GIB

SECONDS = (0.5, 1.0, 2.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
"""Upper bounds of the buckets of waiting times: seconds to a day."""

UNKNOWN_CLASS = "unknown"
"""Label of claims whose DeviceClass does not exist: tenants may write any name."""

WAITS = "Waits"
"""Reason of a pending claim for which there are free devices: the scheduler has not allocated them yet."""


MAX_OLDEST_CLAIMS = 100
"""Maximum series of the age of pending claims: there may be any number of namespaces."""


class CountedDecision(NamedTuple):
    """What a decision was made from. ``reasons`` are by key of the claim, ``classes`` the names of DeviceClasses."""

    fleet: Fleet
    offered: frozenset[Offer]
    requested: frozenset[OfferKind]
    pending: Sequence[PendingClaim]
    reasons: Mapping[str, str]
    classes: frozenset[str]
    plans: Mapping[str, GpuNodePlan]


class ControllerMetrics(Collector):
    """Metrics are computed at a scrape, in its thread, from the leader's last decision."""

    def __init__(self, registry: CollectorRegistry, now: Callable[[], float] = time.time) -> None:
        self._decided: CountedDecision | None = None
        self._requested = RequestedKinds()
        self._now = now
        meaning = "Time from the creation of a claim to its allocation."
        self._allocated = Histogram(
            "tessera_claim_allocation_duration_seconds", meaning, registry=registry, buckets=SECONDS
        )
        self._evictions = Counter(
            "tessera_evictions_total",
            "Pods that could not start on their node, by why and by what became of them.",
            ["trigger", "outcome"],
            registry=registry,
        )
        for labels in product(Trigger, Outcome):
            self._evictions.labels(*labels)
        self._larger = Counter(
            "tessera_larger_devices_taken_total",
            "Devices allocated to claims that accept smaller ones of the same GPU: a part of it, or all.",
            ["size"],
            registry=registry,
        )
        for size in TakenSize:
            self._larger.labels(size)
        self._larger_devices_taken = LargerDevicesTaken()
        registry.register(self)

    def claim_changed(self, old: Claim | None, new: Claim | None) -> None:
        """Observe the change of a claim; one that was allocated before it was seen does not count."""
        if old is None or new is None or old.status.allocation is not None or new.status.allocation is None:
            return
        self._larger_devices_taken.note(new)
        created = new.metadata.creation_timestamp
        if created is not None:
            self._allocated.observe(max(0.0, self._now() - datetime.fromisoformat(created).timestamp()))

    def decision_made(
        self, queue: Queue, fleet: Fleet, offered: Iterable[Offer], reasons: Mapping[str, str], snapshot: Snapshot
    ) -> None:
        """Note a decision. ``reasons`` are by key of the claim.

        Only notes: counting everything takes as long as a decision.
        """
        self._requested.update(queue, fleet, snapshot.changed.names, self._now())
        for size, count in self._larger_devices_taken.update(queue, fleet).items():
            self._larger.labels(size).inc(count)
        classes = frozenset(device_class.metadata.name for device_class in queue.cluster.classes)
        self._decided = CountedDecision(
            fleet, frozenset(offered), self._requested.kinds, queue.pending, reasons, classes, snapshot.plans
        )

    def leadership_lost(self) -> None:
        self._decided = None

    def eviction(self, trigger: Trigger, outcome: Outcome) -> None:
        self._evictions.labels(trigger, outcome).inc()

    def collect(self) -> Iterable[Metric]:
        slices = GaugeMetricFamily("tessera_slices", "Memory slices of GPUs by state.", labels=["product", "state"])
        gpus = GaugeMetricFamily("tessera_gpus_by_use", "GPUs by use.", labels=["product", "use"])
        meaning = "GPUs that would become whole if partitions were packed on the fewest GPUs."
        scattered = GaugeMetricFamily("tessera_gpus_lost_to_scatter", meaning, labels=["product"])
        shared = GaugeMetricFamily(
            "tessera_shared_memory_bytes", "Memory of shared devices by state.", labels=["product", "state"]
        )
        pending = GaugeMetricFamily("tessera_pending_claims", "Pending claims.", labels=["class", "reason"])
        unprepared = GaugeMetricFamily(
            "tessera_unprepared_claims", "Allocated claims that their node can not prepare.", labels=["cause"]
        )
        meaning = "Age of the claim that has been pending for longest."
        oldest = GaugeMetricFamily("tessera_oldest_pending_claim_age_seconds", meaning, labels=["class", "namespace"])
        decided = self._decided
        if decided is not None:
            capacity = capacity_of(decided.fleet, decided.offered, decided.requested)
            for product in sorted({product for product, _ in capacity.gpus}):
                for state in SliceState:
                    slices.add_metric([product, state.value], capacity.slices.get((product, state), 0))
                for use in GpuUse:
                    gpus.add_metric([product, use.value], capacity.gpus.get((product, use), 0))
                scattered.add_metric([product], capacity.scattered.get(product, 0))
            for labels, gib in _shared_gib(decided.fleet).items():
                shared.add_metric(labels, gib * GIB)
            for labels, count in _pending_by_class_and_reason(decided).items():
                pending.add_metric(labels, count)
            for labels, since in _oldest_by_class_and_namespace(decided).items():
                oldest.add_metric(labels, max(0.0, self._now() - since))
            reported = (plan.status.unprepared for plan in decided.plans.values())
            causes = Count(claim.cause for claims in reported for claim in claims)
            for cause in FailureCause:
                unprepared.add_metric([cause.value], causes[cause])
        yield from (slices, gpus, scattered, shared, pending, oldest, unprepared)


def _shared_gib(fleet: Fleet) -> Mapping[tuple[str, str], int]:
    """What claims have of shared devices, and what they can still get, by product."""
    amounts: Count[tuple[str, str]] = Count()
    for gpu in fleet:
        if gpu.shared is not None or gpu.state.used:
            amounts[gpu.gpu.product_name, "held"] += gpu.state.used
            amounts[gpu.gpu.product_name, "free"] += gpu.state.left
    return amounts


def _pending_by_class_and_reason(decided: CountedDecision) -> Mapping[tuple[str, str], int]:
    return Count(
        (_class_of(pending, decided.classes), decided.reasons.get(pending.key, WAITS)) for pending in decided.pending
    )


def _oldest_by_class_and_namespace(decided: CountedDecision) -> Mapping[tuple[str, str], float]:
    """Since when the oldest claims have been pending (seconds since 1970), MAX_OLDEST_CLAIMS of them."""
    oldest: dict[tuple[str, str], float] = {}
    for pending in decided.pending:
        if (since := _pending_since(pending)) is not None:
            labels = _class_of(pending, decided.classes), pending.claim.metadata.namespace
            oldest[labels] = min(since, oldest.get(labels, since))
    return dict(nsmallest(MAX_OLDEST_CLAIMS, oldest.items(), key=itemgetter(1)))


def _pending_since(pending: PendingClaim) -> float | None:
    """Creation of the claim or of its first pending pod, whichever is later: without a pod no claim is allocated."""
    pods = [pod.metadata.creation_timestamp for pod in pending.pods]
    created = [pending.claim.metadata.creation_timestamp, min(filter(None, pods), default=None)]
    return max((datetime.fromisoformat(time).timestamp() for time in created if time), default=None)


def _class_of(pending: PendingClaim, classes: Collection[str]) -> str:
    """The DeviceClass of its first request."""
    first = next(iter(pending.claim.class_names), "")
    return first if first in classes else UNKNOWN_CLASS
