"""Events of the controller: on pending claims, on unreadable objects, and on nodes with faulty labels."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from controller.cluster.fleet import Fleet, Hardware
from controller.cluster.kueue import WORKLOAD_VERSION
from controller.cluster.node_views import faults_in
from controller.cluster.optional_resources import POD_GROUP_VERSION
from controller.demand.pending_claims import PendingClaim, Queue
from controller.explain.availability import listed
from controller.explain.reason import ClaimReason, ReasonCode
from driver.kube.events import Recorder, Type
from driver.kube.types import Key, Metadata, Node, Reference

log = logging.getLogger(__name__)

IGNORED = "LabelIgnored"
UNREADABLE = "ObjectUnreadable"

PENDING = "pending"
"""The series of Events about why a claim is pending."""

ALLOCATED = "Allocated"
NOT_USED = "NotUsed"
ENOUGH_IS_FREE = "enough is free now; the scheduler has not allocated it yet"
NO_LONGER = "the reason that was reported before no longer holds"
NO_POD = "no pending pod uses it: the scheduler allocates a claim when it places a pod"

MAX_PODS = 4
"""Pods of one claim that get its reason as an Event of their own."""

MAX_UNREADABLE_EVENTS = 100
"""Unreadable objects that get an Event; the metric counts all of them."""


class EventReporter:
    """Reports each fact once as an Event; reasons of claims every time, since the recorder counts repetitions."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._reported: dict[str, PendingClaim] = {}
        """By key, the claims whose last Event says why they are pending."""
        self._faults: dict[str, list[str]] = {}
        """By node, its faulty labels as reported."""
        self._hardware: Hardware | None = None

    def claims(self, reasons: Iterable[ClaimReason], queue: Queue) -> None:
        """One Event for each claim and for its pods, which always has the present reason; the last one is Allocated.

        A claim that is not created yet has those of its pod only. The reason of a gang is an Event of its PodGroup.
        """
        groups: set[Key] = set()
        current: dict[str, PendingClaim] = {}
        for pending, code, sentence, _, group in reasons:
            if group is not None and group.key not in groups:
                groups.add(group.key)
                reference = Reference("PodGroup", group.name, group.namespace, group.uid, POD_GROUP_VERSION)
                self._recorder.event(reference, code.value, sentence, "Warning", PENDING)
            current[pending.key] = pending
            self._about(pending, code.value, sentence, "Normal" if code is ReasonCode.RESHAPING else "Warning")
        waiting = {each.key: each for each in queue.pending}
        for key, before in self._reported.items():
            if key in current:
                continue
            if key in waiting:
                current[key] = waiting[key]
                self._about(waiting[key], ReasonCode.WAITS.value, ENOUGH_IS_FREE, "Normal")
            elif before.not_created:
                placed = {pod.metadata.uid: pod.spec.node_name for pod in queue.cluster.pods if pod.spec.node_name}
                if (node := placed.get(before.pods[0].metadata.uid)) is not None:
                    self._about(before, ALLOCATED, f"the scheduler has placed the pod on node {node}", "Normal")
                else:
                    self._about(before, ReasonCode.WAITS.value, NO_LONGER, "Normal")
            elif (allocation := queue.cluster.claims.allocation(before.claim.metadata.key)) is not None:
                devices = listed([result.device for result in allocation.devices.results])
                pools = listed(list(dict.fromkeys(result.pool for result in allocation.devices.results)))
                self._about(before, ALLOCATED, f"the scheduler has allocated {devices} of pool {pools}", "Normal")
            elif queue.cluster.claims.find(before.claim.metadata.key) is not None:
                self._about(replace(before, pods=()), NOT_USED, NO_POD, "Normal")
        self._reported = current

    def _about(self, pending: PendingClaim, reason: str, sentence: str, type: Type) -> None:  # noqa: A002 - see Recorder
        """An Event of the claim and of its pods."""
        if not pending.not_created:
            about = pending.claim.metadata
            claim = Reference("ResourceClaim", about.name, about.namespace, about.uid, "resource.k8s.io/v1")
            self._recorder.event(claim, reason, sentence, type, PENDING)
        prefix = "" if pending.not_created else f"claim {pending.claim.metadata.name}: "
        for pod in pending.pods[:MAX_PODS]:
            about = pod.metadata
            reference = Reference("Pod", about.name, about.namespace, about.uid)
            self._recorder.event(reference, reason, prefix + sentence, type, f"{PENDING} {pending.key}")

    def workloads(self, reasons: Iterable[tuple[Metadata, ClaimReason]]) -> None:
        """One Event for each queued Workload of Kueue: why what it will claim is not free."""
        for about, reason in reasons:
            reference = Reference("Workload", about.name, about.namespace, about.uid, WORKLOAD_VERSION)
            self._recorder.event(reference, reason.code.value, reason.sentence, "Warning")

    def unreadable(self, found: Sequence[tuple[Reference, str]]) -> None:
        """One Event for each unreadable object, up to a maximum."""
        for about, why in found[:MAX_UNREADABLE_EVENTS]:
            message = f"the controller cannot read this version of the object and ignores it: {why}"
            self._recorder.event(about, UNREADABLE, message, "Warning")

    def labels(self, nodes: Collection[Node], changed: Mapping[str, Node | None], fleet: Fleet) -> None:
        """One Event for each node with ignored labels; ``changed`` are the Nodes changed since last time."""
        if fleet.hardware is not self._hardware:
            # Whether a label names an existing GPU may be answered differently now.
            changed = {**changed, **{node.metadata.name: node for node in nodes}}
        self._hardware = fleet.hardware
        for name, node in changed.items():
            numbers = tuple(entry.number for entry in fleet.nodes.get(name, ()))
            faults = faults_in(node.metadata.labels, numbers) if node is not None else []
            if node is not None and faults and faults != self._faults.get(name):
                text = "; ".join(faults)
                log.warning("labels are ignored", extra={"node": name, "why": text})
                self._recorder.event(Reference("Node", name, uid=node.metadata.uid), IGNORED, text, "Warning")
            self._faults.pop(name, None)
            if faults:
                self._faults[name] = faults
