"""What is known to be wrong with a node's GPUs, and how that changes: rules on a value that is kept on disk.

Each fault has a stamp: when it was found, in seconds since 1970 by the node's own clock, and unlike any other, later
than every earlier one. So an operator who clears what the slices show names a stamp, and what happens afterwards stays.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum

import msgspec

from driver.model.health import NO_ACTION, RECOVERY_ACTIONS, Ailment, EventKind, GpuEvent
from driver.model.xid import FALLEN_OFF_THE_BUS, is_fatal, meaning_of

SAME_S = 60
"""The same thing again within so many seconds is the same fault: some XIDs come by the hundred."""


class FaultKind(StrEnum):
    """What reported a fault, and the label of a metric."""

    XID = "xid"
    UNAVAILABLE = "unavailable"
    RECOVERY = "recovery"


class Fault(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """One thing that is wrong with a GPU, or with ``slices`` of its memory (bit mask; None: all of it).

    ``number`` is the XID, or NVML's recovery action. ``absent``: the GPU has not answered since.
    """

    gpu: str
    kind: FaultKind
    stamp: int
    number: int = 0
    slices: int | None = None
    absent: bool = False

    @property
    def ends_with_return(self) -> bool:
        """Whether the GPU has recovered as soon as it answers again."""
        return self.kind is FaultKind.UNAVAILABLE or (self.kind, self.number) == (FaultKind.XID, FALLEN_OFF_THE_BUS)

    def ailment(self) -> Ailment:
        if self.kind is FaultKind.XID:
            value, reason = f"xid-{self.number}", f"XID {self.number}, {meaning_of(self.number).text}"
        elif self.kind is FaultKind.UNAVAILABLE:
            value, reason = "unavailable", "NVML reported it unavailable"
        else:
            value, what = RECOVERY_ACTIONS.get(self.number, ("needs-action", f"recovery action {self.number}"))
            reason = f"NVML says it needs {what}"
        return Ailment(value, reason, slices=self.slices, stamp=self.stamp)


class Record(msgspec.Struct, frozen=True, rename="camel"):
    """Everything that survives a restart of the plugin.

    ``boot_id`` is the node's when this was written; ``last_stamp`` the newest ever given; ``actions`` the recovery
    action that NVML named last, by GPU, where it was one; ``cordoned`` the reason an operator gave, by GPU.
    """

    boot_id: str = ""
    last_stamp: int = 0
    faults: tuple[Fault, ...] = ()
    actions: dict[str, int] = {}
    cordoned: dict[str, str] = {}


def heard(record: Record, event: GpuEvent, slices: int | None, now: int, *, driver_tells: bool) -> Record:
    """An event came; ``slices`` are those of the partition it is about."""
    if event.gpu_uuid is None:
        return record
    if event.kind is EventKind.UNAVAILABLE:
        return _found(record, Fault(event.gpu_uuid, FaultKind.UNAVAILABLE, now))
    if event.xid is None or not is_fatal(event.xid, driver_tells=driver_tells):
        return record
    return _found(record, Fault(event.gpu_uuid, FaultKind.XID, now, event.xid, slices))


def told(record: Record, gpu: str, action: int, now: int) -> Record:
    """NVML says what ``gpu`` needs. One that needed something and needs nothing now has recovered."""
    before = record.actions.get(gpu, NO_ACTION)
    if action == before:
        return record
    actions = {uuid: known for uuid, known in record.actions.items() if uuid != gpu}
    if action == NO_ACTION:
        return _without(msgspec.structs.replace(record, actions=actions), [f for f in record.faults if f.gpu == gpu])
    changed = msgspec.structs.replace(record, actions={**actions, gpu: action})
    earlier = [f for f in record.faults if f.gpu == gpu and f.kind is FaultKind.RECOVERY]
    return _found(_without(changed, earlier), Fault(gpu, FaultKind.RECOVERY, now, action))


def looked(record: Record, answering: Collection[str]) -> Record:
    """A look at the hardware ended: these GPUs answered."""
    back = [f for f in record.faults if f.absent and f.gpu in answering]
    left = _without(record, back)
    absent = [f for f in left.faults if f.ends_with_return and not f.absent and f.gpu not in answering]
    if not absent:
        return left
    marked = tuple(msgspec.structs.replace(f, absent=True) if f in absent else f for f in left.faults)
    return msgspec.structs.replace(left, faults=marked)


def booted(record: Record, boot_id: str | None) -> Record:
    """The node's boot id is this; after another boot every GPU was reset. None, unreadable, says nothing."""
    if boot_id is None or boot_id == record.boot_id:
        return record
    if not record.boot_id:
        return msgspec.structs.replace(record, boot_id=boot_id)
    return msgspec.structs.replace(record, boot_id=boot_id, faults=(), actions={})


def obeyed(record: Record, cordoned: Mapping[str, str], cleared: Mapping[str, int]) -> Record:
    """An operator keeps these GPUs from new pods, with reasons, and calls faults up to these stamps dealt with."""
    done = [f for f in record.faults if f.stamp <= cleared.get(f.gpu, 0)]
    return msgspec.structs.replace(_without(record, done), cordoned=dict(cordoned))


def stamped(record: Record, now: int) -> tuple[Record, int]:
    """A stamp for something that is found now."""
    stamp = max(now, record.last_stamp + 1)
    return msgspec.structs.replace(record, last_stamp=stamp), stamp


def _found(record: Record, fault: Fault) -> Record:
    same = next((f for f in record.faults if _what(f) == _what(fault)), None)
    if same is not None and fault.stamp - same.stamp < SAME_S:
        return record
    record, stamp = stamped(record, fault.stamp)
    fault = msgspec.structs.replace(fault, stamp=stamp)
    if same is None:
        return msgspec.structs.replace(record, faults=(*record.faults, fault))
    again = tuple(fault if f is same else f for f in record.faults)  # in its place: the first to happen is told first
    return msgspec.structs.replace(record, faults=again)


def _what(fault: Fault) -> tuple[str, FaultKind, int, int | None]:
    return fault.gpu, fault.kind, fault.number, fault.slices


def _without(record: Record, gone: Collection[Fault]) -> Record:
    if not gone:
        return record
    return msgspec.structs.replace(record, faults=tuple(f for f in record.faults if f not in gone))
