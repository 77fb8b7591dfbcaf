"""The reason why a claim does not get the monitor devices that it requests with adminAccess (pure).

Monitor devices are always free. What keeps them from a claim are its own requests, GPUs that do not answer, and taints.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from controller.cluster.fleet import FleetGpu
from controller.demand.feasibility import Nodes
from controller.demand.node_eligibility import Excluded
from controller.demand.pending_claims import PendingClaim, Queue
from controller.demand.requirements import DeviceRequest
from controller.demand.selected_devices import Rejection
from controller.explain.reason import Reason, ReasonCode
from controller.explain.sources.availability import OF_FAULT, Obstacle, listed, untolerated
from controller.explain.sources.sentences import OF_OBSTACLE, only_elsewhere
from driver.kube.types import MAX_DEVICES, DeviceTaintRule, Pod
from driver.model.device import Monitor
from driver.slices.pool_names import Pool

ExcludedFor = Callable[[PendingClaim], Mapping[str, Excluded]]
"""Gives the nodes on which the pods of a claim can't run, and why."""


@dataclass
class MonitorsOfNode:
    """The monitor devices of one node that a request selects.

    ``usable`` are the UUIDs of GPUs whose device it can have, ``unusable`` the other GPUs, each with what is in the
    way. ``is_tainted``: a published device has a taint that the request does not tolerate.
    """

    usable: set[str] = field(default_factory=set)
    unusable: list[tuple[FleetGpu, Obstacle, str]] = field(default_factory=list)
    is_tainted: bool = False

    def needed_by(self, request: DeviceRequest) -> int | None:
        """The number of devices that ``request`` takes there; None if it can't have so many."""
        most = len(self.usable)
        if request.count is None:  # the scheduler refuses them all if one of them has a taint
            return most if most and not self.is_tainted else None
        return request.count if request.count <= most else None


class Need(NamedTuple):
    """Requests of one claim get different devices: ``needed`` of the ``most`` that they select on a node."""

    needed: int
    most: int


