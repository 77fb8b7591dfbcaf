"""The disjoint offers of a node without controller: full GPUs, shares, or the layouts that settings name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from driver.model.device import Device, DeviceKind
from driver.model.gpu import Gpu


def default_layout(gpu: Gpu, devices: Sequence[Device]) -> Iterable[Device]:
    """The shares of a GPU that has any. A GPU that can't leave MIG mode without a reset: its largest partition."""
    if shares := [device for device in devices if device.kind is DeviceKind.SHARE]:
        return shares
    if gpu.toggles_freely or not gpu.mig_mode.in_force:
        return [device for device in devices if device.kind is DeviceKind.FULL]
    sizes = {(d.mask.bit_count(), d.profile.compute_slices, -len(d.name)): d for d in devices if d.profile is not None}
    return [sizes[max(sizes)]] if sizes else []
