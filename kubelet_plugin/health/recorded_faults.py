"""The recorded hardware faults of a node: rules for changes of the record, and its file ``health.json``.

Each fault has a stamp: the time of detection in seconds since 1970 by the node's clock. Stamps are unique and increase.
An operator clears faults up to the stamp that the slices show; faults that are found later stay.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from enum import StrEnum
from pathlib import Path

import msgspec
from msgspec.structs import replace

from driver.errors import StateError
from driver.model.gpu_events_and_conditions import NO_ACTION
from driver.model.xid import FALLEN_OFF_THE_BUS
from kubelet_plugin.changes import GpuChange
from kubelet_plugin.checkpoint.files import write_atomically

log = logging.getLogger(__name__)

FAULT_REPEAT_INTERVAL_SECONDS = 60
"""Seconds within which an equal report is the same fault: some XIDs are reported by the hundred."""


class FaultSource(StrEnum):
    """Sources of a fault; also values of a metric label."""

    XID = "xid"
    UNAVAILABLE = "unavailable"
    RECOVERY = "recovery"


class HardwareFault(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A fault of a GPU, or of ``slices`` of its memory (bit mask; None: all of it).

    ``number`` is the XID or the recovery action. ``absent``: the GPU has not responded since.
    """

    gpu: str
    kind: FaultSource
    stamp: int
    number: int = 0
    slices: int | None = None
    absent: bool = False

    @property
    def ends_with_return(self) -> bool:
        """Whether the GPU has recovered as soon as it responds again."""
        return self.kind is FaultSource.UNAVAILABLE or (self.kind, self.number) == (FaultSource.XID, FALLEN_OFF_THE_BUS)


FAILING_COUNT = 3
"""Refusals of one kind of change, without a success between them, that make a GPU failing."""


class RefusedChanges(msgspec.Struct, frozen=True):
    """How often the hardware of a GPU refused a kind of change since it last made one, counted up to FAILING_COUNT.

    ``error`` is the last of the counted answers. ``stamp``: of the refusal that made the GPU failing; 0 before.
    """

    gpu: str
    change: GpuChange
    count: int
    error: str
    stamp: int = 0


class HealthRecord(msgspec.Struct, frozen=True, rename="camel"):
    """The state that survives a restart of the plugin.

    ``boot_id`` is the boot ID of the node at the last change; ``last_stamp`` the newest stamp; ``actions`` the last
    recovery action of each GPU that needs one; ``cordoned`` the operator's reason for each cordoned GPU; ``refused``
    the changes that hardware refused.
    """

    boot_id: str = ""
    last_stamp: int = 0
    faults: tuple[HardwareFault, ...] = ()
    actions: dict[str, int] = {}
    cordoned: dict[str, str] = {}
    refused: tuple[RefusedChanges, ...] = ()

    @property
    def failing(self) -> tuple[RefusedChanges, ...]:
        """The refused changes of failing GPUs."""
        return tuple(refused for refused in self.refused if refused.stamp)


def apply_fault(record: HealthRecord, fault: HardwareFault) -> HealthRecord:
    """Record ``fault``, unless it is the repetition of a recent one."""
    same = next((recorded for recorded in record.faults if _identity(recorded) == _identity(fault)), None)
    if same is not None and fault.stamp - same.stamp < FAULT_REPEAT_INTERVAL_SECONDS:
        return record
    record, stamp = new_stamp(record, fault.stamp)
    stamped = replace(fault, stamp=stamp)
    if same is None:
        return replace(record, faults=(*record.faults, stamped))
    # In its place: faults are listed in the order of their first report.
    faults = tuple(stamped if recorded is same else recorded for recorded in record.faults)
    return replace(record, faults=faults)


def apply_recovery_action(record: HealthRecord, gpu: str, action: int, now: int) -> HealthRecord:
    """Record the recovery action of ``gpu``. A GPU that no longer needs one has recovered."""
    before = record.actions.get(gpu, NO_ACTION)
    if action == before:
        return record
    actions = {uuid: number for uuid, number in record.actions.items() if uuid != gpu}
    if action == NO_ACTION:
        return _without(replace(record, actions=actions), [f for f in record.faults if f.gpu == gpu])
    changed = replace(record, actions={**actions, gpu: action})
    earlier = [f for f in record.faults if f.gpu == gpu and f.kind is FaultSource.RECOVERY]
    return apply_fault(_without(changed, earlier), HardwareFault(gpu, FaultSource.RECOVERY, now, action))


