"""Settings of GPUs: some of them are selected, shares and partitions by GPU or product, time slices, compute mode."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Generic, TypeVar

from driver.model.device import MOST_SHARES
from driver.model.gpu import Gpu, Profile
from driver.model.offer import SHARED_PROFILE, compute_instances
from driver.model.shared_memory import MemoryLimit, SharedMemory, SharingStrategy

T = TypeVar("T")

ALL = "all"
NAME = re.compile(r"all|\d+|GPU-[0-9a-f-]+|[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
PRODUCT = re.compile(r"(?!GPU-)[A-Za-z][\w .()/+-]*")
SELECTED_PRODUCT = re.compile(r"[A-Za-z]\w* [\w .()/+-]*")
"""Of two words, as NVML has them: a typing error in an index is not a product."""
PROFILE = re.compile(r"(?:[1-9]c\.)?\d+g\.\d+gb[a-z.+-]*")
FEWEST_SHARES = 2
ACCEPTED = f"0 (none) or {FEWEST_SHARES} to {MOST_SHARES}"


def _names(gpu: Gpu) -> tuple[str, ...]:
    """Names of ``gpu`` in settings, the most specific first."""
    return gpu.uuid, gpu.pci_bus_id, str(gpu.index), gpu.product_name, ALL


def _unmatched(names: Iterable[str], gpus: Sequence[Gpu]) -> list[str]:
    """Names of none of ``gpus``: a typing error, or a missing GPU."""
    return sorted(set(names) - {ALL, *(name for gpu in gpus for name in _names(gpu))})


@dataclass(frozen=True, slots=True)
class GpuSelection:
    """Some of a node's GPUs. No entries mean none; ``all`` means every one."""

    entries: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str) -> GpuSelection:
        """``0,GPU-...,0000:1b:00.0,NVIDIA L4`` or ``all``. Raises ValueError naming the entry that is none of these."""
        entries = [entry.strip() for entry in text.split(",") if entry.strip()]
        for entry in entries:
            if not NAME.fullmatch(entry) and not SELECTED_PRODUCT.fullmatch(entry):
                raise ValueError(
                    f"{entry!r} is no index (0), UUID (GPU-...), PCI address (0000:1b:00.0) or product (NVIDIA L4), "
                    "nor `all`"
                )
        return cls(frozenset(entries))

    def __contains__(self, gpu: Gpu) -> bool:
        return not self.entries.isdisjoint(_names(gpu))

    def unmatched(self, gpus: Sequence[Gpu]) -> list[str]:
        return _unmatched(self.entries, gpus)


EVERY_GPU = GpuSelection(frozenset({ALL}))
NO_GPU = GpuSelection()


@dataclass(frozen=True, slots=True)
class ByGpu(Generic[T]):
    """Values by name of a GPU. The most specific name wins: UUID, PCI address, index, product, ``all``."""

    entries: tuple[tuple[str, T], ...]
    otherwise: T

    def of(self, gpu: Gpu) -> T:
        """The value of ``gpu``; ``otherwise`` if no entry matches."""
        values = dict(self.entries)
        return next((values[name] for name in _names(gpu) if name in values), self.otherwise)

    def unmatched(self, gpus: Sequence[Gpu]) -> list[str]:
        return _unmatched(dict(self.entries), gpus)


ShareCounts = ByGpu[int]
"""Number of shares of each GPU."""

Layouts = ByGpu[tuple[str, ...]]
"""Profiles of the partitions of each GPU."""

SharedGpus = ByGpu[SharingStrategy | None]
"""How each GPU is shared by memory; None: it is not."""

NO_SHARES: ShareCounts = ByGpu((), 0)
NO_SHARED: SharedGpus = ByGpu((), None)
NO_LAYOUTS: Layouts = ByGpu((), ())


