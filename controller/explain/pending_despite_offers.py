"""Claims that stay pending although offered devices would satisfy them: the cause lies outside the offers.

A pod is scheduled within a second of a matching offer. If it is not, the scheduler lacks a feature gate, regards the
pool as incomplete, waits for something else, or does not run. What it reports itself is quoted, not contradicted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import NamedTuple

from controller.cluster.claim_index import PoolDevice
from controller.cluster.fleet import FleetGpu
from controller.demand.device_search import Outcome, ValueOf, find_devices
from controller.demand.feasibility import Nodes
from controller.demand.pending_claims import PendingClaim, Queue
from controller.demand.requirements import ClaimRequirements, Refusal
from controller.demand.selected_devices import Failure
from controller.explain.availability import listed, untolerated
from controller.explain.reason import ClaimReason, ReasonCode
from controller.explain.scheduler_reports import SchedulerActivity, names_obstacle, no_report, report_of, reported
from controller.explain.sentences import failing
from driver.kube.clock import Clock, seconds_time
from driver.kube.reads import DevicesByNode
from driver.kube.types import Condition, ExactDeviceRequest, Pod
from driver.model.device import Device
from driver.model.offer import Offer, Spot

GATES = (
    "check that it has the feature gates that the API server has: DynamicResourceAllocation, DRAPartitionableDevices"
)


QUOTE_SECONDS = 1.0
"""Time that the scheduler has to take an offered device before its own report is quoted."""

SILENT_SECONDS = 2.0
"""Time that nodes have to publish what is offered."""


LOOKUP_INTERVAL_SECONDS, LOOKUP_SHARE, MAX_DRIVERS = 1.5, 20.0, 8
"""Least time until the devices of another driver are read again, also as a multiple of the time that it takes, and the
number of drivers for which they are kept."""

DRIVER = re.compile(r"device\.driver\s*==\s*[\"']([^\"']+)[\"']")
"""The name of the driver in a selector."""

LookUp = Callable[[str], DevicesByNode | None]


class Since(NamedTuple):
    """The time when something was first seen: ``at`` by the monotonic clock, ``text`` as messages have it."""

    at: float
    text: str


class Standing(NamedTuple):
    """A published device that is not allocated."""

    entry: FleetGpu
    device: Device
    name: PoolDevice


def satisfying(
    requirements: ClaimRequirements, standing: Sequence[Standing], value_of: ValueOf
) -> tuple[Standing, ...]:
    """Devices among ``standing``, all of one node, that satisfy ``requirements``, in the order of the requests."""
    published: dict[str, dict[Spot, Standing]] = {}
    for each in standing:
        published.setdefault(each.entry.gpu.uuid, {})[each.device.spot] = each
    gpus = list({each.entry.gpu.uuid: each.entry for each in standing}.values())
    found = find_devices(gpus, published, requirements, value_of)
    return tuple(published[entry.gpu.uuid][spot] for entry, spot in found)


class UnscheduledClaims:
    """Remembers since when claims are pending and devices offered: the scheduler needs a moment for both."""

    def __init__(
        self,
        overdue_seconds: float,
        clock: Clock,
        devices_of: LookUp = lambda _: None,
        *,
        watching: bool = True,
    ) -> None:
        """``devices_of``: the published devices of another driver, None if they are not known.

        ``watching``: False if ``reasons`` is called once only: claims are pending since their pods' creation.
        """
        self._overdue_seconds = overdue_seconds
        self._clock = clock
        self._watching = watching
        self._claims: dict[str, Since] = {}
        self._devices: dict[PoolDevice, Since] = {}
        self._devices_of = devices_of
        self._looked_up: dict[str, tuple[float, DevicesByNode | None]] = {}
        """When the devices of another driver are to be read again, and what they were."""
        self._late: dict[Offer, Since] = {}

    def reasons(
        self,
        queue: Queue,
        standing: Mapping[Offer, PoolDevice],
        silent: Mapping[str, str],
        refusing: Mapping[str, str],
        unpublished: Iterable[Offer] = (),
    ) -> list[ClaimReason]:
        """One reason for each claim that is pending beside ``standing``, the offered devices.

        ``silent`` are the nodes that publish nothing that the scheduler takes, ``refusing`` those that do not publish
        all offers of their plans, and why; ``unpublished`` offers of plans that nodes follow and do not publish yet.
        """
        waiting = (each for each in queue.pending if each.key not in queue.held_back)
        claims = {_uid(each): each for each in waiting if queue.requirements(each)}
        self._claims = {uid: self._claims.get(uid) or self._since(each) for uid, each in claims.items()}
        self._devices = {name: self._devices.get(name) or self._now() for name in standing.values()}
        self._late = {offer: self._late.get(offer) or self._now() for offer in unpublished}
        refusing = {**self._lagging(queue), **refusing}
        due = [each for each in queue.pending if self._lasts(self._claims.get(_uid(each)), QUOTE_SECONDS)]
        if not due:
            return []
        by_node = self._by_node(queue, standing)
        activity = SchedulerActivity(queue)

        @cache
        def fitting(requirements: ClaimRequirements, nodes: Nodes) -> tuple[Standing, ...]:
            """Devices on one of ``nodes`` that satisfy ``requirements``, of a complete pool if possible."""
            ordered = sorted(by_node.keys() & nodes, key=lambda node: (node in silent, node))
            tried = (satisfying(requirements, by_node[node], queue.feasibility.matching.value) for node in ordered)
            return next(filter(None, tried), ())

        found = (self._reason(queue, pending, fitting, silent, refusing, activity) for pending in due)
        return [reason for reason in found if reason is not None]

    @property
    def next_s(self) -> float | None:
        """Seconds until the next claim or device has been there for a moment; None if there is none.

        What is overdue is found by the decisions that follow each other anyway.
        """
        if not self._claims:
            return None
        now, limits = self._clock.monotonic(), (QUOTE_SECONDS, SILENT_SECONDS)
        known = (*self._claims.values(), *self._devices.values(), *self._late.values())
        times = (since.at + limit - now for since in known for limit in limits)
        return min((seconds for seconds in times if seconds > 0), default=None)

    def _now(self) -> Since:
        if not self._watching:
            return Since(-math.inf, "")
        return Since(self._clock.monotonic(), f" since {seconds_time(self._clock.now())}")

    def _since(self, pending: PendingClaim) -> Since:
        created = pending.pods[0].metadata.creation_timestamp
        if self._watching or created is None:
            return self._now()
        age = (self._clock.now() - datetime.fromisoformat(created)).total_seconds()
        return Since(self._clock.monotonic() - age, "")

    def _lasts(self, since: Since | None, seconds: float) -> bool:
        return since is not None and self._clock.monotonic() >= since.at + seconds

    def _look_up(self, driver: str) -> DevicesByNode | None:
        began = self._clock.monotonic()
        due, known = self._looked_up.get(driver, (-math.inf, None))
        if began >= due:
            known, ended = self._devices_of(driver), self._clock.monotonic()
            due = ended + max(LOOKUP_INTERVAL_SECONDS, LOOKUP_SHARE * (ended - began))
            self._looked_up = {**dict(list(self._looked_up.items())[-MAX_DRIVERS:]), driver: (due, known)}
        return known

    def _lagging(self, queue: Queue) -> dict[str, str]:
        """The nodes that have not published an offer for a while."""
        gpus = queue.feasibility.fleet.gpus
        late = [each for each, since in self._late.items() if self._lasts(since, SILENT_SECONDS)]
        since = {gpus[each.gpu].node: self._late[each].text for each in late if each.gpu in gpus}
        return {
            node: f"has not published what its plan offers{at}; does its node plugin run?" for node, at in since.items()
        }

    def _by_node(self, queue: Queue, standing: Mapping[Offer, PoolDevice]) -> dict[str, list[Standing]]:
        found: dict[str, list[Standing]] = {}
        for offer, name in standing.items():
            if self._lasts(self._devices[name], QUOTE_SECONDS):
                entry = queue.feasibility.fleet.gpus[offer.gpu]
                if (device := entry.device(offer.spot)) is not None:
                    found.setdefault(entry.node, []).append(Standing(entry, device, name))
        # In a fixed order: the Event of a claim and ``tessera why`` name the same device.
        return {node: sorted(each, key=lambda one: (one.entry.number, one.name.device)) for node, each in found.items()}

    def _reason(
        self,
        queue: Queue,
        pending: PendingClaim,
        fitting: Callable[[ClaimRequirements, Nodes], tuple[Standing, ...]],
        silent: Mapping[str, str],
        refusing: Mapping[str, str],
        activity: SchedulerActivity,
    ) -> ClaimReason | None:
        pod, served, devices = next(_served_pods(queue, pending, fitting), (None, None, ()))
        if pod is None or served is None:
            return self._unpublished(queue, pending, {**refusing, **silent}) or self._all_refused(queue, pending)
        since = max(self._devices[each.name] for each in devices)
        overdue = all(self._lasts(each, self._overdue_seconds) for each in (self._claims[_uid(pending)], since))
        if report_of(pod) is None:
            overdue |= activity.is_absent(pod, self._clock)
        cause = _cause(queue, pending, pod, served, devices, silent, self._look_up, overdue=overdue)
        if cause is None:
            return None
        code, text = cause
        names = [each.name.device for each in devices]
        sentence = (
            f"{listed(names)} of node {devices[0].entry.node} would do and "
            f"{'are' if len(names) > 1 else 'is'} offered{since.text}, but nothing is allocated: "
        )
        return ClaimReason(pending, code, sentence + text, permanent=True)

    def _unpublished(self, queue: Queue, pending: PendingClaim, silent: Mapping[str, str]) -> ClaimReason | None:
        """The reason where every node with enough free devices is silent or refuses offers."""
        requirements = queue.requirements(pending)
        if isinstance(requirements, Refusal) or not self._lasts(self._claims[_uid(pending)], SILENT_SECONDS):
            return None
        nodes = queue.nodes(pending)
        found = (outcome for each in requirements for outcome in queue.feasibility.outcomes(each, nodes))
        fit = sorted({node for node, outcome in found if outcome is Outcome.FITS})
        if not fit or any(node not in silent for node in fit):
            return None
        texts = listed([f"{node}, which {silent[node]}" for node in fit])
        sentence = f"enough is free only on {texts} (tessera status)"
        return ClaimReason(pending, ReasonCode.NOT_PUBLISHED, sentence, permanent=True)

    def _all_refused(self, queue: Queue, pending: PendingClaim) -> ClaimReason | None:
        """The reason where enough is free, but the scheduler refuses a request for all devices."""
        requirements = queue.requirements(pending)
        alternatives = () if isinstance(requirements, Refusal) else requirements
        names = [one.name for each in alternatives for one in each.requests if one.count is None]
        pod = pending.pods[0]
        report, lasts = report_of(pod), self._lasts(self._claims[_uid(pending)], SILENT_SECONDS)
        if not (names and report and lasts) or queue.found(pending).outcome is not Outcome.FITS:
            return None
        sentence = (
            f"request {names[0]} asks for all devices that it selects on a node, and the scheduler can not allocate "
            "all that are published: partitions that overlap exclude each other; ask for a number of devices instead "
            f"(allocationMode ExactCount); {reported(pod, report)}"
        )
        return ClaimReason(pending, ReasonCode.UNUSED, sentence, permanent=True)


def _cause(
    queue: Queue,
    pending: PendingClaim,
    pod: Pod,
    served: ClaimRequirements,
    devices: Sequence[Standing],
    silent: Mapping[str, str],
    look_up: LookUp,
    *,
    overdue: bool,
) -> tuple[ReasonCode, str] | None:
    """The known cause why ``pod`` is not scheduled although ``devices`` are offered, which satisfy ``served``.

    Before it is ``overdue``, only causes that do not pass by themselves within a moment.
    """
    node, condition = devices[0].entry.node, report_of(pod)
    if node in silent:
        return ReasonCode.NOT_PUBLISHED, f"the scheduler takes nothing from node {node}, which {silent[node]}"
    if (tainted := _taint_rule(queue, served, devices)) is not None:
        return ReasonCode.TAINTED, tainted
    if condition is None:
        return (ReasonCode.UNUSED, no_report(pod)) if overdue else None
    if names_obstacle(condition):
        return ReasonCode.UNUSED, reported(pod, condition) + failing(_failure(queue, pending, condition))
    if condition.lacks_devices and (others := _needs_of_other_drivers(queue, pending, pod, node, look_up)):
        text = f"the pod also needs devices of another driver, {'; '.join(others)} ({reported(pod, condition)})"
        return ReasonCode.UNUSED, text
    if not overdue:
        return None
    gates = f"; {GATES}" if condition.lacks_devices else ""
    return ReasonCode.UNUSED, reported(pod, condition).rstrip(". ") + gates


def _failure(queue: Queue, pending: PendingClaim, report: Condition) -> Failure | None:
    """A device on which a selector of the claim fails as the scheduler reports."""
    requirements = queue.requirements(pending)
    requests = () if isinstance(requirements, Refusal) else (one for each in requirements for one in each.requests)
    found = (matches for one in requests for matches, _ in one.selector.among(queue.feasibility.fleet))
    return next((each for matches in found for each in matches.failures if each.message in report.message), None)


def _taint_rule(queue: Queue, served: ClaimRequirements, devices: Sequence[Standing]) -> str | None:
    """The DeviceTaintRule that closes one of ``devices``, unless its request tolerates the taint."""
    requests = [request for request in served.requests for _ in range(request.count or 0)]
    for request, each in zip(requests, devices, strict=True):
        for rule in untolerated(queue.cluster.taint_rules, [request]):
            if rule.selects(queue.feasibility.matching.driver, each.name.pool, each.name.device):
                taints = (
                    f"the DeviceTaintRule {rule.metadata.name} taints {each.name.device} with {rule.spec.taint.text}"
                )
                return f"{taints}, which request {request.name} does not tolerate"
    return None


def _needs_of_other_drivers(queue: Queue, pending: PendingClaim, pod: Pod, node: str, look_up: LookUp) -> list[str]:
    """The requests of the pod's claims that are for no device of ours, and what ``node`` has for each."""
    found = []
    for each in queue.of_pod(pod):
        requirements = queue.requirements(each)
        of_ours = () if isinstance(requirements, Refusal) else requirements
        ours = {request.name for one in of_ours for request in one.requests}
        for request in each.claim.spec.devices.requests:
            if any(request.name_of(one) in ours or one.admin_access for one in request.alternatives):
                continue
            attributes = [
                constraint.match_attribute
                for constraint in each.claim.spec.devices.constraints
                if constraint.match_attribute and (not constraint.requests or request.name in constraint.requests)
            ]
            same = f" and the same {listed(attributes)} as the GPU" if attributes and ours else ""
            of_claim = "" if each is pending else f" of claim {each.claim.metadata.name}"
            wanted = request.alternatives[0]
            name = f"request {request.name}{of_claim} (class {wanted.device_class_name})"
            found.append(f"{name}: {_there(queue, wanted, node, look_up, same)}")
    return found


