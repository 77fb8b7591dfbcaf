"""Kubernetes Events of the node plugin: on a claim and the pods that use it, and on the node.

Written in the background (``driver.kube.events``): nobody waits for the API server to hear of it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import StrEnum

from driver.errors import TesseraError
from driver.kube.claims import Claim
from driver.kube.events import Type
from driver.kube.objects import Reference
from kubelet_plugin.claims import ClaimReference
from kubelet_plugin.preparation import PreparedDevice
from kubelet_plugin.service import ClaimWork

MOST_CLAIMS = 1024
"""Claims whose pods are remembered."""

Record = Callable[[Reference, str, str, Type], None]
"""(about, reason, message, type): ``Recorder.event``."""


class Reason(StrEnum):
    """The reasons of Events; docs/failures.md says what each means and what to do."""

    PREPARE_FAILED = "PrepareFailed"
    UNPREPARE_FAILED = "UnprepareFailed"
    RELEASED_LATE = "ReleasedLate"
    REPAIRED = "DeviceRepaired"
    REPAIR_FAILED = "DeviceLost"
    ORPHAN_RELEASED = "OrphanReleased"
    ORPHAN_IN_USE = "OrphanInUse"
    RECORD_UNREADABLE = "CheckpointRecordUnreadable"
    RECORD_REBUILT = "CheckpointRecordRebuilt"


class Teller:
    """Thread-safe; nothing here waits."""

    def __init__(self, record: Record, node: str) -> None:
        self._record = record
        # As the kubelet does: kubectl describe node finds Events whose uid is the node's name, too.
        self._node = Reference("Node", node, uid=node)
        self._pods: OrderedDict[str, tuple[Reference, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def met(self, claim: Claim) -> None:
        """Remember which pods use ``claim``, as the API server has it now."""
        namespace = claim.metadata.namespace
        users = (user for user in claim.status.reserved_for if user.resource == "pods")
        with self._lock:
            self._pods[claim.metadata.uid] = tuple(Reference("Pod", each.name, namespace, each.uid) for each in users)
            self._pods.move_to_end(claim.metadata.uid)
            if len(self._pods) > MOST_CLAIMS:
                self._pods.popitem(last=False)

    def claim(self, about: ClaimReference, reason: Reason, message: str, *, warning: bool = True) -> None:
        """An Event on the claim and on each pod that is known to use it."""
        itself = Reference("ResourceClaim", about.name, about.namespace, about.uid, "resource.k8s.io/v1")
        with self._lock:
            pods = self._pods.get(about.uid, ())
        for each in (itself, *pods):
            self._record(each, reason.value, message, "Warning" if warning else "Normal")

    def node(self, reason: str, message: str, *, warning: bool = True) -> None:
        """An Event on this node."""
        self._record(self._node, reason, message, "Warning" if warning else "Normal")


class ToldWork:
    """Preparing and unpreparing whose failures become Events."""

    def __init__(self, work: ClaimWork, teller: Teller) -> None:
        self._work = work
        self._teller = teller

    def prepare(self, reference: ClaimReference) -> Sequence[PreparedDevice]:
        try:
            return self._work.prepare(reference)
        except TesseraError as error:
            self._teller.claim(reference, Reason.PREPARE_FAILED, str(error))
            raise

    def unprepare(self, reference: ClaimReference) -> None:
        try:
            self._work.unprepare(reference)
        except TesseraError as error:
            self._teller.claim(reference, Reason.UNPREPARE_FAILED, str(error))
            raise