@dataclass(frozen=True, slots=True)
class SharedProfiles:
    """The MIG profiles whose partitions claims share: ``1c.3g.40gb`` by the name ``3g.40gb`` that NVML gives it."""

    names: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> SharedProfiles:
        """``1c.3g.40gb,2c.4g.40gb``. Raises ValueError naming the entry that is wrong."""
        names: dict[str, str] = {}
        for entry in filter(None, (entry.strip() for entry in text.split(","))):
            shared = SHARED_PROFILE.fullmatch(entry)
            if shared is None or not PROFILE.fullmatch(entry):
                raise ValueError(f"{entry!r} is no profile with compute instances, such as 1c.3g.40gb")
            if compute_instances(entry) < FEWEST_SHARES:
                raise ValueError(f"{entry!r}: a partition of {shared['profile']} has no room for two of these")
            if shared["profile"] in names:
                raise ValueError(f"{shared['profile']} has several sizes of compute instances; give it one")
            names[shared["profile"]] = entry
        return cls(names)

    def applied_to(self, gpu: Gpu, held: Mapping[int, str]) -> Gpu:
        """``gpu`` with these names of profiles. One of which claims have partitions stays as it is in their records
        (``held``, by its id): shared, or not."""
        profiles = tuple(replace(profile, name=self._name(profile, held)) for profile in gpu.profiles)
        return gpu if profiles == gpu.profiles else replace(gpu, profiles=profiles)

    def _name(self, profile: Profile, held: Mapping[int, str]) -> str:
        if profile.id not in held:
            return self.names.get(profile.name, profile.name)
        shared = SHARED_PROFILE.fullmatch(held[profile.id])
        return f"{shared['part']}c.{profile.name}" if shared else profile.name

    def unmatched(self, gpus: Sequence[Gpu]) -> list[str]:
        """Those that no GPU has; ``gpus`` have these names already, or held partitions."""
        names = {profile.name for gpu in gpus for profile in gpu.profiles}
        return [shared for name, shared in self.names.items() if names.isdisjoint({name, shared})]


NO_SHARED_PROFILES = SharedProfiles()


def parse_share_counts(text: str) -> ShareCounts:
    """``all=10,0=4,NVIDIA H100 80GB HBM3=8``. Raises ValueError naming the entry that is wrong."""
    return ByGpu(_entries(text.split(","), _share_count, "numbers of shares"), 0)


def parse_layouts(text: str) -> Layouts:
    """``NVIDIA H100 80GB HBM3=3g.40gb,2g.20gb;0=7g.80gb``. Raises ValueError naming the entry that is wrong."""
    return ByGpu(_entries(text.split(";"), _layout, "layouts"), ())


def parse_shared(text: str) -> SharedGpus:
    """``NVIDIA L4=time-slicing,0=mps``. Raises ValueError naming the entry that is wrong."""
    return ByGpu(_entries(text.split(","), _strategy, "ways to be shared"), None)


def written_layouts(layouts: Layouts) -> str:
    """The inverse of ``parse_layouts``."""
    return ";".join(f"{name}={','.join(profiles)}" for name, profiles in layouts.entries)


def _entries(parts: Iterable[str], parse: Callable[[str], tuple[str, T]], values: str) -> tuple[tuple[str, T], ...]:
    entries = [parse(part.strip()) for part in parts if part.strip()]
    names: set[str] = set()
    for name, _ in entries:
        if name in names:
            raise ValueError(f"{name} has several {values}; give it one")
        if not NAME.fullmatch(name) and not PRODUCT.fullmatch(name):
            raise ValueError(
                f"{name!r} is no index (0), UUID (GPU-...), PCI address (0000:1b:00.0) or product (NVIDIA L4), "
                "nor `all`"
            )
        names.add(name)
    return tuple(entries)