def _there(queue: Queue, wanted: ExactDeviceRequest, node: str, look_up: LookUp, same: str) -> str:
    """What ``node`` has for a request of another driver, and why the scheduler does not take it."""
    classes = (each.spec.selectors for each in queue.cluster.classes if each.metadata.name == wanted.device_class_name)
    texts = [each.cel.expression for selectors in (*classes, wanted.selectors) for each in selectors if each.cel]
    driver = next((found[1] for text in texts if (found := DRIVER.search(text))), "")
    devices = look_up(driver) if driver else None
    if devices is None or "" in devices:
        return f"none that it selects{same} is free on node {node}"
    if not (there := devices.get(node)):
        others = (
            f"only {listed(sorted(devices))} {'has' if len(devices) == 1 else 'have'} one"
            if devices
            else "nor has any other"
        )
        return f"node {node} has no device of {driver}, {others}"
    users = queue.cluster.claims.users_of(driver)
    held = sorted({users[device] for device in there if device in users})
    by = f"{len(held)} {'claim' if len(held) == 1 else 'claims'}: {listed(held)}"
    if all(device in users for device in there):
        each = "the only device" if len(there) == 1 else f"each of the {len(there)} devices"
        return f"{each} of {driver} on node {node} is held, by {by}"
    rest = f"; the others are held by {by}" if held else ""
    return f"none of the free devices of {driver} on node {node} has what it selects{same}{rest}"


