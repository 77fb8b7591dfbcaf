"""Geometry, occupancy and possible offers of one GPU as a small hashable value (pure).

A cluster has thousands of GPUs: equal GPUs share one state, and results are cached by state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from driver.model.device import SLICE_VALUE, Device, DeviceKind, share_index
from driver.model.gpu import Gpu, Limit, Profile, limits_of


@dataclass(frozen=True, slots=True, eq=False)
class Geometry:
    """The placements of one product; compared by identity, since :func:`geometry_of` makes one of each.

    ``windows`` are the bit masks of a profile's legal placements, by profile name; ``usage`` is what an instance
    of the profile takes of each of ``limits``.
    """

    slices: int
    windows: Mapping[str, tuple[int, ...]]
    limits: tuple[Limit, ...]
    usage: Mapping[str, tuple[int, ...]]

    @property
    def all_slices(self) -> int:
        return (1 << self.slices) - 1

    def has_room(self, profile: str, taken: tuple[int, ...]) -> bool:
        """Whether the limits of which ``taken`` is used admit one more instance."""
        room = zip(self.limits, taken, self.usage[profile], strict=True)
        return all(used + more <= limit.total for limit, used, more in room)


@lru_cache(maxsize=1024)
def geometry_of(slices: int, profiles: tuple[Profile, ...]) -> Geometry:
    """The geometry of GPUs with so many memory slices and these profiles."""
    limits = limits_of(profiles)
    return Geometry(
        slices,
        {profile.name: tuple(placement.mask for placement in profile.placements) for profile in profiles},
        limits,
        {profile.name: tuple(limit.taken_by(profile) for limit in limits) for profile in profiles},
    )


def start_of(mask: int) -> int:
    """The lowest slice of ``mask``."""
    return (mask & -mask).bit_length() - 1


ALL_KINDS = frozenset(DeviceKind)


class OfferKind(NamedTuple):
    """A kind of request and offer: full GPU, share, or partition of a profile."""

    kind: DeviceKind
    profile: str | None = None

    def __str__(self) -> str:
        return self.profile or ("full" if self.kind is DeviceKind.FULL else "share")


FULL = OfferKind(DeviceKind.FULL)
SHARE = OfferKind(DeviceKind.SHARE)


def key_of(device: Device) -> OfferKind:
    return OfferKind(device.kind, device.profile.name if device.profile else None)


class Spot(NamedTuple):
    """A place on a GPU: the first memory slice of a placement, the number of a share, or 0 for a full GPU."""

    key: OfferKind
    at: int = 0


def spot_of(device: Device) -> Spot:
    if device.kind is DeviceKind.SHARE:
        return Spot(SHARE, share_index(device.name))
    return Spot(key_of(device), device.placement.start if device.placement else 0)


class GpuState(NamedTuple):
    """The state of one GPU: geometry, possible offers, and occupancy.

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
        geometry = geometry_of(gpu.memory_slices, gpu.profiles)
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
        """Whether the full GPU can be allocated."""
        return not self.mask and not self.shared and DeviceKind.FULL in self.kinds

    @property
    def free(self) -> float:
        """Free memory slices; shares occupy a part of each."""
        return (self.geometry.slices - self.mask.bit_count()) * (SLICE_VALUE - self.shared) / SLICE_VALUE

    def spots(self, key: OfferKind) -> Iterator[Spot]:
        """Free places for a device of ``key``."""
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

    def fits(self, device: Device) -> bool:
        """Whether the slices and engines of ``device``, possibly a share of another size, are free."""
        if device.mask & self.mask or self.shared + device.weight > SLICE_VALUE:
            return False
        return device.profile is None or self.geometry.has_room(device.profile.name, self.taken)

    def offered(self) -> Iterator[OfferKind]:
        """All kinds of offer that are possible on an empty GPU."""
        if DeviceKind.FULL in self.kinds:
            yield FULL
        if DeviceKind.SHARE in self.kinds and self.shares:
            yield SHARE
        if DeviceKind.PARTITION in self.kinds:
            yield from (OfferKind(DeviceKind.PARTITION, profile) for profile in self.geometry.windows)

    def take(self, spot: Spot) -> GpuState:
        """Return the state after the allocation of ``spot``, which must be free."""
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

    def _free_placements(self, key: OfferKind) -> Iterator[Spot]:
        windows = self.geometry.windows.get(key.profile or "", ())
        if windows and self.geometry.has_room(key.profile or "", self.taken):
            yield from (Spot(key, start_of(mask)) for mask in windows if not mask & self.mask)
