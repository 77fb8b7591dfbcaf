"""What restricts the partitions of a GPU beside their memory slices (pure).

The rule NVIDIA's driver follows (MIG user guide, "Supported MIG profiles"): the media engines of all
instances together exceed no count of the GPU's, which is what makes ``+me`` exclusive and lets ``+me.all``
stand beside ``-me`` only; and no profile exceeds its own maximum of instances.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from driver.model.gpu import Placement, Profile


@dataclass(frozen=True, slots=True)
class Limit:
    """A resource of which the GPU has ``total`` and an instance takes ``usage`` by profile id (none if absent)."""

    name: str
    total: int
    usage: Mapping[int, int]

    def taken_by(self, profile: Profile) -> int:
        return self.usage.get(profile.id, 0)


ENGINES: Mapping[str, Callable[[Profile], int]] = {
    "ofa-engines": lambda profile: profile.ofa_engines,
    "jpeg-engines": lambda profile: profile.jpeg_engines,
}
"""The engines by which profiles with and without media extensions differ; the others follow them."""


def limits_of(profiles: Sequence[Profile]) -> tuple[Limit, ...]:
    """The limits that memory slices alone would not keep; each costs the scheduler a counter."""
    found: list[Limit] = []
    for name, engines in ENGINES.items():
        usage = {profile.id: engines(profile) for profile in profiles if engines(profile)}
        limit = Limit(name, max(usage.values(), default=0), usage)
        if heaviest(profiles, usage) > limit.total and usage not in [known.usage for known in found]:
            found.append(limit)
    own = [profile for profile in profiles if not _kept_by_others(profile, found)]
    return (*found, *(Limit(f"profile-{p.label}", p.max_instances, {p.id: 1}) for p in own))


def heaviest(profiles: Sequence[Profile], usage: Mapping[int, int]) -> int:
    """The most that disjoint placements can take together, whatever their profiles."""
    windows = [(place, usage.get(profile.id, 0)) for profile in profiles for place in profile.placements]
    slices = max((place.start + place.size for place, _ in windows), default=0)
    best = [0] * (slices + 1)
    for end in range(1, slices + 1):
        ending = (best[place.start] + weight for place, weight in windows if place.start + place.size == end)
        best[end] = max(best[end - 1], *ending, 0)
    return best[slices]


def most_disjoint(placements: Sequence[Placement]) -> int:
    """How many of ``placements`` fit side by side: earliest end first is optimal for intervals."""
    count, end = 0, 0
    for place in sorted(placements, key=lambda p: p.start + p.size):
        if place.start >= end:
            count, end = count + 1, place.start + place.size
    return count


def _kept_by_others(profile: Profile, limits: Sequence[Limit]) -> bool:
    """Whether the profile's own maximum follows from its placements or from one of ``limits``."""
    if most_disjoint(profile.placements) <= profile.max_instances:
        return True
    shares = (limit.total // limit.taken_by(profile) for limit in limits if limit.taken_by(profile))
    return any(share <= profile.max_instances for share in shares)