def _uid(pending: PendingClaim) -> str:
    return pending.pods[0].metadata.uid if pending.not_created else pending.claim.metadata.uid


def _served_pods(
    queue: Queue, pending: PendingClaim, fitting: Callable[[ClaimRequirements, Nodes], tuple[Standing, ...]]
) -> Iterator[tuple[Pod, ClaimRequirements, tuple[Standing, ...]]]:
    """The pods of a claim for which offered devices would do, with the requirements and the devices."""
    for pod in pending.pods:
        nodes = queue.nodes_for(pod)
        yield from ((pod, each, devices) for each in queue.combinations(pod) if (devices := fitting(each, nodes)))


def reasons_of_waiting(
    queue: Queue, planned: Mapping[str, Collection[Offer]], obstructed: Collection[Offer], settle_s: float
) -> list[ClaimReason]:
    """The reasons of claims for which free memory would do, where offers of one GPU are disjoint.

    ``planned`` are offers by claim; ``obstructed`` those that other offers of their GPU keep waiting.

    ``settle_s``: the seconds until a fence has reached all API servers, which is most of the time that this takes.
    """
    found = []
    for pending in queue.pending:
        offers = planned.get(pending.key)
        waits_for = [offer for offer in offers or () if offer in obstructed]
        if waits_for:
            sentence = f"{_changed(queue, waits_for[0])}: about {settle_s + 1:.0f} s"
            found.append(ClaimReason(pending, ReasonCode.RESHAPING, sentence))
        elif offers is None and pending.key not in queue.held_back and queue.satisfiable(pending):
            sentence = f"the free memory that would do is planned for claims before it: {listed(sorted(planned))}"
            found.append(ClaimReason(pending, ReasonCode.BEHIND, sentence))
    return found


def _changed(queue: Queue, offer: Offer) -> str:
    entry, kind = queue.feasibility.fleet.gpus[offer.gpu], offer.spot.kind
    return f"gpu-{entry.number} of node {entry.node} is changed to offer {kind}"
