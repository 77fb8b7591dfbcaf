"""Which offers wait where a GPU has more devices than its part of a slice can have (pure)."""

from __future__ import annotations

from collections.abc import Collection

from driver.model.device import Device, DeviceKind
from driver.placement import order_offers
from driver.slices.names import DEVICES_PER_GPU


def limited(published: int, new: Collection[Device], occupied: int) -> set[str]:
    """The names of those of ``new``, all of one GPU, for which there is room beside ``published`` devices.

    What is published already never goes for the sake of another: somebody may have been given it just now. Shares wait
    before placements do, but for one: once that is taken the placements go, and the others come. ``occupied`` is the
    mask of memory slices that nothing offered can use.
    """
    room = max(0, DEVICES_PER_GPU - published)
    if len(new) <= room:
        return {device.name for device in new}
    ordered = order_offers(new, dict.fromkeys((device.gpu.uuid for device in new), occupied))
    spare = [device for device in ordered if device.kind is DeviceKind.SHARE][1:]
    names = {device.name for device in spare}
    wanted = [*(device for device in ordered if device.name not in names), *spare]
    return {device.name for device in wanted[:room]}
