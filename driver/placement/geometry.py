"""What is fixed about the MIG of a product, prepared for quick questions (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from driver.model.gpu import Gpu, Profile
from driver.model.limits import Limit, limits_of


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


def geometry_of(gpu: Gpu) -> Geometry:
    """The geometry of ``gpu``, from its own placements."""
    return _geometry(gpu.memory_slices, gpu.profiles)


@lru_cache(maxsize=1024)
def _geometry(slices: int, profiles: tuple[Profile, ...]) -> Geometry:
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
