"""The reason why a claim does not get the monitor devices that it requests with adminAccess (pure).

Monitor devices are always free. What keeps them from a claim are its own requests, GPUs that do not answer, and taints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from controller.cluster.fleet import FleetGpu
from controller.demand.node_eligibility import Excluded
from controller.demand.pending_claims import PendingClaim, Queue
from controller.demand.requirements import DeviceRequest
from controller.explain.reason import Reason, ReasonCode
from controller.explain.sources.no_free_device_sentences import OF_OBSTACLE, only_elsewhere
from controller.explain.sources.selected_gpus import OF_FAULT, Obstacle, listed, named_rule, untolerated
from deviceclasses.lint.selectors.selectable_kinds import may_select_monitors
from driver.kube.types import MAX_DEVICES, DeviceTaintRule, Pod
from driver.model.device import Monitor, is_monitor
from driver.slices.slice_names import Pool

ExcludedFrom = Callable[[PendingClaim], Mapping[str, Excluded]]
"""Gives the nodes on which the pods of a claim can't run, and why."""

Requests = tuple[DeviceRequest, ...]


@dataclass
class MonitorsOfNode:
    """The monitor devices of one node that a request selects.

    ``usable`` are the UUIDs of GPUs whose device it can have, ``unusable`` the other GPUs, each with what is in the
    way. ``is_tainted``: at least one published device has a taint that the request does not tolerate.
    """

    usable: set[str] = field(default_factory=set)
    unusable: list[tuple[FleetGpu, Obstacle, str]] = field(default_factory=list)
    is_tainted: bool = False

    @property
    def count(self) -> int:
        """The number of selected monitor devices, usable or not."""
        return len(self.usable) + len(self.unusable)

    def needed_by(self, request: DeviceRequest) -> int | None:
        """The number of devices that ``request`` takes there; None if it can't have so many."""
        most = len(self.usable)
        if request.count is None:  # the scheduler refuses if one published device is tainted; lost GPUs publish none
            return most if most and not self.is_tainted else None
        return request.count if request.count <= most else None


class JointNeed(NamedTuple):
    """How many monitor devices the requests of one claim need on a node, and how many of them it has.

    Each request gets other devices.
    """

    needed: int
    usable: int

    @property
    def missing(self) -> int:
        return self.needed - min(self.usable, MAX_DEVICES)


