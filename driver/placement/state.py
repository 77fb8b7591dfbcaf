"""What is taken of one GPU and what it may offer, as one small hashable value (pure).

:class:`driver.model.occupancy.Occupancy` says the same of one GPU and its devices. This is for looking at thousands
of GPUs: all that are alike share one state, and what follows from a state is worked out once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from driver.model.device import SLICE_VALUE, Device, DeviceKind
from driver.model.gpu import Gpu
from driver.placement.geometry import Geometry, geometry_of, start_of

ALL_KINDS = frozenset(DeviceKind)


class Key(NamedTuple):
    """What is asked for and offered: full GPUs, shares, or partitions of a profile."""

    kind: DeviceKind
    profile: str | None = None

    def __str__(self) -> str:
        return self.profile or ("full" if self.kind is DeviceKind.FULL else "share")


FULL = Key(DeviceKind.FULL)
SHARE = Key(DeviceKind.SHARE)


def key_of(device: Device) -> Key:
    return Key(device.kind, device.profile.name if device.profile else None)


class Spot(NamedTuple):
    """Where on a GPU a device lies: the first memory slice of a placement, the number of a share; 0 for a full GPU."""

    key: Key
    at: int = 0


def spot_of(device: Device) -> Spot:
    if device.kind is DeviceKind.SHARE:
        return Spot(SHARE, int(device.name.rpartition("-")[2]))
    return Spot(key_of(device), device.placement.start if device.placement else 0)


class GpuState(NamedTuple):
    """One GPU: its geometry, what it may offer, what is taken.

    ``kinds`` are the devices that it may offer at all and ``shares`` into how many it is divided. ``mask`` are the
    memory slices taken whole, ``taken`` what is used of each limit of the geometry, ``shared`` what shares take of
    every slice (of SLICE_VALUE), ``numbers`` a bit mask of the shares in use.
    """

    geometry: Geometry
    kinds: frozenset[DeviceKind] = ALL_KINDS
    shares: int = 0
    mask: int = 0
    taken: tuple[int, ...] = ()
    shared: int = 0
    numbers: int = 0

    @classmethod
    def of(
        cls,
        gpu: Gpu,
        held: Iterable[Device] = (),
        foreign: int = 0,
        shares: int = 0,
        kinds: frozenset[DeviceKind] = ALL_KINDS,
    ) -> GpuState:
        """``gpu`` under ``held`` and the slices in ``foreign``, offering at most ``kinds``."""
        geometry = geometry_of(gpu)
        mask, taken, shared, numbers = foreign, [0] * len(geometry.limits), 0, 0
        for device in held:
            if device.kind is DeviceKind.SHARE:
                shared += device.weight
                numbers |= 1 << spot_of(device).at
                continue
            mask |= device.mask
            if device.profile is not None:
                usage = (limit.taken_by(device.profile) for limit in geometry.limits)
                taken = [used + more for used, more in zip(taken, usage, strict=True)]
        return cls(geometry, kinds, shares, mask, tuple(taken), shared, numbers)

    @property
    def whole(self) -> bool:
        """Whether the full GPU could be given away."""
        return not self.mask and not self.shared and DeviceKind.FULL in self.kinds

    @property
    def free(self) -> float:
        """Free memory slices; shares take a part of each."""
        return (self.geometry.slices - self.mask.bit_count()) * (SLICE_VALUE - self.shared) / SLICE_VALUE

    def spots(self, key: Key) -> Iterator[Spot]:
        """Where a device of ``key`` could be held now."""
        if key.kind not in self.kinds:
            return
        if key.kind is DeviceKind.FULL:
            if not self.mask and not self.shared:
                yield Spot(FULL)
        elif key.kind is DeviceKind.SHARE:
            yield from self._free_shares()
        elif not self.shared:
            yield from self._free_placements(key)

    def admits(self, spot: Spot) -> bool:
        return spot in self.spots(spot.key)

    def offered(self) -> Iterator[Key]:
        """Everything that it offers, ever."""
        if DeviceKind.FULL in self.kinds:
            yield FULL
        if DeviceKind.SHARE in self.kinds and self.shares:
            yield SHARE
        if DeviceKind.PARTITION in self.kinds:
            yield from (Key(DeviceKind.PARTITION, profile) for profile in self.geometry.windows)

    def take(self, spot: Spot) -> GpuState:
        """The state once ``spot``, which it admits, is held."""
        if spot.key.kind is DeviceKind.FULL:
            return self._replace(mask=self.geometry.all_slices)
        if spot.key.kind is DeviceKind.SHARE:
            return self._replace(shared=self.shared + SLICE_VALUE // self.shares, numbers=self.numbers | 1 << spot.at)
        profile = spot.key.profile or ""
        [window] = [mask for mask in self.geometry.windows[profile] if start_of(mask) == spot.at]
        taken = tuple(a + b for a, b in zip(self.taken, self.geometry.usage[profile], strict=True))
        return self._replace(mask=self.mask | window, taken=taken)

    def _free_shares(self) -> Iterator[Spot]:
        if not self.shares or self.mask or self.shared + SLICE_VALUE // self.shares > SLICE_VALUE:
            return
        yield from (Spot(SHARE, at) for at in range(self.shares) if not self.numbers >> at & 1)

    def _free_placements(self, key: Key) -> Iterator[Spot]:
        windows = self.geometry.windows.get(key.profile or "", ())
        if windows and self.geometry.has_room(key.profile or "", self.taken):
            yield from (Spot(key, start_of(mask)) for mask in windows if not mask & self.mask)
