"""Shared counters: what keeps full GPU and partitions of one GPU from being given out twice (KEP-4815).

One counter set a GPU, ``memory-slice-<i>`` of 840 each: 840 divides by every number of shares up to 8.
Memory slices alone are enough except where a profile has a limit of its own (``+me``: one a GPU); only
then it gets a counter of its own.
"""

from __future__ import annotations

from typing import Any

from driver.model.device import Device
from driver.model.gpu import Gpu, Placement, Profile

SLICE_VALUE = 840

Counters = dict[str, dict[str, str]]


def counters_of_gpu(gpu: Gpu) -> Counters:
    """The counter set's counters."""
    slices = {f"memory-slice-{i}": _value(SLICE_VALUE) for i in range(gpu.memory_slices)}
    limits = {_limit_name(profile): _value(profile.max_instances) for profile in gpu.profiles if limited(profile)}
    return slices | limits


def consumption(device: Device, set_name: str) -> list[dict[str, Any]]:
    """The device's ``consumesCounters``."""
    taken = {f"memory-slice-{i}": _value(SLICE_VALUE) for i in range(device.gpu.memory_slices) if device.mask >> i & 1}
    if device.profile is not None and limited(device.profile):
        taken[_limit_name(device.profile)] = _value(1)
    return [{"counterSet": set_name, "counters": taken}]


def limited(profile: Profile) -> bool:
    """Whether disjoint placements would allow more instances than the driver does."""
    return most_disjoint(profile.placements) > profile.max_instances


def most_disjoint(placements: tuple[Placement, ...]) -> int:
    """How many of ``placements`` fit side by side: earliest end first is optimal for intervals."""
    count, end = 0, 0
    for place in sorted(placements, key=lambda p: p.start + p.size):
        if place.start >= end:
            count, end = count + 1, place.start + place.size
    return count


def _limit_name(profile: Profile) -> str:
    return f"profile-{profile.label}"


def _value(number: int) -> dict[str, str]:
    return {"value": str(number)}