def apply_refusal(record: HealthRecord, gpu: str, change: GpuChange, error: str, now: int) -> HealthRecord:
    """Record that the hardware refused to change ``gpu``."""
    before = next((refused for refused in record.refused if (refused.gpu, refused.change) == (gpu, change)), None)
    if before is not None and before.stamp:
        return record
    refused = RefusedChanges(gpu, change, 1 + (before.count if before else 0), error)
    if refused.count >= FAILING_COUNT:
        record, stamp = new_stamp(record, now)
        refused = replace(refused, stamp=stamp)
    return replace(record, refused=(*(other for other in record.refused if other is not before), refused))


def apply_success(record: HealthRecord, gpu: str, change: GpuChange) -> HealthRecord:
    """Record that the hardware changed ``gpu``: its earlier refusals of such a change no longer count."""
    refused = tuple(refused for refused in record.refused if (refused.gpu, refused.change) != (gpu, change))
    return replace(record, refused=refused) if len(refused) < len(record.refused) else record


def apply_scan(record: HealthRecord, answering: Collection[str]) -> HealthRecord:
    """Record a scan: the GPUs ``answering`` responded."""
    returned = [fault for fault in record.faults if fault.absent and fault.gpu in answering]
    record = _without(record, returned)
    absent = [
        fault for fault in record.faults if fault.ends_with_return and not fault.absent and fault.gpu not in answering
    ]
    if not absent:
        return record
    marked = tuple(replace(fault, absent=True) if fault in absent else fault for fault in record.faults)
    return replace(record, faults=marked)


def apply_boot(record: HealthRecord, boot_id: str | None) -> HealthRecord:
    """Record the boot ID; after a reboot every GPU has been reset. None (unreadable) changes nothing."""
    if boot_id is None or boot_id == record.boot_id:
        return record
    if not record.boot_id:
        return replace(record, boot_id=boot_id)
    return replace(record, boot_id=boot_id, faults=(), actions={}, refused=())


def apply_operator(record: HealthRecord, cordoned: Mapping[str, str], cleared: Mapping[str, int]) -> HealthRecord:
    """Record the cordoned GPUs with their reasons, and remove the faults that an operator cleared (GPU -> stamp)."""
    cleared_faults = [f for f in record.faults if f.stamp <= cleared.get(f.gpu, 0)]
    refused = tuple(changes for changes in record.refused if not 0 < changes.stamp <= cleared.get(changes.gpu, 0))
    return replace(_without(record, cleared_faults), cordoned=dict(cordoned), refused=refused)


def new_stamp(record: HealthRecord, now: int) -> tuple[HealthRecord, int]:
    """A unique stamp for a fault that is found now."""
    stamp = max(now, record.last_stamp + 1)
    return replace(record, last_stamp=stamp), stamp


def _identity(fault: HardwareFault) -> tuple[str, FaultSource, int, int | None]:
    return fault.gpu, fault.kind, fault.number, fault.slices


def _without(record: HealthRecord, gone: Collection[HardwareFault]) -> HealthRecord:
    if not gone:
        return record
    return replace(record, faults=tuple(f for f in record.faults if f not in gone))


FILE_VERSION = 1
"""Version of the file format. A file of another version is renamed and not read."""

FILE_NAME = "health.json"


class HealthFileContent(msgspec.Struct, frozen=True):
    version: int
    record: HealthRecord


HEALTH_FILE = msgspec.json.Decoder(HealthFileContent)


class HealthFile:
    """``<state-dir>/health.json``."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / FILE_NAME

    def load(self) -> HealthRecord:
        """The saved record; an empty one if there is no file. An unreadable file is renamed and logged."""
        try:
            content = HEALTH_FILE.decode(self._path.read_bytes())
        except FileNotFoundError:
            return HealthRecord()
        except (OSError, msgspec.MsgspecError) as error:
            self._set_aside(str(error))
            return HealthRecord()
        if content.version != FILE_VERSION:
            self._set_aside(f"version {content.version}, this plugin reads {FILE_VERSION}")
            return HealthRecord()
        return content.record

    def save(self, record: HealthRecord) -> None:
        """Write ``record`` durably. A failure is logged only: the record in memory stays in force."""
        try:
            write_atomically(self._path, msgspec.json.encode(HealthFileContent(FILE_VERSION, record)), durable=True)
        except StateError as error:
            log.error("can't save the health of GPUs; a restart would lose it", extra={"error": str(error)})

    def _set_aside(self, why: str) -> None:
        aside = self._path.with_name(f"{FILE_NAME}.damaged-{time.time_ns()}")
        extra = {"path": str(self._path), "keptAs": str(aside), "error": why}
        log.error("can't read the saved health of GPUs; starting without it", extra=extra)
        try:
            self._path.rename(aside)
        except OSError as error:
            log.error("can't rename a damaged file", extra={"path": str(self._path), "error": str(error)})
