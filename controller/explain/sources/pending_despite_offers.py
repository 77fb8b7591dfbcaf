"""Claims that stay pending although offered devices would satisfy them: the cause lies outside the offers.

A pod is scheduled within a second of a matching offer. If it is not, the scheduler lacks a feature gate, considers the
pool incomplete, waits for something else, or does not run. What it reports itself is quoted, not contradicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import chain
from typing import NamedTuple

from controller.cluster.claim_index import PoolDevice
from controller.cluster.fleet import FleetGpu
from controller.demand.device_search import Budget, SearchOutcome, ValueOf, choose_devices
from controller.demand.feasibility import Nodes
from controller.demand.pending_claims import PendingClaim, Queue
from controller.demand.requirements import ClaimRequirements
from controller.demand.selected_devices import SelectorFailure
from controller.explain.reason import ClaimReason, Reason, ReasonCode
from controller.explain.situation import Situation
from controller.explain.sources.causes_in_pods_and_claims import MAX_LOOKUPS, MAX_LOOKUPS_ONCE, LookedUp
from controller.explain.sources.other_drivers import OtherDrivers
from controller.explain.sources.scheduler_reports import (
    SchedulerActivity,
    age_of,
    names_obstacle,
    no_report,
    report_of,
    reported,
)
from controller.explain.sources.selected_gpus import listed, untolerated
from controller.explain.sources.selector_sentences import failing
from driver.clock import Clock, seconds_time
from driver.kube.types import Condition, Pod
from driver.model.device import Device
from driver.model.offer import Offer, Spot

GATES = (
    "check that it has the feature gates that the API server has: DynamicResourceAllocation, DRAPartitionableDevices"
)

QUOTE_SECONDS = 1.0
"""Time that the scheduler has to take an offered device before its own report is quoted."""

PUBLISHED_STEPS = 300
"""Devices tried on one node among those that its slices offer."""

PUBLISHING_SECONDS = 2.0
"""Time that nodes have to publish what is offered."""


class Since(NamedTuple):
    """The time when something was first seen: ``at`` by the monotonic clock, ``text`` as messages have it."""

    at: float
    text: str


UNKNOWN_SINCE = Since(-math.inf, "")
"""Of what was there before the first look."""


class OfferedDevice(NamedTuple):
    """A published device that is not allocated."""

    gpu: FleetGpu
    device: Device
    name: PoolDevice

    @property
    def whole_gpu(self) -> PoolDevice:
        """As reservations name it."""
        return self.name._replace(device=f"gpu-{self.gpu.number}")


Fitting = Callable[[ClaimRequirements, Nodes, str | None], tuple[OfferedDevice, ...]]
"""Arguments: as of ``_find_fitting``."""


def satisfying(
    requirements: ClaimRequirements, offered: Sequence[OfferedDevice], value_of: ValueOf
) -> tuple[OfferedDevice, ...]:
    """Devices among ``offered``, all of one node, that satisfy ``requirements``, in the order of the requests."""
    published: dict[str, dict[Spot, OfferedDevice]] = {}
    for device in offered:
        published.setdefault(device.gpu.gpu.uuid, {})[device.device.spot] = device
    gpus = list({device.gpu.gpu.uuid: device.gpu for device in offered}.values())
    states, budget = tuple(gpu.state for gpu in gpus), Budget(PUBLISHED_STEPS)
    chosen = choose_devices(gpus, states, requirements, value_of, budget, published)
    return tuple(published[gpu.gpu.uuid][spot.device] for gpu, spot in chosen)


class Sightings:
    """Remembers since when claims are pending and devices offered: the scheduler needs a moment for both."""

    def __init__(self, clock: Clock, *, watching: bool = True) -> None:
        """``watching``: False if there is one look only: claims are pending since their pods' creation."""
        self._clock = clock
        self._watching = watching
        self._claims: dict[str, Since] = {}
        self._devices: dict[PoolDevice, Since] = {}
        self._late: dict[Offer, Since] = {}
        self.looked_up = LookedUp(clock, MAX_LOOKUPS if watching else MAX_LOOKUPS_ONCE)
        """The slices of other drivers."""

    def update(self, situation: Situation) -> None:
        """Note what is there now, and forget what is not."""
        self.looked_up.begin()
        queue = situation.queue
        waiting = (pending for pending in queue.pending if pending.key not in queue.gangs_without_room)
        claims = {pending.uid: pending for pending in waiting if queue.requirements(pending)}
        now = UNKNOWN_SINCE
        if self._watching:
            now = Since(self._clock.monotonic(), f" since {seconds_time(self._clock.now())}")
            self._claims = {uid: self._claims.get(uid, now) for uid in claims}
        else:
            ages = {uid: age_of(claim.pods[0], self._clock) for uid, claim in claims.items()}
            self._claims = {uid: Since(self._clock.monotonic() - age, "") for uid, age in ages.items()}
        self._devices = {name: self._devices.get(name, now) for name in situation.offered.values()}
        self._late = {offer: self._late.get(offer, now) for offer in situation.unpublished}

    @property
    def next_s(self) -> float | None:
        """Seconds until the next claim or device has been there for a moment; None if there is none.

        What is overdue is found by the decisions that follow each other anyway.
        """
        if not self._claims:
            return None
        now, limits = self._clock.monotonic(), (QUOTE_SECONDS, PUBLISHING_SECONDS)
        sightings = (*self._claims.values(), *self._devices.values(), *self._late.values())
        times = (since.at + limit - now for since in sightings for limit in limits)
        return min((seconds for seconds in times if seconds > 0), default=None)

    def is_pending_for(self, pending: PendingClaim, seconds: float) -> bool:
        """Whether the claim has been pending for so long, and its gang has had room."""
        since = self._claims.get(pending.uid)
        return since is not None and self._clock.monotonic() >= since.at + seconds

    def is_offered_for(self, device: PoolDevice, seconds: float) -> bool:
        return self._clock.monotonic() >= self._devices[device].at + seconds

    def offered_since(self, devices: Iterable[OfferedDevice]) -> Since:
        return max(self._devices[device.name] for device in devices)

    def late(self) -> Mapping[Offer, str]:
        """The offers of plans that nodes have not published for a while, and since when, as messages have it."""
        latest = self._clock.monotonic() - PUBLISHING_SECONDS
        return {offer: since.text for offer, since in self._late.items() if since.at <= latest}