class MonitorDevices:
    """Which monitor devices the claims of one queue can get; equal requests are examined once."""

    def __init__(self, queue: Queue) -> None:
        self._queue, self._driver = queue, queue.feasibility.matching.driver
        self._of_request: Callable[[DeviceRequest], Mapping[str, MonitorsOfNode]] = cache(self._find_monitors)
        self._joint_needs: Callable[[Requests], Mapping[str, JointNeed]] = cache(self._find_joint_needs)
        self._judged: Callable[[Requests], Requests] = cache(
            lambda requests: tuple(filter(self._gets_only_monitors, requests))
        )

    def has_everything(self, pod: Pod) -> bool | None:
        """Whether a node for ``pod`` has its monitor devices and all else that it requests; None if none are judged."""
        queue, nodes, is_judged = self._queue, self._queue.nodes_for(pod), False
        for claim in queue.of_pod(pod):
            if requests := self._judged(queue.monitoring.get(claim.key, ())):
                is_judged = True
                nodes &= {node for node, need in self._joint_needs(requests).items() if need.missing <= 0}
        if not is_judged:
            return None
        return bool(nodes) and any(
            not requirements.requests or queue.feasibility.may_fit(requirements, nodes)
            for requirements in queue.combinations(pod)
        )

    def reason(self, pending: PendingClaim, excluded_from: ExcludedFrom) -> Reason | None:
        """Why no node for a pod of ``pending`` has its monitor devices; None if one has, or if it can't be judged."""
        requests, nodes = self._judged(self._queue.monitoring.get(pending.key, ())), self._queue.nodes(pending)
        if not requests:
            return None
        for request in requests:
            monitors = self._of_request(request)
            if all(monitors[node].needed_by(request) is None for node in monitors.keys() & nodes):
                return self._reason_of(request, pending, excluded_from)
        needs = self._joint_needs(requests)
        reachable = {node: needs[node] for node in needs.keys() & nodes}
        if any(need.missing <= 0 for need in reachable.values()):
            return None
        return _not_together(requests, reachable)

    def _gets_only_monitors(self, request: DeviceRequest) -> bool:
        """Whether it selects only monitor devices, or none: what else it selects may be allocated, but not prepared."""
        among = request.selector.among(self._queue.feasibility.fleet)
        return not (self._of_request(request) and any(matches for matches, _ in among))

    def _find_monitors(self, request: DeviceRequest) -> Mapping[str, MonitorsOfNode]:
        """The monitor devices that ``request`` selects, by node."""
        fleet, by_node = self._queue.feasibility.fleet, dict[str, MonitorsOfNode]()
        rules = [rule for rule in untolerated(self._queue.cluster.taint_rules, [request]) if self._may_taint(rule)]
        selected = (gpus for rejection, gpus in request.selector.monitors_among(fleet) if rejection is None)
        for gpu in (fleet.gpus[uuid] for gpus in selected for uuid in gpus):
            monitors = by_node.setdefault(gpu.node, MonitorsOfNode())
            if not gpu.has_monitor:
                monitors.unusable.append((gpu, OF_FAULT.get(gpu.fault_kind, Obstacle.FAULT), gpu.fault or ""))
            elif (rule := self._taint(gpu, rules)) is not None:
                monitors.unusable.append((gpu, Obstacle.TAINTED, named_rule(rule)))
                monitors.is_tainted = True
            else:
                monitors.usable.add(gpu.gpu.uuid)
        return by_node

    def _may_taint(self, rule: DeviceTaintRule) -> bool:
        """Whether a rule is for monitor devices of this driver, or for all devices."""
        selector = rule.spec.device_selector
        if selector is None or selector.driver not in (None, self._driver):
            return False
        return selector.device is None or is_monitor(selector.device)

    def _taint(self, gpu: FleetGpu, rules: Iterable[DeviceTaintRule]) -> DeviceTaintRule | None:
        """The first of ``rules`` that taints the monitor device of ``gpu``."""
        for rule in rules:
            pool, name = Pool(gpu.node, self._driver).of_monitors.name, Monitor.of(gpu.gpu, gpu.number).name
            if rule.selects(self._driver, pool, name):
                return rule
        return None

    def _find_joint_needs(self, requests: Requests) -> Mapping[str, JointNeed]:
        """The need on each node that has enough for every request alone, also where the pods can't run."""
        of_requests = [(request, self._of_request(request)) for request in requests]
        needs = dict[str, JointNeed]()
        for node in frozenset.intersection(*(frozenset(monitors) for _, monitors in of_requests)):
            counts = [monitors[node].needed_by(request) for request, monitors in of_requests]
            if None not in counts:
                different = set[str]().union(*(monitors[node].usable for _, monitors in of_requests))
                needs[node] = JointNeed(sum(filter(None, counts)), len(different))
        return needs

    def _reason_of(self, request: DeviceRequest, pending: PendingClaim, excluded_from: ExcludedFrom) -> Reason:
        """Why ``request`` can't have its monitor devices where a pod of ``pending`` can run."""
        name, monitors, nodes = request.name, self._of_request(request), self._queue.nodes(pending)
        if not monitors or self._is_exhausted(request):
            return self._nothing_selected(request)
        asks = f"request {name} asks for {request.written_count} monitor devices of one node"
        enough = {node for node in monitors if monitors[node].count >= (request.count or 1)}
        if not enough:
            most = max(of_node.count for of_node in monitors.values())
            return Reason(ReasonCode.TOO_MANY, f"{asks}; no node has more than {most}", permanent=True)
        if not enough & nodes:
            what = f"request {name}: the monitor devices that it selects are only"
            if reachable := monitors.keys() & nodes:
                most = max(monitors[node].count for node in reachable)
                what = f"{asks}; no node where its pod can run has more than {most}; it would fit only"
            return only_elsewhere(what, sorted(enough), excluded_from(pending), nodes)
        node = max(sorted(enough & nodes), key=lambda node: len(monitors[node].usable))
        return _obstructed(request, node, monitors[node])

    def _is_exhausted(self, request: DeviceRequest) -> bool:
        among = request.selector.monitors_among(self._queue.feasibility.fleet)
        return any(rejection is not None and rejection.is_exhausted for rejection, _ in among)

    def _nothing_selected(self, request: DeviceRequest) -> Reason:
        """Why ``request`` selects the monitor device of no GPU."""
        among = request.selector.monitors_among(self._queue.feasibility.fleet)
        rejections = [rejection for rejection, _ in among if rejection is not None]
        failing = next((rejection for rejection in rejections if rejection.error), None)
        if failing is not None:
            of_class = failing.expression in request.class_selectors
            whose = f" of DeviceClass {request.device_class}" if of_class else ""
            sentence = f"request {request.name}: the selector {failing.expression!r}{whose} fails on monitor devices"
            return Reason(ReasonCode.SELECTOR_FAILS, f"{sentence}: {failing.error}", permanent=True)
        if not may_select_monitors(request.class_selectors, self._driver):
            sentence = (
                f"request {request.name} has adminAccess, and class {request.device_class} selects no monitor device; "
                "no other device can be prepared with adminAccess: request class gpu-monitor"
            )
            return Reason(ReasonCode.NOTHING_MATCHES, sentence, permanent=True)
        expressions = list(dict.fromkeys(rejection.expression for rejection in rejections))
        if any(expression.startswith('"') for expression in expressions):  # RequirementsReader writes capacities so
            why = "the request has a capacity, and monitor devices have none"
        else:
            why = f"none satisfies {' and '.join(request.selector.expressions)}"
        sentence = f"request {request.name} has adminAccess, and it selects no GPU's monitor device: {why}"
        return Reason(ReasonCode.NOTHING_MATCHES, sentence, permanent=True)


