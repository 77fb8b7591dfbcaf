"""Which devices still fit beside what is held: memory slices have room, and the GPU's limits hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from driver.model.device import SLICE_VALUE, Device, DeviceKind
from driver.model.gpu import Gpu
from driver.model.limits import Limit, limits_of


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What is taken of one GPU.

    ``mask``: the memory slices that are taken whole. ``shared``: what shares take of every slice, of
    SLICE_VALUE. ``taken``: how much of each of ``limits``.
    """

    mask: int
    limits: tuple[Limit, ...]
    taken: tuple[int, ...]
    shared: int = 0

    @classmethod
    def of(cls, gpu: Gpu, devices: Iterable[Device], foreign_mask: int = 0) -> Occupancy:
        """Occupancy by ``devices`` of ``gpu``, plus slices taken by what Tessera did not make."""
        mask, shared, profiles = foreign_mask, 0, []
        for device in devices:
            if device.kind is DeviceKind.SHARE:
                shared += device.weight
            else:
                mask |= device.mask
            if device.profile is not None:
                profiles.append(device.profile)
        limits = limits_of(gpu.profiles)
        taken = tuple(sum(limit.taken_by(profile) for profile in profiles) for limit in limits)
        return cls(mask, limits, taken, shared)

    def admits(self, device: Device) -> bool:
        """Whether ``device`` could be used now beside what is taken."""
        if device.mask & self.mask or self.shared + device.weight > SLICE_VALUE:
            return False
        profile = device.profile
        if profile is None:
            return True
        room = zip(self.limits, self.taken, strict=True)
        return all(taken + limit.taken_by(profile) <= limit.total for limit, taken in room)
