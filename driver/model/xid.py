"""XIDs, the errors that NVIDIA's kernel module reports, and whether they keep new claims away from the GPU.

Source: NVIDIA's "XID Errors", catalogue for Ampere and newer, column "immediate action"
(docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html), and for 46 NVIDIA's "Health Validation". RESTART_APP
concerns the application only, IGNORE needs no action; RESET_GPU, RESTART_BM and workflows that end in them are fatal.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Meaning(StrEnum):
    """Consequence of an XID."""

    APPLICATION = "application"
    """The application is at fault, or was hit by the error; the GPU is healthy."""

    NOTE = "note"
    """Information; the GPU is healthy, or NVML reports the recovery action that it needs."""

    FATAL = "fatal"
    """The GPU or the partition must not be allocated to new claims until it has recovered."""

    UNKNOWN = "unknown"
    """Not in the table: fatal, unless the driver reports recovery actions and so has judged the error itself."""


class Xid(NamedTuple):
    """One line of the table."""

    meaning: Meaning
    text: str


FALLEN_OFF_THE_BUS = 79
"""Such a GPU has recovered when it answers again."""

_APP, _NOTE, _FATAL = Meaning.APPLICATION, Meaning.NOTE, Meaning.FATAL

XIDS = {
    8: Xid(_APP, "GPU stopped processing"),
    11: Xid(_APP, "invalid or corrupted push buffer stream"),
    13: Xid(_APP, "graphics engine exception"),
    31: Xid(_APP, "memory page fault"),
    41: Xid(_APP, "copy engine exception"),
    43: Xid(_APP, "GPU stopped processing"),
    45: Xid(_APP, "channel torn down with its process"),
    46: Xid(_FATAL, "GPU stopped processing and did not come back"),
    48: Xid(_FATAL, "uncorrectable memory error"),
    62: Xid(_FATAL, "micro-controller halted"),
    63: Xid(_NOTE, "memory row marked for remapping"),
    64: Xid(_FATAL, "memory row could not be remapped"),
    68: Xid(_APP, "video decoder exception"),
    74: Xid(_FATAL, "NVLink error"),
    FALLEN_OFF_THE_BUS: Xid(_FATAL, "GPU fell off the bus"),
    92: Xid(_NOTE, "many correctable memory errors"),
    93: Xid(_NOTE, "InfoROM wear limit exceeded"),
    94: Xid(_APP, "contained memory error"),
    95: Xid(_FATAL, "uncontained memory error"),
    109: Xid(_APP, "context switch timed out"),
    119: Xid(_FATAL, "GSP did not answer in time"),
    120: Xid(_FATAL, "GSP error"),
    121: Xid(_NOTE, "C2C link error"),
    140: Xid(_FATAL, "unrecovered memory error"),
    154: Xid(_NOTE, "recovery action changed"),  # what it says is read from NVML
    155: Xid(_NOTE, "NVLink went down"),  # links that sleep on purpose report it, too
    156: Xid(_FATAL, "resource retired, in force after a reset"),
    157: Xid(_NOTE, "resource could not be retired"),
    160: Xid(_NOTE, "memory marked for repair"),
    171: Xid(_NOTE, "uncorrectable error was in DRAM"),  # these two come along with 48
    172: Xid(_NOTE, "uncorrectable error was in SRAM"),
}


def meaning_of(number: int) -> Xid:
    """The entry of the table, or a placeholder if there is none."""
    return XIDS.get(number, Xid(Meaning.UNKNOWN, "not in our table"))


def is_fatal(number: int, *, recovery_supported: bool) -> bool:
    """Whether devices that reported the XID must not be allocated to new claims.

    ``recovery_supported``: NVML reports recovery actions of this GPU (drivers 570 and newer), so an unknown XID need
    not make the GPU unhealthy: any user can cause some of them.
    """
    meaning = meaning_of(number).meaning
    return meaning is Meaning.FATAL or (meaning is Meaning.UNKNOWN and not recovery_supported)
