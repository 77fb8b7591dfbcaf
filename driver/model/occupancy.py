"""Which devices still fit beside what is held: memory slices are disjoint, and the GPU's limits hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from driver.model.device import Device
from driver.model.gpu import Gpu
from driver.model.limits import Limit, limits_of


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What is taken of one GPU: memory slices as a bit mask, and how much of each of its limits."""

    mask: int
    limits: tuple[Limit, ...]
    taken: tuple[int, ...]

    @classmethod
    def of(cls, gpu: Gpu, devices: Iterable[Device], foreign_mask: int = 0) -> Occupancy:
        """Occupancy by ``devices`` of ``gpu``, plus slices taken by what Tessera did not make."""
        mask, profiles = foreign_mask, []
        for device in devices:
            mask |= device.mask
            if device.profile is not None:
                profiles.append(device.profile)
        limits = limits_of(gpu.profiles)
        return cls(mask, limits, tuple(sum(limit.taken_by(profile) for profile in profiles) for limit in limits))

    def admits(self, device: Device) -> bool:
        """Whether ``device`` could be cut now beside what is taken."""
        if device.mask & self.mask:
            return False
        profile = device.profile
        if profile is None:
            return True
        room = zip(self.limits, self.taken, strict=True)
        return all(taken + limit.taken_by(profile) <= limit.total for limit, taken in room)
