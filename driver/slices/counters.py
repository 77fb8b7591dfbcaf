"""Shared counters: what keeps full GPU, partitions and shares of one GPU from being given out twice (KEP-4815).

One counter set a GPU, ``memory-slice-<i>`` of SLICE_VALUE each; a share takes its part of every slice, so
full GPU, partitions and shares exclude each other, and the number of shares may change while some are held.
Memory slices alone are enough except where something else is short (media engines: one ``+me`` a GPU); only
then there is a counter for that (see ``driver.model.limits``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from driver.model.device import SLICE_VALUE, Device
from driver.model.gpu import Gpu
from driver.model.limits import Limit, limits_of

Counters = dict[str, dict[str, str]]


def counters_of_gpu(gpu: Gpu) -> Counters:
    """The counter set's counters."""
    slices = {f"memory-slice-{i}": _value(SLICE_VALUE) for i in range(gpu.memory_slices)}
    return slices | {limit.name: _value(limit.total) for limit in limits_of(gpu.profiles)}


def consumption(device: Device, set_name: str, limits: Iterable[Limit]) -> list[dict[str, Any]]:
    """The device's ``consumesCounters``; ``limits`` are those of its GPU."""
    weight = _value(device.weight)
    taken = {f"memory-slice-{i}": weight for i in range(device.gpu.memory_slices) if device.mask >> i & 1}
    if device.profile is not None:
        used = {limit.name: limit.taken_by(device.profile) for limit in limits}
        taken |= {name: _value(amount) for name, amount in used.items() if amount}
    return [{"counterSet": set_name, "counters": taken}]


def _value(number: int) -> dict[str, str]:
    return {"value": str(number)}
