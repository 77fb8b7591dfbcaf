"""A GPU as its driver describes it: properties that do not change while it is in use.

Memory sizes are bytes; placements count memory slices. MIG geometry always comes from NVML
(``nvmlDeviceGetGpuInstanceProfileInfo``, ``...PossiblePlacements``), never from a table.

NVIDIA's driver limits the media engines of all instances together to those of the GPU (MIG user guide, "Supported MIG
profiles"): ``+me`` is exclusive, ``+me.all`` allows ``-me`` beside it only, and no profile exceeds its own maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Annotated

from msgspec import Meta

from driver.model.offer import compute_instances

MemorySlice = Annotated[int, Meta(ge=0, le=64)]
"""A number of memory slices, or the place of one. GPUs have up to 8; what a node reports bounds loops and masks."""


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """The placement of a partition: memory slices ``start`` to ``start + size - 1``."""

    start: MemorySlice
    size: MemorySlice

    @property
    def mask(self) -> int:
        """Bit mask of the memory slices."""
        return ((1 << self.size) - 1) << self.start

    @property
    def slices(self) -> range:
        return range(self.start, self.start + self.size)

    def __str__(self) -> str:
        return f"{self.start}-{self.start + self.size - 1}" if self.size > 1 else str(self.start)


@dataclass(frozen=True, slots=True)
class Profile:
    """A MIG GPU-instance profile.

    ``id`` is the argument of create, capacity and placement calls; it is not the enum index of the
    profile in NVML. ``max_instances`` is the driver's own limit for this profile. A ``name`` such as ``1c.3g.40gb``
    says that claims share partitions of the profile ``3g.40gb``, each with a compute instance of one slice.
    """

    name: str
    id: int
    compute_slices: int
    memory_bytes: int
    multiprocessors: int
    max_instances: int
    jpeg_engines: int
    ofa_engines: int
    placements: tuple[Placement, ...]

    @property
    def instance_slices(self) -> int:
        """The compute slices of a compute instance in a partition of this profile."""
        return self.compute_slices // compute_instances(self.name)

    @property
    def label(self) -> str:
        """The name as part of a DNS label: ``1g.10gb+me`` becomes ``1g10gbme``, ``1g.24gb-me`` ``1g24gbnome``."""
        spelled = self.name.lower().replace("-", "no")
        return "".join(character for character in spelled if character.isalnum())


class MigMode(StrEnum):
    """The value of a GPU's ``migMode`` attribute."""

    ENABLED = "enabled"
    DISABLED = "disabled"
    RESET_TO_ENABLE = "enabled-after-reset"
    RESET_TO_DISABLE = "disabled-after-reset"
    UNSUPPORTED = "unsupported"

    @property
    def in_force(self) -> bool:
        """Whether MIG mode is in force, so that partitions can be created."""
        return self in {MigMode.ENABLED, MigMode.RESET_TO_DISABLE}


@dataclass(frozen=True, slots=True)
class NvLink:
    """A GPU's links that are up. ``bandwidth`` is GB/s over all links, both directions, nominal.

    ``peers`` counts the links to each far end: the PCI address of a GPU, or ``switch``.
    """

    generation: int | None
    links: int
    bandwidth: int | None
    peers: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One physical GPU.

    ``memory_slices`` is 1 and ``profiles`` empty on a GPU without MIG. A value of None is unknown, or
    the GPU does not have that property. ``memory_bandwidth`` is GB/s. ``memory_reserved`` are
    the bytes of ``memory_bytes`` that the driver keeps for itself.
    """

    uuid: str
    index: int
    minor: int
    product_name: str
    brand: str
    architecture: str
    cuda_compute_capability: str
    driver_version: str
    cuda_driver_version: str
    pci_bus_id: str
    pcie_root: str | None
    numa_node: int | None
    memory_bytes: int
    multiprocessors: int | None
    memory_type: str | None
    memory_bandwidth: int | None
    pcie_generation: int | None
    pcie_width: int | None
    nvlink: NvLink | None
    nvlink_clique: str | None
    fabric_clique: str | None
    ecc: bool | None
    mig_capable: bool
    mig_mode: MigMode
    memory_slices: MemorySlice
    profiles: tuple[Profile, ...]
    simulated: bool
    memory_reserved: int = 0

    @property
    def toggles_freely(self) -> bool:
        """Whether MIG mode switches without a reset of the GPU: Hopper and newer (MIG user guide)."""
        return self.architecture != "Ampere"

    @property
    def all_slices(self) -> int:
        """Bit mask of every memory slice."""
        return (1 << self.memory_slices) - 1

    def profile_named(self, name: str) -> Profile | None:
        return next((profile for profile in self.profiles if profile.name == name), None)

    def profile_with_id(self, profile_id: int) -> Profile | None:
        return next((profile for profile in self.profiles if profile.id == profile_id), None)


@dataclass(frozen=True, slots=True)
class Partition:
    """A MIG instance that exists: GPU instance and, once made, its compute instance and UUID."""

    gpu_uuid: str
    profile_id: int
    placement: Placement
    gpu_instance_id: int
    compute_instance_id: int | None = None
    uuid: str | None = None

    @property
    def complete(self) -> bool:
        """Whether a container can use it."""
        return self.compute_instance_id is not None and self.uuid is not None


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


@lru_cache(maxsize=1024)
def limits_of(profiles: tuple[Profile, ...]) -> tuple[Limit, ...]:
    """The limits that memory slices do not imply; each costs the scheduler a counter."""
    found: list[Limit] = []
    for name, engines in ENGINES.items():
        usage = {profile.id: engines(profile) for profile in profiles if engines(profile)}
        limit = Limit(name, max(usage.values(), default=0), usage)
        if heaviest(profiles, usage) > limit.total and usage not in [known.usage for known in found]:
            found.append(limit)
    unimplied = [profile for profile in profiles if not _kept_by_others(profile, found)]
    return (*found, *(Limit(f"profile-{p.label}", p.max_instances, {p.id: 1}) for p in unimplied))


def heaviest(profiles: Sequence[Profile], usage: Mapping[int, int]) -> int:
    """The highest total use by disjoint placements of any profiles."""
    windows = [(place, usage.get(profile.id, 0)) for profile in profiles for place in profile.placements]
    slices = max((place.start + place.size for place, _ in windows), default=0)
    best = [0] * (slices + 1)
    for end in range(1, slices + 1):
        ending = (best[place.start] + weight for place, weight in windows if place.start + place.size == end)
        best[end] = max(best[end - 1], *ending, 0)
    return best[slices]


def _kept_by_others(profile: Profile, limits: Sequence[Limit]) -> bool:
    """Whether placements or ``limits`` imply the profile's own maximum."""
    if heaviest([profile], {profile.id: 1}) <= profile.max_instances:
        return True
    shares = (limit.total // limit.taken_by(profile) for limit in limits if limit.taken_by(profile))
    return any(share <= profile.max_instances for share in shares)
