"""Which devices still fit beside the held ones: free memory slices, and limits such as media engines.

NVIDIA's driver limits the media engines of all instances together to those of the GPU (MIG user guide, "Supported MIG
profiles"): ``+me`` is exclusive, ``+me.all`` allows ``-me`` beside it only, and no profile exceeds its own maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from driver.model.device import SLICE_VALUE, Device, DeviceKind
from driver.model.gpu import Gpu, Placement, Profile


@dataclass(frozen=True, slots=True)
class Limit:
    """A resource with ``total`` units per GPU; ``usage`` is the use of one instance by profile id."""

    name: str
    total: int
    usage: Mapping[int, int]

    def taken_by(self, profile: Profile) -> int:
        return self.usage.get(profile.id, 0)


ENGINES: Mapping[str, Callable[[Profile], int]] = {
    "ofa-engines": lambda profile: profile.ofa_engines,
    "jpeg-engines": lambda profile: profile.jpeg_engines,
}
"""The engines that distinguish profiles with and without media extensions."""


def limits_of(profiles: Sequence[Profile]) -> tuple[Limit, ...]:
    """The limits that memory slices do not imply; each costs the scheduler a counter."""
    found: list[Limit] = []
    for name, engines in ENGINES.items():
        usage = {profile.id: engines(profile) for profile in profiles if engines(profile)}
        limit = Limit(name, max(usage.values(), default=0), usage)
        if heaviest(profiles, usage) > limit.total and usage not in [known.usage for known in found]:
            found.append(limit)
    own = [profile for profile in profiles if not _kept_by_others(profile, found)]
    return (*found, *(Limit(f"profile-{p.label}", p.max_instances, {p.id: 1}) for p in own))


def heaviest(profiles: Sequence[Profile], usage: Mapping[int, int]) -> int:
    """The highest total use by disjoint placements of any profiles."""
    windows = [(place, usage.get(profile.id, 0)) for profile in profiles for place in profile.placements]
    slices = max((place.start + place.size for place, _ in windows), default=0)
    best = [0] * (slices + 1)
    for end in range(1, slices + 1):
        ending = (best[place.start] + weight for place, weight in windows if place.start + place.size == end)
        best[end] = max(best[end - 1], *ending, 0)
    return best[slices]


def most_disjoint(placements: Sequence[Placement]) -> int:
    """The largest number of disjoint placements: earliest end first is optimal for intervals."""
    count, end = 0, 0
    for place in sorted(placements, key=lambda p: p.start + p.size):
        if place.start >= end:
            count, end = count + 1, place.start + place.size
    return count


def _kept_by_others(profile: Profile, limits: Sequence[Limit]) -> bool:
    """Whether placements or ``limits`` imply the profile's own maximum."""
    if most_disjoint(profile.placements) <= profile.max_instances:
        return True
    shares = (limit.total // limit.taken_by(profile) for limit in limits if limit.taken_by(profile))
    return any(share <= profile.max_instances for share in shares)


@dataclass(frozen=True, slots=True)
class Occupancy:
    """The occupied resources of one GPU.

    ``mask``: fully occupied memory slices. ``shared``: the part of every slice used by shares, of SLICE_VALUE.
    ``taken``: the used units of each of ``limits``.
    """

    mask: int
    limits: tuple[Limit, ...]
    taken: tuple[int, ...]
    shared: int = 0

    @classmethod
    def of(cls, gpu: Gpu, devices: Iterable[Device], foreign_mask: int = 0) -> Occupancy:
        """Occupancy by ``devices`` of ``gpu`` and by the slices of foreign partitions."""
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
        """Whether ``device`` fits beside the occupied resources."""
        if device.mask & self.mask or self.shared + device.weight > SLICE_VALUE:
            return False
        profile = device.profile
        if profile is None:
            return True
        room = zip(self.limits, self.taken, strict=True)
        return all(taken + limit.taken_by(profile) <= limit.total for limit, taken in room)
