"""Events of the controller: on pending claims, on unreadable objects, and on nodes with faulty labels."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

from controller.cluster.fleet import Fleet, Hardware
from controller.cluster.kueue import WORKLOAD_VERSION
from controller.cluster.node_views import faults_in
from controller.cluster.pod_groups import POD_GROUP_VERSION
from controller.explain.reason import ClaimReason, ReasonCode
from driver.kube.events import Recorder
from driver.kube.types import Key, Metadata, Node, Reference

log = logging.getLogger(__name__)

IGNORED = "LabelIgnored"
UNREADABLE = "ObjectUnreadable"

MAX_UNREADABLE_EVENTS = 100
"""Unreadable objects that get an Event; the metric counts all of them."""


class EventReporter:
    """Reports each fact once as an Event; reasons of claims every time, since the recorder counts repetitions."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._faults: dict[str, list[str]] = {}
        """By node, its faulty labels as reported."""
        self._hardware: Hardware | None = None

    def claims(self, reasons: Iterable[ClaimReason]) -> None:
        """One Event for each claim and code, updated when the message changes; on the pod if there is no claim yet.

        The reason of a gang is an Event of its PodGroup, too.
        """
        groups: set[Key] = set()
        for pending, code, sentence, group in reasons:
            if group is not None and group.key not in groups:
                groups.add(group.key)
                reference = Reference("PodGroup", group.name, group.namespace, group.uid, POD_GROUP_VERSION)
                self._recorder.event(reference, code.value, sentence, "Warning")
            about = pending.pods[0].metadata if pending.not_created else pending.claim.metadata
            kind, version = ("Pod", "v1") if pending.not_created else ("ResourceClaim", "resource.k8s.io/v1")
            reference = Reference(kind, about.name, about.namespace, about.uid, version)
            self._recorder.event(
                reference, code.value, sentence, "Normal" if code is ReasonCode.RESHAPING else "Warning"
            )

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
