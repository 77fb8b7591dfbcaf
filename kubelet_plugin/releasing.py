"""Taking away what a claim has: spec, time-slice, partitions, and the record at the very end.

Callers hold the locks of the claim and of its GPUs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from driver.errors import ClaimError, RecoverableError, StateError
from driver.model.device import DeviceKind
from kubelet_plugin.node import Node
from kubelet_plugin.partitions import Partitions
from kubelet_plugin.records import ClaimRecord, DeviceRecord
from kubelet_plugin.steps import Step, Steps
from kubelet_plugin.time_slices import TimeSlices

log = logging.getLogger(__name__)


def nobody(*_: object) -> None:
    """A listener to whom it means nothing."""


@dataclass(frozen=True)
class Listeners:
    """Who is told what became of claims; each must return quickly.

    ``held``: a claim has something new; ``let_go``: a claim has something no more. ``repaired``: a claim that was
    prepared got what it had lost, and what that is. ``owed``: something could not be released, and is to be later.
    """

    held: Callable[[], None]
    let_go: Callable[[], None]
    repaired: Callable[[ClaimRecord, Sequence[str]], None] = nobody
    owed: Callable[[], None] = nobody


class Releaser:
    """Every method can be repeated after a kill at any instruction."""

    def __init__(self, node: Node, listeners: Listeners, steps: Steps) -> None:
        self._node = node
        self._listeners = listeners
        self._step = steps
        self._partitions = Partitions(node.host, steps)
        self._time_slices = TimeSlices(node.host, node.checkpoint, steps)

    def release(self, record: ClaimRecord) -> None:
        """Undo a claim that may be prepared: from here on it counts as owed, also after a restart."""
        if not record.owed:
            record = msgspec.structs.replace(record, releasing=True)
            with self._step(Step.MARK_RELEASING, claim=str(record)):
                self._mark(record)
        self.undo(record)

    def undo(self, record: ClaimRecord) -> None:
        """Remove spec, time-slice, partitions and record, in this order.

        What can't be removed does not keep the rest: the record stays then, and the first error is raised.
        """
        try:
            self._undo(record)
        except RecoverableError:
            self._listeners.owed()
            raise
        self._listeners.let_go()

    def _undo(self, record: ClaimRecord) -> None:
        failures = [*_attempt(lambda: self._remove_spec(record))]
        for uuid in sorted(record.gpu_uuids):
            failures += _attempt(partial(self._restore_time_slice, record, uuid))
        for device in record.devices:
            failures += _attempt(partial(self._remove_partition, record, device))
        for failure in failures[1:]:
            log.error("could not undo", extra={"claim": str(record), "error": str(failure)})
        if failures:
            raise failures[0]
        with self._step(Step.REMOVE_RECORD, claim=str(record)):
            self._node.checkpoint.remove(record.uid)
            self._node.inventory.release(record.uid)

    def _mark(self, record: ClaimRecord) -> None:
        try:
            # A power cut may lose the mark: then it has taken the partitions, too.
            self._node.checkpoint.put(record, durable=False)
        except StateError as error:
            # A full disk must not keep anything from being given back: deleting takes no room.
            log.warning("can't mark a claim as being released", extra={"claim": str(record), "error": str(error)})

    def _remove_spec(self, record: ClaimRecord) -> None:
        with self._step(Step.REMOVE_CDI_SPEC, claim=str(record)):
            self._node.cdi.remove(record.uid)

    def _restore_time_slice(self, record: ClaimRecord, uuid: str) -> None:
        gpu = self._node.inventory.gpu(uuid)
        # A GPU that does not answer has lost its interval, or takes no other; nobody waits for that.
        if gpu is not None and self._node.inventory.fault(gpu) is None:
            self._time_slices.release(gpu, record)

    def _remove_partition(self, record: ClaimRecord, device: DeviceRecord) -> None:
        if device.kind is not DeviceKind.PARTITION or device.existing:
            return
        gpu = self._node.inventory.gpu(device.gpu_uuid)
        if gpu is None:
            raise ClaimError(
                f"claim {record}: {device.device} is on {device.gpu_uuid}, which did not answer since the plugin "
                "started; its partition is removed once the GPU is back; where it is gone for good, delete "
                f"{self._node.checkpoint.path(record.uid)} and restart the plugin"
            )
        self._partitions.remove(gpu, device)


def _attempt(work: Callable[[], None]) -> Iterable[RecoverableError]:
    try:
        work()
    except RecoverableError as error:
        return [error]
    return []
