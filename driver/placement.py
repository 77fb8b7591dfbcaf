"""Which placement hurts least: the fragmentation measure and the order of offers (pure).

The measure is FGD (Weng et al., "Beware of Fragmentation", USENIX ATC'23) applied to MIG: the
fragmentation of a GPU is the expected number of free memory slices that a request drawn from the
profiles cannot use. The best placement is the one by which it grows least. Windows come from the
GPU's own placements; an occupancy is a bit mask, so results are memoised by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from driver.model.device import Device, DeviceKind
from driver.model.gpu import Gpu

Windows = tuple[tuple[int, ...], ...]
"""For each profile, the bit masks of its legal placements."""


def windows_of(gpu: Gpu) -> Windows:
    return tuple(tuple(placement.mask for placement in profile.placements) for profile in gpu.profiles)


@lru_cache(maxsize=65536)
def fragmentation(windows: Windows, slices: int, occupied: int) -> float:
    """Free memory slices that a profile drawn with equal weight can't use; ``slices`` is the GPU's number."""
    if not windows:
        return 0.0
    free = slices - occupied.bit_count()
    unusable = 0
    for masks in windows:
        usable = 0
        for mask in masks:
            if not mask & occupied:
                usable |= mask
        unusable += free - usable.bit_count()
    return unusable / len(windows)


@lru_cache(maxsize=65536)
def placements_left(windows: Windows, occupied: int) -> int:
    """How many legal placements, over all profiles, are still free."""
    return sum(1 for masks in windows for mask in masks if not mask & occupied)


def rank(device: Device, occupied: int, windows: Windows) -> tuple[float, int, int, int]:
    """Sort key of an offer, least is best, given the slices already ``occupied`` on its GPU.

    ``windows`` are those of its GPU. Terms: growth of fragmentation; free slices (the fullest GPU first);
    placements left; start.
    """
    slices = device.gpu.memory_slices
    after = occupied | device.mask
    growth = fragmentation(windows, slices, after) - fragmentation(windows, slices, occupied)
    return (growth, slices - occupied.bit_count(), -placements_left(windows, after), device.mask)


def order_offers(devices: Iterable[Device], occupied: Mapping[str, int]) -> list[Device]:
    """``devices`` in the order the scheduler should meet them.

    Full GPUs first, then profiles from small to large (a device that doesn't match costs the scheduler
    a CEL evaluation, and small ones are asked for most), inside a profile the best placement first.
    ``occupied`` maps a GPU's UUID to its taken memory slices.
    """

    offers = list(devices)
    windows = {gpu.uuid: windows_of(gpu) for gpu in {device.gpu.uuid: device.gpu for device in offers}.values()}

    def key(device: Device) -> tuple[int, int, int, str, tuple[float, int, int, int], str]:
        profile, uuid = device.profile, device.gpu.uuid
        kind = 0 if device.kind is DeviceKind.FULL else 1
        size = (profile.compute_slices, profile.memory_bytes, profile.name) if profile else (0, 0, "")
        return (kind, *size, rank(device, occupied.get(uuid, 0), windows[uuid]), device.name)

    return sorted(offers, key=key)
