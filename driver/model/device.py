"""The devices a GPU can offer, their names, and which of them exclude each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import count, islice

from driver.model.gpu import Gpu, Placement, Profile


class DeviceKind(StrEnum):
    """The value of a device's ``type`` attribute."""

    FULL = "gpu"
    PARTITION = "mig"
    SHARE = "share"


SLICE_VALUE = 840
"""What a whole memory slice is worth: 840 divides by every number of shares up to 8, by 10, 12, 20 and 30."""

MOST_SHARES = 32
"""Shares of one GPU: each is at least one CUDA context, and a GPU takes turns between about this many."""


@dataclass(frozen=True, slots=True)
class Device:
    """What a ResourceSlice publishes: a full GPU, a placement that is or can become a partition, or a share.

    ``shares`` is into how many equal parts the GPU is divided of which this is one; 1 for what is not a share.
    """

    name: str
    gpu: Gpu
    kind: DeviceKind
    profile: Profile | None = None
    placement: Placement | None = None
    shares: int = 1

    @property
    def mask(self) -> int:
        """The memory slices it takes, as a bit mask."""
        return self.gpu.all_slices if self.placement is None else self.placement.mask

    @property
    def weight(self) -> int:
        """What it takes of each of its memory slices, of SLICE_VALUE."""
        return SLICE_VALUE // self.shares

    def overlaps(self, other: Device) -> bool:
        """Whether the two can't be held at once."""
        if self.gpu.uuid != other.gpu.uuid or not self.mask & other.mask:
            return False
        return self.name == other.name or self.weight + other.weight > SLICE_VALUE

    def __str__(self) -> str:
        if self.profile is None or self.placement is None:
            kind = f"1/{self.shares} of" if self.kind is DeviceKind.SHARE else "full"
            return f"{self.name} ({kind} {self.gpu.product_name})"
        return f"{self.name} ({self.profile.name} on memory slices {self.placement})"


def full_device(gpu: Gpu, number: int) -> Device:
    return Device(name=f"gpu-{number}", gpu=gpu, kind=DeviceKind.FULL)


def partition_device(gpu: Gpu, number: int, profile: Profile, placement: Placement) -> Device:
    name = f"gpu-{number}-mig-{profile.label}-{placement.start}"
    return Device(name=name, gpu=gpu, kind=DeviceKind.PARTITION, profile=profile, placement=placement)


def share_device(gpu: Gpu, number: int, index: int, shares: int) -> Device:
    return Device(name=f"gpu-{number}-share-{index}", gpu=gpu, kind=DeviceKind.SHARE, shares=shares)


def share_index(name: str) -> int:
    """The number at the end of a share's name."""
    return int(name.rpartition("-")[2])


def share_indices(shares: int, held: Mapping[int, int]) -> tuple[int, ...]:
    """Numbers for ``shares`` shares of a GPU. ``held``: those that claims have, with of how many each is one.

    A number that is held stays that very share's: of another kind it is left out, of the same kind it is kept.
    """
    ours = sorted(index for index, of in held.items() if of == shares)
    free = (index for index in count() if index not in held)
    return tuple(sorted([*ours, *islice(free, max(0, shares - len(ours)))]))


def devices_of(gpu: Gpu, number: int, shares: int = 0, indices: Iterable[int] | None = None) -> tuple[Device, ...]:
    """Every device ``gpu`` could ever offer under the number ``number``: full, then small to large, then shares.

    ``indices`` are the numbers of the shares, 0 to ``shares`` - 1 unless told.
    """
    partitions = (
        partition_device(gpu, number, profile, placement)
        for profile in sorted(gpu.profiles, key=lambda p: (p.compute_slices, p.memory_bytes, p.name))
        for placement in profile.placements
    )
    parts = (share_device(gpu, number, index, shares) for index in indices or range(shares))
    return (full_device(gpu, number), *partitions, *parts)


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