class MonitorDevices:
    """What the claims of one queue can have of monitor devices; equal requests are examined once."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._of_request: dict[DeviceRequest, Mapping[str, MonitorsOfNode]] = {}
        self._nodes: dict[tuple[tuple[DeviceRequest, ...], int], Nodes] = {}

    def nodes_for(self, pod: Pod) -> Nodes | None:
        """The nodes with enough monitor devices for each claim of ``pod``; None if no claim requests any."""
        claims = [claim for claim in self._queue.of_pod(pod) if claim.key in self._queue.monitoring]
        return frozenset.intersection(*map(self._nodes_for, claims)) if claims else None

    def reason(self, pending: PendingClaim, excluded_for: ExcludedFor) -> Reason | None:
        """Why no node for a pod of ``pending`` has its monitor devices; None if one does, or if it needs none."""
        requests, nodes = self._queue.monitoring.get(pending.key, ()), self._queue.nodes(pending)
        if not requests or self._nodes_for(pending) & nodes:
            return None
        for request in requests:
            there = self._monitors(request)
            if all(there[node].needed_by(request) is None for node in there.keys() & nodes):
                return self._reason_of(request, nodes, excluded_for(pending))
        return self._not_together(pending, nodes)

    def _nodes_for(self, pending: PendingClaim) -> Nodes:
        """The nodes that have all monitor devices of the claim, whether its pods can run there or not."""
        requests, others = self._queue.monitoring[pending.key], self._others(pending)
        if (requests, others) not in self._nodes:
            needs = ((name, self._need(requests, name)) for name in self._monitors(requests[0]))
            self._nodes[requests, others] = frozenset(
                name for name, need in needs if need and need.most >= need.needed <= MAX_DEVICES - others
            )
        return self._nodes[requests, others]

    def _others(self, pending: PendingClaim) -> int:
        """The number of other devices that the claim gets at least."""
        return min((sum(alternative.counts) for alternative in self._queue.alternatives(pending)), default=0)

    def _need(self, requests: Collection[DeviceRequest], node: str) -> Need | None:
        """What ``requests`` of one claim need on ``node`` together; None if it hasn't enough for one of them alone."""
        different, needed = set[str](), 0
        for request in requests:
            monitors = self._monitors(request).get(node)
            count = None if monitors is None else monitors.needed_by(request)
            if monitors is None or count is None:
                return None
            different |= monitors.usable
            needed += count
        return Need(needed, len(different))

    def _monitors(self, request: DeviceRequest) -> Mapping[str, MonitorsOfNode]:
        """The monitor devices that ``request`` selects, by node."""
        if request not in self._of_request:
            queue, fleet, by_node = self._queue, self._queue.feasibility.fleet, dict[str, MonitorsOfNode]()
            rules = untolerated(queue.cluster.taint_rules, [request])
            selected = (gpus for rejection, gpus in request.selector.monitors_among(fleet) if rejection is None)
            for gpu in (fleet.gpus[uuid] for gpus in selected for uuid in gpus):
                of_node = by_node.setdefault(gpu.node, MonitorsOfNode())
                if not gpu.has_monitor:
                    of_node.unusable.append((gpu, OF_FAULT.get(gpu.fault_kind, Obstacle.FAULT), gpu.fault or ""))
                elif rule := _taint(gpu, rules, queue.feasibility.matching.driver):
                    text = f"DeviceTaintRule {rule.metadata.name} with {rule.spec.taint.text}"
                    of_node.unusable.append((gpu, Obstacle.TAINTED, text))
                    of_node.is_tainted = True
                else:
                    of_node.usable.add(gpu.gpu.uuid)
            self._of_request[request] = by_node
        return self._of_request[request]

    def _reason_of(self, request: DeviceRequest, nodes: Nodes, excluded: Mapping[str, Excluded]) -> Reason:
        """Why ``request`` can't have its monitor devices on any of ``nodes``."""
        feasibility, name, there = self._queue.feasibility, request.name, self._monitors(request)
        if not there:
            return self._nothing_selected(request)
        enough = feasibility.monitors(request)
        if not enough:
            most = max(feasibility.monitors(replace(request, count=1)).values())
            asks = f"request {name} asks for {request.written_count} monitor devices of one node"
            return Reason(ReasonCode.TOO_MANY, f"{asks}; no node has more than {most}", permanent=True)
        if not enough.keys() & nodes:
            what = f"request {name}: the monitor devices that it selects are only"
            return only_elsewhere(what, sorted(enough), excluded, nodes)
        node = max(sorted(enough.keys() & nodes), key=lambda node: len(there[node].usable))
        return _obstructed(request, node, there[node])

    def _not_together(self, pending: PendingClaim, nodes: Nodes) -> Reason:
        """Each request can have its monitor devices, but not all of them on one of ``nodes``."""
        requests, others = self._queue.monitoring[pending.key], self._others(pending)
        needs = list(filter(None, (self._need(requests, node) for node in nodes)))
        least = min((need.needed for need in needs), default=0)
        names = listed([request.name for request in requests])
        if least + others > MAX_DEVICES:
            written = least + others + sum(request.excess for request in requests)
            too_many = f"it asks for {written} devices, more than the {MAX_DEVICES} that one claim can have"
            return Reason(ReasonCode.TOO_MANY, too_many, permanent=True)
        if needs:
            most = max(need.most for need in needs)
            has = f"{least} different monitor devices of one node; no node where its pod can run has more than {most}"
            return Reason(ReasonCode.TOO_MANY, f"its requests {names} need {has}", permanent=True)
        sentence = f"its requests {names} need their monitor devices on one node, and no node has those of all of them"
        return Reason(ReasonCode.NOT_TOGETHER, sentence, permanent=True)

    def _nothing_selected(self, request: DeviceRequest) -> Reason:
        """Why ``request`` selects the monitor device of no GPU."""
        among = request.selector.monitors_among(self._queue.feasibility.fleet)
        rejections = [rejection for rejection, _ in among if rejection is not None]
        failing = next((rejection for rejection in rejections if rejection.error), None)
        if failing is not None:
            return _selector_fails(request, failing)
        by_claim = [each.expression for each in rejections if each.expression not in request.class_selectors]
        if not by_claim:
            sentence = (
                f"request {request.name} has adminAccess, and class {request.device_class} selects no monitor device; "
                "no other device can be prepared with adminAccess: request class gpu-monitor"
            )
        else:
            none = " (they have no capacity)" if "device.capacity" in by_claim[0] else ""
            sentence = (
                f"request {request.name} has adminAccess, and it selects none of the monitor devices of class "
                f"{request.device_class}: {by_claim[0]} is false for them{none}; no other device can be prepared with "
                "adminAccess"
            )
        return Reason(ReasonCode.NOTHING_MATCHES, sentence, permanent=True)


def _taint(gpu: FleetGpu, rules: Iterable[DeviceTaintRule], driver: str) -> DeviceTaintRule | None:
    """The first of ``rules`` that taints the monitor device of ``gpu``."""
    pool, name = Pool(gpu.node, driver).of_monitors.name, Monitor.of(gpu.gpu, gpu.number).name
    return next((rule for rule in rules if rule.selects(driver, pool, name)), None)


def _obstructed(request: DeviceRequest, node: str, there: MonitorsOfNode) -> Reason:
    """``node`` has enough GPUs, but not all of their monitor devices can be had."""
    counts = [obstacle for _, obstacle, _ in there.unusable]
    main = max(counts, key=counts.count)
    gpus = [f"gpu-{gpu.number} ({text})" for gpu, obstacle, text in there.unusable if obstacle is main]
    code, text = OF_OBSTACLE[main]
    needs = "all monitor devices of a node" if request.count is None else f"{request.count} monitor devices of one node"
    most = f"{len(there.usable)} of {len(there.usable) + len(there.unusable)}"
    sentence = f"request {request.name} needs {needs}; at most {most} can be had on one node ({node}): "
    return Reason(code, sentence + text.format(listed(gpus)), permanent=True)


def _selector_fails(request: DeviceRequest, rejection: Rejection) -> Reason:
    whose = f" of DeviceClass {request.device_class}" if rejection.expression in request.class_selectors else ""
    sentence = f"request {request.name}: the selector {rejection.expression!r}{whose} fails on monitor devices"
    return Reason(ReasonCode.SELECTOR_FAILS, f"{sentence}: {rejection.error}", permanent=True)
