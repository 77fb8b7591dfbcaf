"""Several processes on one GPU: time-slice interval and compute mode."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum, StrEnum


class ComputeMode(IntEnum):
    """How many processes may use a GPU, by NVML's numbers (``nvmlComputeMode_t``); only DEFAULT lets several."""

    DEFAULT = 0
    EXCLUSIVE_THREAD = 1
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3


class TimeSlice(StrEnum):
    """The time-slice interval of a GPU. The driver defines its length in milliseconds."""

    DEFAULT = "Default"
    SHORT = "Short"
    MEDIUM = "Medium"
    LONG = "Long"

    @property
    def number(self) -> int:
        """The argument of ``nvidia-smi compute-policy --set-timeslice``."""
        return list(TimeSlice).index(self)


def in_force(asked: Iterable[TimeSlice | None]) -> TimeSlice:
    """Return the interval of a GPU whose claims request ``asked`` (None: no request): the shortest of them.

    A GPU has one interval; the claim with the shortest request decides, and no claim is refused.
    """
    requested = [each for each in asked if each is not None and each is not TimeSlice.DEFAULT]
    return min(requested, key=lambda each: each.number, default=TimeSlice.DEFAULT)
