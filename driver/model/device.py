"""The devices a GPU can offer, their names, and which of them exclude each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from driver.model.gpu import Gpu, Placement, Profile


class DeviceKind(StrEnum):
    """The value of a device's ``type`` attribute."""

    FULL = "gpu"
    PARTITION = "mig"


@dataclass(frozen=True, slots=True)
class Device:
    """What a ResourceSlice publishes: a full GPU, or a placement that is or can become a partition."""

    name: str
    gpu: Gpu
    kind: DeviceKind
    profile: Profile | None = None
    placement: Placement | None = None

    @property
    def mask(self) -> int:
        """The memory slices it takes, as a bit mask."""
        return self.gpu.all_slices if self.placement is None else self.placement.mask

    def __str__(self) -> str:
        if self.profile is None or self.placement is None:
            return f"{self.name} (full {self.gpu.product_name})"
        return f"{self.name} ({self.profile.name} on memory slices {self.placement})"


def full_device(gpu: Gpu, number: int) -> Device:
    return Device(name=f"gpu-{number}", gpu=gpu, kind=DeviceKind.FULL)


def partition_device(gpu: Gpu, number: int, profile: Profile, placement: Placement) -> Device:
    name = f"gpu-{number}-mig-{profile.label}-{placement.start}"
    return Device(name=name, gpu=gpu, kind=DeviceKind.PARTITION, profile=profile, placement=placement)


def devices_of(gpu: Gpu, number: int) -> tuple[Device, ...]:
    """Every device ``gpu`` could ever offer under the number ``number``: full first, then small to large."""
    partitions = (
        partition_device(gpu, number, profile, placement)
        for profile in sorted(gpu.profiles, key=lambda p: (p.compute_slices, p.memory_bytes, p.name))
        for placement in profile.placements
    )
    return (full_device(gpu, number), *partitions)


def number_gpus(gpus: Iterable[Gpu], kept: Mapping[str, int]) -> dict[str, int]:
    """The number each GPU's device names carry, by UUID.

    It is the minor, except that a GPU on which something is held keeps the number it had
    (``kept``, by UUID) even when minors move, and nobody else gets that number meanwhile.
    """
    ordered = sorted(gpus, key=lambda gpu: gpu.minor)
    numbers = {gpu.uuid: kept[gpu.uuid] for gpu in ordered if gpu.uuid in kept}
    taken = set(kept.values())
    for gpu in ordered:
        if gpu.uuid in numbers:
            continue
        number = gpu.minor
        while number in taken:
            number += 1
        numbers[gpu.uuid] = number
        taken.add(number)
    return numbers