def _layout(part: str) -> tuple[str, tuple[str, ...]]:
    name, equals, listed = (piece.strip() for piece in part.partition("="))
    profiles = tuple(profile.strip() for profile in listed.split(",") if profile.strip())
    if not equals or not profiles:
        raise ValueError(f"{part!r} has no profiles: write WHICH=PROFILE,..., such as all=3g.40gb,3g.40gb")
    for profile in profiles:
        if not PROFILE.fullmatch(profile):
            raise ValueError(f"{part!r}: {profile!r} is no MIG profile, such as 3g.40gb; layouts are separated by ;")
    return name, profiles


def _strategy(part: str) -> tuple[str, SharingStrategy | None]:
    name, equals, strategy = (piece.strip() for piece in part.rpartition("="))
    if not equals:
        raise ValueError(f"{part!r} does not say how to share it: write WHICH=HOW, such as all=time-slicing")
    if strategy not in list(SharingStrategy):
        raise ValueError(f"{part!r}: {strategy!r} is no way to share a GPU: {' or '.join(SharingStrategy)}")
    return name, SharingStrategy(strategy)


def _share_count(part: str) -> tuple[str, int]:
    name, equals, number = (piece.strip() for piece in part.rpartition("="))
    if not equals:
        raise ValueError(f"{part!r} has no number of shares: write WHICH=R, such as all=10")
    if not number.isascii() or not number.isdigit():
        raise ValueError(f"{part!r}: {number!r} is no number of shares: {ACCEPTED}")
    shares = int(number)
    if shares == 1:
        raise ValueError(f"{part!r}: one share would be the full GPU, which is offered anyway: {ACCEPTED}")
    if shares > MOST_SHARES:
        raise ValueError(f"{part!r}: {number} shares are more than a GPU switches between: {ACCEPTED}")
    return name, shares


class ComputeMode(IntEnum):
    """How many processes may use a GPU, by NVML's numbers (``nvmlComputeMode_t``); only DEFAULT lets several."""

    DEFAULT = 0
    EXCLUSIVE_THREAD = 1
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3


class TimeSlice(StrEnum):
    """The time-slice interval of a GPU. The driver defines its length in milliseconds."""

    DEFAULT = "Default"
    SHORT = "Short"
    MEDIUM = "Medium"
    LONG = "Long"

    @property
    def number(self) -> int:
        """The argument of ``nvidia-smi compute-policy --set-timeslice``."""
        return list(TimeSlice).index(self)


def time_slice_in_force(asked: Iterable[TimeSlice | None]) -> TimeSlice:
    """Return the interval of a GPU whose claims request ``asked`` (None: no request): the shortest of them.

    A GPU has one interval; the claim with the shortest request decides, and no claim is refused.
    """
    requested = [interval for interval in asked if interval is not None and interval is not TimeSlice.DEFAULT]
    return min(requested, key=lambda interval: interval.number, default=TimeSlice.DEFAULT)


@dataclass(frozen=True, slots=True)
class GpuSharing:
    """How the GPUs of a node serve several claims at once.

    shares_of    the number of equal shares of a GPU; 0: none
    only         the GPUs that are offered to several claims only
    strategy_of  how claims share a GPU by memory; None: not at all
    limit_of     what holds them to their memory
    """

    shares_of: Callable[[Gpu], int]
    only: GpuSelection = NO_GPU
    strategy_of: Callable[[Gpu], SharingStrategy | None] = lambda _: None
    limit_of: Callable[[Gpu, SharingStrategy], MemoryLimit] = lambda *_: MemoryLimit.NONE

    def limited_by(self, limit_of: Callable[[Gpu, SharingStrategy], MemoryLimit]) -> GpuSharing:
        """The same with these limits on memory."""
        return replace(self, limit_of=limit_of)

    def memory_of(self, gpu: Gpu, strategy: SharingStrategy | None) -> SharedMemory | None:
        """The memory of ``gpu`` that claims share by ``strategy``."""
        if strategy is None:
            return None
        return SharedMemory.of(gpu.memory_bytes - gpu.memory_reserved, strategy, self.limit_of(gpu, strategy))


UNSHARED = GpuSharing(lambda _: 0)
