"""How version 0.1.0 read what is kept: its own types, copied from it. Never to be changed.

Of ``kubelet_plugin/records.py``, ``plan_memory.py``, ``faults.py``, ``health_file.py`` and ``driver/model/plan.py`` as
of 7b299f2, without methods.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec


class DeviceKind(StrEnum):
    FULL = "gpu"
    PARTITION = "mig"
    SHARE = "share"


class TimeSlice(StrEnum):
    DEFAULT = "Default"
    SHORT = "Short"
    MEDIUM = "Medium"
    LONG = "Long"


class DeviceRecord(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    requests: tuple[str, ...]
    pool: str
    device: str
    number: int
    gpu_uuid: str = msgspec.field(name="gpuUUID")
    kind: DeviceKind
    profile: str | None = None
    profile_id: int | None = None
    start: int | None = None
    size: int | None = None
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    uuid: str | None = None
    existing: bool = False
    shares: int = 1
    time_slice: TimeSlice | None = None


class ClaimRecord(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    version: Literal[1]
    namespace: str
    name: str
    uid: str
    phase: Literal["preparing", "prepared"]
    devices: tuple[DeviceRecord, ...]
    boot: str = ""
    releasing: bool = False


class PlanMode(StrEnum):
    PLANNED = "Planned"
    ALONE = "Alone"


class Memory(msgspec.Struct, frozen=True):
    epoch: str
    mode: PlanMode
    published: tuple[str, ...] = ()


class FaultKind(StrEnum):
    XID = "xid"
    UNAVAILABLE = "unavailable"
    RECOVERY = "recovery"


class Fault(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    gpu: str
    kind: FaultKind
    stamp: int
    number: int = 0
    slices: int | None = None
    absent: bool = False


class Record(msgspec.Struct, frozen=True, rename="camel"):
    boot_id: str = ""
    last_stamp: int = 0
    faults: tuple[Fault, ...] = ()
    actions: dict[str, int] = msgspec.field(default_factory=dict)
    cordoned: dict[str, str] = msgspec.field(default_factory=dict)


class Kept(msgspec.Struct, frozen=True):
    version: Literal[1]
    record: Record


class PlanSpec(msgspec.Struct, frozen=True, rename="camel"):
    epoch: str = ""
    held: tuple[str, ...] = ()
    offers: tuple[str, ...] = ()
    withdrawn: tuple[str, ...] = ()
    dedicated_to: str | None = None
    dedicated_gpus: tuple[str, ...] = msgspec.field(name="dedicatedGPUs", default=())
    cordoned: tuple[str, ...] = ()
    cleared: tuple[str, ...] = ()


class Summary(msgspec.Struct, frozen=True):
    gpus: int = 0
    held: int = 0
    offered: int = 0


class PlanStatus(msgspec.Struct, frozen=True, rename="camel"):
    observed_generation: int = 0
    epoch: str = ""
    mode: PlanMode = PlanMode.ALONE
    summary: Summary = Summary()
    gpus: tuple[str, ...] = ()
    inventory: str = ""
    refused: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


CLAIM = ClaimRecord
DOCUMENTS: dict[str, type[msgspec.Struct]] = {
    "plan.json": Memory,
    "health.json": Kept,
    "plan-spec.json": PlanSpec,
    "plan-status.json": PlanStatus,
}
"""The type of each file, by name."""
