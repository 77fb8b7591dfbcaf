"""Kubernetes Events of the node plugin: on a claim and the pods that use it, and on the node.

They are written in the background (``driver.kube.events``).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from driver.errors import TesseraError
from driver.kube.events import Type
from driver.kube.types import Claim, Reference
from kubelet_plugin.inventory.inventory import ClaimReference

MOST_CLAIMS = 1024
"""Maximum number of claims whose pods are remembered."""

RecordEvent = Callable[[Reference, str, str, Type, str], None]
"""(about, reason, message, type, series): ``Recorder.event``."""


class EventReason(StrEnum):
    """Reasons of Events; docs/failures.md describes them and their remedies."""

    PREPARE_FAILED = "PrepareFailed"
    UNPREPARE_FAILED = "UnprepareFailed"
    RELEASED_LATE = "ReleasedLate"
    REPAIRED = "DeviceRepaired"
    REPAIR_FAILED = "DeviceLost"
    UNHEALTHY = "DeviceUnhealthy"
    ORPHAN_RELEASED = "OrphanReleased"
    ORPHAN_IN_USE = "OrphanInUse"
    RECORD_MISSING = "CheckpointRecordMissing"
    RECORD_UNREADABLE = "CheckpointRecordUnreadable"
    RECORD_REBUILT = "CheckpointRecordRebuilt"
    CLAIM_ADOPTED = "ClaimAdopted"
    CLAIM_MUST_END = "ClaimMustEnd"
    PARTITION_FULL = "PartitionFull"
    ABOVE_MEMORY = "AboveItsMemory"
    MPS_SERVER_LOST = "MPSServerLost"
    MEMORY_LIMITED = "MemoryLimited"
    MEMORY_NOT_LIMITED = "MemoryNotLimited"
    CDI_RESTORED = "CdiDirectoryRestored"
    CDI_UNWRITABLE = "CdiDirectoryUnwritable"
    CDI_WRITABLE = "CdiDirectoryWritable"
    STATE_UNWRITABLE = "StateDirectoryUnwritable"
    STATE_WRITABLE = "StateDirectoryWritable"


class PluginEvents:
    """Records Events. Thread-safe; no method blocks.

    ``count`` receives the reason of each Event; its copies on the pods of a claim are not counted.
    """

    def __init__(self, record: RecordEvent, node: str, count: Callable[[str], None] = lambda _: None) -> None:
        self._record = record
        self._count = count
        # Like the kubelet: kubectl describe node also finds Events whose uid is the name of the node.
        self._node = Reference("Node", node, uid=node)
        self._pods: OrderedDict[str, tuple[Reference, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def remember_pods(self, claim: Claim) -> None:
        """Remember the pods that use ``claim`` according to its current status."""
        namespace = claim.metadata.namespace
        pods = tuple(
            Reference("Pod", user.name, namespace, user.uid)
            for user in claim.status.reserved_for
            if user.resource == "pods"
        )
        with self._lock:
            self._pods[claim.metadata.uid] = pods
            self._pods.move_to_end(claim.metadata.uid)
            if len(self._pods) > MOST_CLAIMS:
                self._pods.popitem(last=False)

    def claim(self, about: ClaimReference, reason: EventReason, message: str, *, warning: bool = True) -> None:
        """Record an Event on the claim and on each pod that is known to use it; none on the plugin's own trials."""
        if not about.namespace:
            return
        itself = Reference("ResourceClaim", about.name, about.namespace, about.uid, "resource.k8s.io/v1")
        with self._lock:
            pods = self._pods.get(about.uid, ())
        self._count(reason)
        for involved in (itself, *pods):
            self._record(involved, reason.value, message, "Warning" if warning else "Normal", "")

    def node(self, reason: str, message: str, warning: bool = True, about: str = "") -> None:
        """Record an Event on this node; each thing that Events of one reason are ``about`` has one of its own."""
        self._count(reason)
        series = f"{reason} {about}" if about else ""
        self._record(self._node, reason, message, "Warning" if warning else "Normal", series)

    @contextmanager
    def report_failure(self, verb: str, claim: ClaimReference) -> Iterator[None]:
        """Record an Event if the prepare or unprepare inside the block fails."""
        try:
            yield
        except TesseraError as error:
            self.claim(
                claim, EventReason.PREPARE_FAILED if verb == "prepare" else EventReason.UNPREPARE_FAILED, str(error)
            )
            raise