class ClaimsDespiteOffers:
    """Why claims are pending in one situation although offered devices would satisfy them."""

    def __init__(
        self,
        situation: Situation,
        sightings: Sightings,
        overdue_seconds: float,
        activity: SchedulerActivity,
    ) -> None:
        self._situation, self._queue = situation, situation.queue
        self._activity = activity
        self._sightings = sightings
        self._overdue_seconds = overdue_seconds
        self._other_drivers = OtherDrivers(self._queue, situation.lookups, sightings.looked_up)
        self._fitting: Fitting = cache(self._find_fitting)

    def reason(self, pending: PendingClaim) -> ClaimReason | None:
        """The reason of a claim; None if it has not been pending for a moment, or if no offer would satisfy it."""
        if not self._sightings.is_pending_for(pending, QUOTE_SECONDS):
            return None
        reserved = self._situation.reserved_for(pending)
        uid = min(self._situation.reserved[reserved[0]]) if reserved else ""
        for pod, requirements, nodes in self._needs(pending):
            if devices := self._fitting(requirements, nodes, uid):
                return self._of_devices(pending, pod, requirements, devices)
        return self._unpublished(pending) or self._all_refused(pending) or self._reserved(pending)

    def _needs(self, pending: PendingClaim) -> Iterator[tuple[Pod, ClaimRequirements, Nodes]]:
        """What the pods of a claim need together, and the nodes where each may run."""
        for pod in pending.pods:
            nodes = self._queue.nodes_for(pod)
            for claim in self._queue.of_pod(pod) if self._queue.monitoring else ():
                if claim.key in self._queue.monitoring:
                    nodes &= self._queue.nodes_with_monitors(claim)
            for requirements in self._queue.combinations(pod):
                yield pod, requirements, nodes

    def _reserved(self, pending: PendingClaim) -> ClaimReason | None:
        """The reason where the devices that would do are reserved for other claims."""
        reserved = self._situation.reserved
        for _, requirements, nodes in self._needs(pending) if reserved else ():
            if devices := self._fitting(requirements, nodes, None):
                names = listed([device.name.device for device in devices if device.whole_gpu in reserved])
                sentence = (
                    f"{names} of node {devices[0].gpu.node} would do, but is reserved for a pod for which others were "
                    "evicted: until that has its devices, or its time is over (docs/taking-back.md)"
                )
                return ClaimReason(pending, ReasonCode.BEHIND, sentence)
        return None

    @cached_property
    def _refusing(self) -> Mapping[str, str]:
        """The nodes that do not publish what they should, and why."""
        gpus, situation = self._queue.feasibility.fleet.gpus, self._situation
        late = {gpus[offer.gpu].node: since for offer, since in self._sightings.late().items() if offer.gpu in gpus}
        lagging = {
            node: f"has not published what its plan offers{since}; does its node plugin run?"
            for node, since in late.items()
        }
        return {**lagging, **situation.refusing, **situation.silent}

    @cached_property
    def _by_node(self) -> Mapping[str, Sequence[OfferedDevice]]:
        """The devices that have been offered for a moment, in a fixed order: every view names the same device."""
        by_node: dict[str, list[OfferedDevice]] = {}
        for offer, name in self._situation.offered.items():
            if self._sightings.is_offered_for(name, QUOTE_SECONDS):
                gpu = self._queue.feasibility.fleet.gpus[offer.gpu]
                if (device := gpu.device(offer.spot)) is not None:
                    by_node.setdefault(gpu.node, []).append(OfferedDevice(gpu, device, name))
        return {
            node: sorted(devices, key=lambda device: (device.gpu.number, device.name.device))
            for node, devices in by_node.items()
        }

    def _find_fitting(
        self, requirements: ClaimRequirements, nodes: Nodes, uid: str | None
    ) -> tuple[OfferedDevice, ...]:
        """Devices on one of ``nodes`` that satisfy ``requirements``, of a complete pool if possible.

        Reserved ones only if they are for the claim or pod ``uid``; None: all.
        """
        silent, value_of = self._situation.silent, self._queue.feasibility.matching.value
        reserved = {} if uid is None else self._situation.reserved
        for node in sorted(self._by_node.keys() & nodes, key=lambda node: (node in silent, node)):
            offered = [device for device in self._by_node[node] if uid in reserved.get(device.whole_gpu, {uid})]
            if devices := satisfying(requirements, offered, value_of):
                return devices
        return ()

    def _of_devices(
        self, pending: PendingClaim, pod: Pod, served: ClaimRequirements, devices: Sequence[OfferedDevice]
    ) -> ClaimReason | None:
        cause = self._cause(pending, pod, served, devices)
        if cause is None:
            return None
        names = [device.name.device for device in devices]
        offered = "offered" if self._situation.is_fence_known else "published"
        sentence = (
            f"{cause.sentence}; {listed(names)} of node {devices[0].gpu.node} would do and "
            f"{'have' if len(names) > 1 else 'has'} been {offered}{self._sightings.offered_since(devices).text}"
        )
        return ClaimReason(pending, cause.code, sentence, cause.permanent)

    def _cause(
        self, pending: PendingClaim, pod: Pod, served: ClaimRequirements, devices: Sequence[OfferedDevice]
    ) -> Reason | None:
        """The known reason why ``pod`` is not scheduled although ``devices`` are offered, which satisfy ``served``.

        Before it is overdue, only reasons that do not pass by themselves within a moment.
        """
        queue, silent = self._queue, self._situation.silent
        node, condition = devices[0].gpu.node, report_of(pod)
        if node in silent:
            silence = f"the scheduler takes nothing from node {node}, which {silent[node]}"
            return Reason(ReasonCode.NOT_PUBLISHED, silence, permanent=True)
        if (tainted := _taint_text(queue, served, devices)) is not None:
            return Reason(ReasonCode.TAINTED, tainted, permanent=True)
        if condition is None:
            is_due = self._is_overdue(pending, devices) or self._activity.is_absent(pod)
            return Reason(ReasonCode.UNUSED, no_report(pod), permanent=True) if is_due else None
        if names_obstacle(condition):
            failure = failing(_failure(queue, pending, condition))
            return Reason(ReasonCode.UNUSED, reported(pod, condition) + failure, permanent=True)
        offered = [(device.gpu, device.device.spot) for device in self._by_node[node]]
        if condition.lacks_devices and (unmet := self._other_drivers.unmet(pending, pod, node, offered)):
            sentence = f"devices of another driver are missing: {'; '.join(need.text for need in unmet)}"
            return Reason(ReasonCode.UNUSED, sentence, any(need.permanent for need in unmet))
        if not self._is_overdue(pending, devices):
            return None
        gates = f"; {GATES}" if condition.lacks_devices else ""
        return Reason(ReasonCode.UNUSED, reported(pod, condition) + gates, permanent=True)

    def _is_overdue(self, pending: PendingClaim, devices: Sequence[OfferedDevice]) -> bool:
        """Whether the claim has been pending, and all of ``devices`` offered, for longer than scheduling takes."""
        limit = self._overdue_seconds
        are_offered = all(self._sightings.is_offered_for(device.name, limit) for device in devices)
        return are_offered and self._sightings.is_pending_for(pending, limit)

    def _unpublished(self, pending: PendingClaim) -> ClaimReason | None:
        """The reason where every node with enough free devices is silent or refuses offers."""
        if not self._sightings.is_pending_for(pending, PUBLISHING_SECONDS):
            return None
        nodes, outcomes_of = self._queue.nodes(pending), self._queue.feasibility.outcomes
        outcomes = chain.from_iterable(
            outcomes_of(requirements, nodes) for requirements in self._queue.alternatives(pending)
        )
        fitting = sorted({node for node, outcome in outcomes if outcome is SearchOutcome.FITS})
        if not fitting or any(node not in self._refusing for node in fitting):
            return None
        texts = listed([f"{node}, which {self._refusing[node]}" for node in fitting])
        sentence = f"enough is free only on {texts} (tessera status)"
        return ClaimReason(pending, ReasonCode.NOT_PUBLISHED, sentence, permanent=True)

    def _all_refused(self, pending: PendingClaim) -> ClaimReason | None:
        """The reason where enough is free, but the scheduler refuses a request for all devices."""
        names = [request.name for request in self._queue.requests(pending) if request.count is None]
        pod = pending.pods[0]
        report, lasts = report_of(pod), self._sightings.is_pending_for(pending, PUBLISHING_SECONDS)
        if not (names and report and lasts) or self._queue.find_node(pending).outcome is not SearchOutcome.FITS:
            return None
        sentence = (
            f"request {names[0]} asks for all devices that it selects on a node, and the scheduler can not allocate "
            "all that are published: partitions that overlap exclude each other; ask for a number of devices instead "
            f"(allocationMode ExactCount); {reported(pod, report)}"
        )
        return ClaimReason(pending, ReasonCode.UNUSED, sentence, permanent=True)


def _failure(queue: Queue, pending: PendingClaim, report: Condition) -> SelectorFailure | None:
    """A device on which a selector of the claim fails as the scheduler reports."""
    groups = (request.selector.among(queue.feasibility.fleet) for request in queue.requests(pending))
    failures = (failure for group in groups for matches, _ in group for failure in matches.failures)
    return next((failure for failure in failures if failure.message in report.message), None)


def _taint_text(queue: Queue, served: ClaimRequirements, devices: Sequence[OfferedDevice]) -> str | None:
    """The DeviceTaintRule that taints one of ``devices``, as text; None if all taints are tolerated."""
    requests = [request for request in served.requests for _ in range(request.count or 0)]
    for request, device in zip(requests, devices, strict=True):
        pool, name = device.name.pool, device.name.device
        for rule in untolerated(queue.cluster.taint_rules, [request]):
            if rule.selects(queue.feasibility.matching.driver, pool, name):
                taints = f"the DeviceTaintRule {rule.metadata.name} taints {name} with {rule.spec.taint.text}"
                return f"{taints}, which request {request.name} does not tolerate"
    return None
