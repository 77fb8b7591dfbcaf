"""Which devices still fit beside what is held.

The rule NVIDIA's driver follows (MIG user guide, "GPU partitioning"): ranges of memory slices are
disjoint, and no profile exceeds its own maximum of instances (this is what limits ``+me``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from driver.model.device import Device, DeviceKind


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What is taken of one GPU: memory slices as a bit mask, and instances by profile id."""

    mask: int = 0
    instances: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, devices: Iterable[Device], foreign_mask: int = 0) -> Occupancy:
        """Occupancy by ``devices`` of one GPU, plus slices taken by what Tessera did not make."""
        mask, counts = foreign_mask, Counter[int]()
        for device in devices:
            mask |= device.mask
            if device.profile is not None:
                counts[device.profile.id] += 1
        return cls(mask, tuple(sorted(counts.items())))

    def admits(self, device: Device) -> bool:
        """Whether ``device`` could be cut now beside what is taken."""
        if device.mask & self.mask:
            return False
        if device.kind is DeviceKind.FULL or device.profile is None:
            return True
        return dict(self.instances).get(device.profile.id, 0) < device.profile.max_instances