def _obstructed(request: DeviceRequest, node: str, monitors: MonitorsOfNode) -> Reason:
    """``node`` has enough GPUs, but not all of their monitor devices can be had."""
    obstacles = [obstacle for _, obstacle, _ in monitors.unusable]
    main = max(obstacles, key=obstacles.count)
    if request.count is None and monitors.is_tainted:
        main = Obstacle.TAINTED
    gpus = [f"gpu-{gpu.number} ({text})" for gpu, obstacle, text in monitors.unusable if obstacle is main]
    code, text = OF_OBSTACLE[main]
    if main is Obstacle.TAINTED:
        text = "a DeviceTaintRule taints {}, which it does not tolerate"
    needs = {None: "all monitor devices of a node", 1: "a monitor device"}.get(
        request.count, f"{request.count} monitor devices of one node"
    )
    can_be_had = f"{len(monitors.usable)} of {monitors.count} can be had on node {node}"
    sentence = f"request {request.name} needs {needs}, but only {can_be_had}: {text.format(listed(gpus))}"
    return Reason(code, sentence, permanent=True)


def _not_together(requests: Requests, needs: Mapping[str, JointNeed]) -> Reason:
    """Each request can have its monitor devices, but not all of them on one of the nodes of ``needs``."""
    names = listed([request.name for request in requests])
    who = f"its requests {names} need" if len(requests) > 1 else f"request {names} needs"
    if not needs:
        sentence = (
            f"{who} their monitor devices on one node, and no node where its pod can run has enough for all of them"
        )
        return Reason(ReasonCode.NOT_TOGETHER, sentence, permanent=True)
    node, need = min(sorted(needs.items()), key=lambda item: item[1].missing)
    has = f"which has {need.usable}"
    if need.needed > MAX_DEVICES:
        has = f"more than the {MAX_DEVICES} that one claim can have"
    others = "; no other node where its pod can run has enough" if len(needs) > 1 else ""
    sentence = f"{who} {need.needed} different monitor devices of node {node}, {has}{others}"
    return Reason(ReasonCode.TOO_MANY, sentence, permanent=True)
