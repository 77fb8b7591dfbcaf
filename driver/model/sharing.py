"""Several processes on one GPU: how long each runs before the next has its turn."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class TimeSlice(StrEnum):
    """A GPU's time-slice interval. What each means in milliseconds is the driver's own business."""

    DEFAULT = "Default"
    SHORT = "Short"
    MEDIUM = "Medium"
    LONG = "Long"

    @property
    def number(self) -> int:
        """What ``nvidia-smi compute-policy --set-timeslice`` takes."""
        return list(TimeSlice).index(self)


def in_force(asked: Iterable[TimeSlice | None]) -> TimeSlice:
    """The interval of a GPU whose claims ask for ``asked`` (None: no wish): the shortest, whatever their order.

    A GPU has one interval; the claim that needs the quickest answer decides, and nobody is refused for it.
    """
    wishes = [wish for wish in asked if wish is not None and wish is not TimeSlice.DEFAULT]
    return min(wishes, key=lambda wish: wish.number, default=TimeSlice.DEFAULT)
