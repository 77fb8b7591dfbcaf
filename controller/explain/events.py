"""Reports reasons and faulty objects as Events: on pending claims, on unreadable objects, on nodes with faulty labels.

The sentences of reasons come from ``controller.explain.sources``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import msgspec

from controller.cluster.fleet import Fleet, Hardware
from controller.cluster.kueue_workloads import WORKLOAD_VERSION
from controller.cluster.node_dedication import faults_in
from controller.demand.pending_claims import PendingClaim, Queue
from controller.explain.reason import ClaimReason, Reason, ReasonCode
from controller.explain.sources.selected_gpus import listed
from driver.errors import ApiError
from driver.kube.client import KubeClient
from driver.kube.events import Recorder, Type
from driver.kube.get_and_list import read_all
from driver.kube.types import Claim, Key, Metadata, Node, Pod, Reference, Struct

log = logging.getLogger(__name__)

IGNORED = "LabelIgnored"
UNREADABLE = "ObjectUnreadable"

PENDING = "pending"
"""The series of Events about why a claim is pending."""

ALLOCATED = "Allocated"
NOT_USED = "NotUsed"
NO_LONGER = "the reason that was reported before no longer holds"
NO_POD = "no pending pod uses it: the scheduler allocates a claim when it places a pod"

MAX_PODS = 4
"""Pods of one claim that get its reason as an Event of their own."""

MAX_ADOPTED = 10_000
"""Limit on Events of an earlier controller that are taken over, because tenants can write Events in its name."""

MAX_UNREADABLE_EVENTS = 100
"""Unreadable objects that get an Event; the metric counts all of them."""


PENDING_CODES = {code.value for code in ReasonCode} - {ReasonCode.WAITS}
"""Reasons of Events that say why a claim is pending."""

PASSING = {ReasonCode.RESHAPING, ReasonCode.WAITS}
"""Reasons that pass by themselves within a moment."""

OF_CLAIM = re.compile(r"claim (?P<name>[^ :]+): ")
"""How the message of a pod's Event begins if it is about one of the pod's claims."""

COMPONENT = "tessera-controller"


class InvolvedObject(Struct, frozen=True):
    kind: str = ""
    name: str = ""
    namespace: str = ""
    uid: str = ""


class WrittenEvent(Struct, frozen=True):
    """An Event as it is stored."""

    involved_object: InvolvedObject = InvolvedObject()
    reason: str = ""
    message: str = ""
    last_timestamp: str | None = None


def written_events(client: KubeClient) -> list[WrittenEvent]:
    """The Events that controllers have written; none if they can not be read."""
    try:
        selector = {"fieldSelector": f"reportingComponent={COMPONENT}"}
        return list(islice(read_all(client, "/api/v1/events", WrittenEvent, selector), MAX_ADOPTED))
    except (ApiError, msgspec.MsgspecError) as error:
        log.warning("Events of an earlier controller can't be read and stay as they are", extra={"error": str(error)})
        return []


class EventReporter:
    """Reports reasons and faulty objects as Events.

    Reasons and unreadable objects are reported again each time: the recorder renews their Events while they last.
    Faulty labels of a node are reported when they change.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._reported: dict[str, PendingClaim] = {}
        """By key, the claims that were pending at the last report and have an Event, which may be Waits."""
        self._faults: dict[str, list[str]] = {}
        """By node, its faulty labels as reported."""
        self._hardware: Hardware | None = None

    def adopt(self, written: Iterable[WrittenEvent]) -> None:
        """Take over what an earlier controller reported: Events that no longer hold are to end."""
        reported: dict[str, PendingClaim] = {}
        for event in written:
            about = event.involved_object
            if event.reason not in PENDING_CODES or about.kind not in {"ResourceClaim", "Pod"}:
                continue
            named = OF_CLAIM.match(event.message) if about.kind == "Pod" else None
            name = about.name if named is None else named["name"]
            is_about_pod_itself = about.kind == "Pod" and named is None
            key = f"Pod/{Key(about.namespace, name)}" if is_about_pod_itself else str(Key(about.namespace, name))
            claim = Claim(Metadata(name=name, namespace=about.namespace))
            before = reported.get(key) or PendingClaim(claim, (), not_created=is_about_pod_itself)
            metadata = Metadata(name=about.name, namespace=about.namespace, uid=about.uid)
            if about.kind == "Pod":
                reported[key] = replace(before, pods=(*before.pods, Pod(metadata)))
            else:
                reported[key] = replace(before, claim=Claim(metadata))
        self._reported = {**reported, **self._reported}

    def report_claims(self, reasons: Iterable[ClaimReason], queue: Queue) -> dict[str, ClaimReason]:
        """Report each claim's reason in one Event of the claim and one of each of its first ``MAX_PODS`` pods.

        These Events follow the reason. Once a claim is no longer pending, its Event changes to Allocated, NotUsed or
        Waits (``_end``). The Events of a claim that is not examined stay as they are. A claim that is not created yet
        has Events of its pod only. The reason of a gang is also an
        Event of its PodGroup. Waits is reported only of a claim that had another reason before. Returns the reasons by
        key of the claim.
        """
        groups: set[Key] = set()
        current: dict[str, PendingClaim] = {}
        by_claim: dict[str, ClaimReason] = {}
        for reason in reasons:
            pending, group = reason.pending, reason.group
            by_claim[pending.key] = reason
            if not reason.is_examined:
                if pending.key in self._reported:  # its Event stays as it is
                    current[pending.key] = pending
                continue
            if reason.code is ReasonCode.WAITS and pending.key not in self._reported:
                continue
            if group is not None and group.metadata.key not in groups:
                groups.add(group.metadata.key)
                at = group.metadata
                reference = Reference("PodGroup", at.name, at.namespace, at.uid, group.api_version)
                self._recorder.event(reference, reason.code.value, reason.sentence, "Warning", PENDING, lasting=True)
            current[pending.key] = pending
            kind: Type = "Normal" if reason.code in PASSING else "Warning"
            self._record(pending, reason.code.value, reason.sentence, kind, reason.of_pods)
        waiting = {pending.key: pending for pending in queue.pending}
        for key, before in self._reported.items():
            if key in waiting and key not in current:
                current[key] = waiting[key]
                self._record(waiting[key], ReasonCode.WAITS.value, NO_LONGER, "Normal")
            elif key not in current:
                self._end(before, queue)
        self._reported = current
        return by_claim

    def _end(self, before: PendingClaim, queue: Queue) -> None:
        """Record the last Event of a claim that is no longer pending.

        A deleted ResourceClaim gets none. A pod without claim that was not placed gets Waits, even if it was deleted.
        """
        claims, key = queue.cluster.claims, before.claim.metadata.key
        if before.not_created:
            placed = {pod.metadata.uid: pod.spec.node_name for pod in queue.cluster.pods if pod.spec.node_name}
            if (node := placed.get(before.pods[0].metadata.uid)) is not None:
                self._record(before, ALLOCATED, f"the scheduler has placed the pod on node {node}", "Normal")
            else:
                self._record(before, ReasonCode.WAITS.value, NO_LONGER, "Normal")
        elif (allocation := claims.allocation(key)) is not None:
            devices = listed([result.device for result in allocation.devices.results])
            pools = listed(list(dict.fromkeys(result.pool for result in allocation.devices.results)))
            self._record(before, ALLOCATED, f"the scheduler has allocated {devices} of pool {pools}", "Normal")
        elif claims.find(key) is not None:
            self._record(replace(before, pods=()), NOT_USED, NO_POD, "Normal")

    def _record(
        self,
        pending: PendingClaim,
        reason: str,
        sentence: str,
        type: Type,  # noqa: A002 - see Recorder
        of_pods: tuple[tuple[Key, Reason], ...] = (),
    ) -> None:
        """Record an Event of the claim and of its first ``MAX_PODS`` pods. ``of_pods``: other reasons of some pods."""
        if not pending.not_created and pending.claim.metadata.uid:
            about = pending.claim.metadata
            claim = Reference("ResourceClaim", about.name, about.namespace, about.uid, "resource.k8s.io/v1")
            self._recorder.event(claim, reason, sentence, type, PENDING, lasting=True)
        prefix = "" if pending.not_created else f"claim {pending.claim.metadata.name}: "
        for pod in pending.pods[:MAX_PODS]:
            about = pod.metadata
            reference = Reference("Pod", about.name, about.namespace, about.uid)
            reason_of_pod = dict(of_pods).get(about.key)
            code, text = reason, sentence
            if reason_of_pod is not None:
                code, text = reason_of_pod.code.value, reason_of_pod.sentence
            self._recorder.event(reference, code, prefix + text, type, f"{PENDING} {pending.key}", lasting=True)

    def report_workloads(self, reasons: Iterable[tuple[Metadata, ClaimReason]]) -> None:
        """One Event for each queued Workload of Kueue: why what it will claim is not free."""
        for about, reason in reasons:
            reference = Reference("Workload", about.name, about.namespace, about.uid, WORKLOAD_VERSION)
            self._recorder.event(reference, reason.code.value, reason.sentence, "Warning", lasting=True)

    def report_unreadable(self, objects: Sequence[tuple[Reference, str]]) -> None:
        """One Event for each unreadable object, up to a maximum."""
        for about, why in objects[:MAX_UNREADABLE_EVENTS]:
            message = f"the controller cannot read this version of the object and ignores it: {why}"
            self._recorder.event(about, UNREADABLE, message, "Warning", lasting=True)

    def report_labels(self, nodes: Collection[Node], changed: Mapping[str, Node | None], fleet: Fleet) -> None:
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
