"""What the controller tells people: Events on claims that wait, and on nodes whose labels can't be followed."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from controller.claim_queue import Queue
from controller.dedication import faults_in
from controller.fleet import Fleet, Hardware
from controller.objects import Node
from controller.reasons import Reason
from driver.kube.events import Recorder
from driver.kube.objects import Reference

log = logging.getLogger(__name__)

IGNORED = "DedicationIgnored"


class Teller:
    """Tells each thing when it is new; ``claims`` repeats itself, and the recorder counts."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._nodes: dict[str, tuple[Node, tuple[int, ...]]] = {}
        self._faults: dict[str, list[str]] = {}
        self._seen: tuple[Collection[Node], Hardware | None] = ((), None)

    def claims(self, queue: Queue, reasons: Iterable[Reason]) -> None:
        """One Event for each claim and code, updated when the sentence changes; on the pod where none is made yet."""
        waiting = {each.key: each for each in queue.waiting}
        for reason in reasons:
            each = waiting[reason.claim]
            about = each.pods[0] if each.made_up else each.claim
            kind, version = ("Pod", "v1") if each.made_up else ("ResourceClaim", "resource.k8s.io/v1")
            metadata = about.metadata
            reference = Reference(kind, metadata.name, metadata.namespace, metadata.uid, version)
            self._recorder.event(reference, reason.code.value, reason.sentence, "Warning")

    def labels(self, nodes: Collection[Node], fleet: Fleet) -> None:
        """One Event for each node with labels about dedication that are ignored."""
        if nodes is self._seen[0] and fleet.hardware is self._seen[1]:
            return
        self._seen = (nodes, fleet.hardware)
        there = {node.metadata.name for node in nodes}
        self._nodes = {name: known for name, known in self._nodes.items() if name in there}
        self._faults = {name: known for name, known in self._faults.items() if name in there}
        for node in nodes:
            facts = (node, tuple(entry.number for entry in fleet.nodes.get(node.metadata.name, ())))
            if self._nodes.get(node.metadata.name) != facts:
                self._nodes[node.metadata.name] = facts
                self._look(*facts)

    def _look(self, node: Node, numbers: tuple[int, ...]) -> None:
        name = node.metadata.name
        faults = faults_in(node.metadata.labels, numbers)
        if faults and faults != self._faults.get(name):
            log.warning("labels are ignored", extra={"node": name, "why": "; ".join(faults)})
            self._recorder.event(Reference("Node", name, uid=node.metadata.uid), IGNORED, "; ".join(faults), "Warning")
        self._faults[name] = faults
