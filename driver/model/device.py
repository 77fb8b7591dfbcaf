"""The devices a GPU can offer, their names, and which of them exclude each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import NamedTuple

from driver.model.gpu import Gpu, Placement, Profile
from driver.model.offer import FULL, OF_SEVERAL, SHARE, SHARED, DeviceKind, Offer, Spot, partition_kind
from driver.model.shared_memory import GIB, SharedMemory

SLICE_VALUE = 840
"""The value of a whole memory slice: divisible by every number of shares up to 8, and by 10, 12, 20 and 30."""

MOST_SHARES = 32
"""Most shares of one GPU: each has at least one CUDA context, and a GPU time-slices about this many."""


def share_weight(shares: int) -> int:
    """The part that one of ``shares`` of a GPU takes of each of its memory slices, of SLICE_VALUE."""
    return SLICE_VALUE // shares


@dataclass(frozen=True, slots=True)
class Device:
    """What a ResourceSlice publishes: a full GPU, a placement that is or can become a partition, a share, or the shared
    device of a GPU.

    ``spot`` says which of the GPU's devices it is, and how much a claim has of a shared device. ``shares`` is the
    number of equal parts of the GPU of which this device is one; 1 for other kinds. ``shared``: only if it is shared.
    """

    name: str
    gpu: Gpu
    spot: Spot
    profile: Profile | None = None
    placement: Placement | None = None
    shares: int = 1
    shared: SharedMemory | None = None
    kind: DeviceKind = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", self.spot.kind.type)

    @property
    def offer(self) -> Offer:
        """The device by what it is and not by its name, as plans have it."""
        return Offer(self.gpu.uuid, self.spot.device)

    @property
    def mask(self) -> int:
        """Bit mask of the memory slices that it uses."""
        return self.gpu.all_slices if self.placement is None else self.placement.mask

    @property
    def clients(self) -> int | None:
        """The number of claims that can have a part of a shared device; None: any number."""
        return None if self.shared is None else self.shared.clients(self.gpu.cuda_driver_version)

    @property
    def memory_bytes(self) -> int:
        """What it has of its GPU's memory; a share, which may use all of it, counts as its part."""
        if self.shared is not None:
            return self.spot.at * GIB or self.shared.memory_bytes
        return self.profile.memory_bytes if self.profile is not None else self.gpu.memory_bytes // self.shares

    @property
    def weight(self) -> int:
        """Its part of each of its memory slices, of SLICE_VALUE."""
        return share_weight(self.shares)

    def __str__(self) -> str:
        if self.profile is None or self.placement is None:
            amounts = {DeviceKind.SHARE: f"1/{self.shares}", DeviceKind.SHARED: f"{self.spot.at} GiB"}
            kind = f"{amounts[self.kind]} of" if self.kind in amounts else "full"
            return f"{self.name} ({kind} {self.gpu.product_name})"
        return f"{self.name} ({self.profile.name} on memory slices {self.placement})"


def full_device(gpu: Gpu, number: int) -> Device:
    return Device(name=f"gpu-{number}", gpu=gpu, spot=Spot(FULL))


def partition_device(gpu: Gpu, number: int, profile: Profile, placement: Placement) -> Device:
    spot = Spot(partition_kind(profile.name), placement.start)
    suffix = f"-{SHARED}" if spot.kind.type in OF_SEVERAL else ""
    name = f"gpu-{number}-mig-{profile.label}-{placement.start}{suffix}"
    return Device(name=name, gpu=gpu, spot=spot, profile=profile, placement=placement)


def share_device(gpu: Gpu, number: int, index: int, shares: int) -> Device:
    return Device(name=f"gpu-{number}-share-{index}", gpu=gpu, spot=Spot(SHARE, index), shares=shares)


def shared_device(gpu: Gpu, number: int, shared: SharedMemory, gib: int = 0) -> Device:
    """The shared device of ``gpu``, or the ``gib`` that claims have of it."""
    return Device(name=f"gpu-{number}-shared", gpu=gpu, spot=Spot(SHARED, gib), shared=shared)


def merged(devices: Iterable[Device]) -> list[Device]:
    """One device for each name: of a shared device that with the GiB of all claims, of others the last."""
    by_name: dict[str, Device] = {}
    for device in devices:
        before = by_name.get(device.name)
        if before is not None and device.kind is DeviceKind.SHARED:
            device = replace(device, spot=Spot(SHARED, before.spot.at + device.spot.at))
        by_name[device.name] = device
    return list(by_name.values())


MONITOR_TYPE = "monitor"
"""The value of a monitor device's ``type`` attribute."""


class Monitor(NamedTuple):
    """The monitor device of a GPU: it consumes nothing, and any number of claims with adminAccess may have it."""

    name: str
    gpu: Gpu

    @classmethod
    def of(cls, gpu: Gpu, number: int) -> Monitor:
        return cls(f"gpu-{number}-{MONITOR_TYPE}", gpu)


def is_monitor(name: str) -> bool:
    """Whether this is the name of a monitor device."""
    return name.endswith(f"-{MONITOR_TYPE}")


def is_shared(name: str) -> bool:
    """Whether this is the name of a device that several claims can have at once."""
    return name.endswith(f"-{SHARED}")


def is_shared_partition(name: str) -> bool:
    """Whether this is the name of a partition that several claims can have at once."""
    return is_shared(name) and "-mig-" in name


def share_index(name: str) -> int:
    """The number at the end of a share's name."""
    return int(name.rpartition("-")[2])


def share_indices(shares: int, held: Mapping[int, int]) -> tuple[int, ...]:
    """Return the numbers of ``shares`` shares of a GPU. ``held`` maps numbers of allocated shares to their ``shares``.

    A number in use stays with its share: it is kept for the same ``shares`` and skipped for another.
    """
    ours = sorted(index for index, of in held.items() if of == shares)
    free = (index for index in count() if index not in held)
    return tuple(sorted([*ours, *islice(free, max(0, shares - len(ours)))]))


def devices_of(
    gpu: Gpu,
    number: int,
    shares: int = 0,
    indices: Iterable[int] | None = None,
    shared: SharedMemory | None = None,
) -> tuple[Device, ...]:
    """All devices of ``gpu`` under the number ``number``: full, partitions from small to large, shares, shared.

    ``indices`` are the numbers of the shares, by default 0 to ``shares`` - 1.
    """
    partitions = (
        partition_device(gpu, number, profile, placement)
        for profile in sorted(gpu.profiles, key=lambda p: (p.compute_slices, p.memory_bytes, p.name))
        for placement in profile.placements
    )
    parts = (share_device(gpu, number, index, shares) for index in indices or range(shares))
    by_memory = () if shared is None else (shared_device(gpu, number, shared),)
    return (full_device(gpu, number), *partitions, *parts, *by_memory)


def number_gpus(gpus: Iterable[Gpu], kept: Mapping[str, int]) -> dict[str, int]:
    """Return the number in each GPU's device names, by UUID.

    The number is the minor, except that a GPU with held devices keeps its number (``kept``, by UUID) even if minors
    change, and no other GPU gets that number in the meantime.
    """
    ordered = sorted(gpus, key=lambda gpu: gpu.minor)
    numbers = {gpu.uuid: kept[gpu.uuid] for gpu in ordered if gpu.uuid in kept}
    taken = set(kept.values())
    for gpu in ordered:
        if gpu.uuid not in numbers:
            numbers[gpu.uuid] = next(number for number in count(gpu.minor) if number not in taken)
            taken.add(numbers[gpu.uuid])
    return numbers
