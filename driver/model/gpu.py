"""A GPU as its driver describes it: facts only, nothing that changes while it is in use.

Memory sizes are bytes; placements count memory slices. MIG geometry always comes from NVML
(``nvmlDeviceGetGpuInstanceProfileInfo``, ``...PossiblePlacements``), never from a table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """Where a partition lies on its GPU: memory slices ``start`` to ``start + size - 1``."""

    start: int
    size: int

    @property
    def mask(self) -> int:
        """The slices as a bit mask: bit i stands for memory slice i."""
        return ((1 << self.size) - 1) << self.start

    @property
    def slices(self) -> range:
        return range(self.start, self.start + self.size)

    def __str__(self) -> str:
        return f"{self.start}-{self.start + self.size - 1}" if self.size > 1 else str(self.start)


@dataclass(frozen=True, slots=True)
class Profile:
    """A MIG GPU-instance profile.

    ``id`` is what create, capacity and placement calls take; it is not the enum index under
    which NVML lists the profile. ``max_instances`` is the driver's own limit for this profile.
    """

    name: str
    id: int
    compute_slices: int
    memory_bytes: int
    multiprocessors: int
    max_instances: int
    placements: tuple[Placement, ...]

    @property
    def label(self) -> str:
        """The name as part of a DNS label: ``1g.10gb+me`` becomes ``1g10gbme``, ``1g.24gb-me`` ``1g24gbnome``."""
        spelled = self.name.lower().replace("-", "no")
        return "".join(character for character in spelled if character.isalnum())


@dataclass(frozen=True, slots=True)
class Gpu:
    """One physical GPU.

    ``memory_slices`` is 1 and ``profiles`` empty on a GPU without MIG. ``numa_node`` and
    ``pcie_root`` are None where the kernel does not know them.
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
    mig_capable: bool
    mig_enabled: bool
    memory_slices: int
    profiles: tuple[Profile, ...]
    simulated: bool

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
        """Whether a container could use it."""
        return self.compute_instance_id is not None and self.uuid is not None
