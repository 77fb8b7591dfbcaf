"""The order of offers inside a node (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from driver.model.device import Device, DeviceKind
from driver.placement.ranking import LocalTerms, RankedGpu, Ranking
from driver.placement.state import GpuState, spot_of

KIND_ORDER = (DeviceKind.FULL, DeviceKind.SHARE, DeviceKind.PARTITION)

RANKING = Ranking()
"""Every class counts the same; it remembers what it found, and nothing else."""

BLOCKED = LocalTerms(float("inf"), 0, 0, 0.0)
"""The terms of an offer that what is taken blocks: it comes last."""


def order_offers(devices: Iterable[Device], occupied: Mapping[str, int], ranking: Ranking = RANKING) -> list[Device]:
    """``devices`` in the order the scheduler should meet them.

    Full GPUs first, then shares, those of GPUs in use first, then profiles from small to large (a device that
    doesn't match costs the scheduler a CEL evaluation, and small ones are asked for most), inside a profile the
    best placement first. ``occupied`` maps a GPU's UUID to its taken memory slices.
    """
    offers = list(devices)
    by_uuid = {device.gpu.uuid: device.gpu for device in offers}
    gpus = {uuid: ranking.gpu(GpuState.of(gpu, foreign=occupied.get(uuid, 0))) for uuid, gpu in by_uuid.items()}
    return sorted(offers, key=lambda device: _key(device, gpus[device.gpu.uuid]))


def _key(device: Device, gpu: RankedGpu) -> tuple[int, int, int, str, tuple[float, float, int, int], int, str]:
    kind, name = KIND_ORDER.index(device.kind), (len(device.name), device.name)
    if device.profile is None:
        return (kind, 0, 0, "", (0.0, -gpu.state.mask.bit_count(), 0, 0), *name)
    spot = spot_of(device)
    local = gpu.places(spot.key).get(spot, BLOCKED)
    size = (device.profile.compute_slices, device.profile.memory_bytes, device.profile.name)
    return (kind, *size, (local.of_gpu, gpu.free, local.left, local.at), *name)
