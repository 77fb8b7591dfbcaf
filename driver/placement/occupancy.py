"""What is taken on one GPU, what it can still offer, and which devices exclude each other: the one overlap rule (pure).

Every memory slice of a GPU has SLICE_VALUE to give. A device takes its weight in each of its slices: a full GPU and a
partition all of it, a share a part. Devices can be allocated together if no slice gives more than it has. In addition,
a spot is allocated only once, and partitions keep within the limits of the product (``Geometry.limits``). The shared
device of a GPU takes all of it, and any number of claims can have it as long as their memory fits. A shared partition
takes its memory slices once, and as many claims can have it as it has compute instances.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from driver.model.device import SLICE_VALUE, Device
from driver.model.gpu import Gpu, Limit, Profile, limits_of
from driver.model.offer import FULL, SHARE, SHARED, DeviceKind, OfferKind, Spot, partition_kind
from driver.model.shared_memory import SharedMemory


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
PARTITION_KINDS = frozenset({DeviceKind.PARTITION, DeviceKind.SHARED_PARTITION})


def possible_kinds(gpu: Gpu, *, shares_only: bool) -> frozenset[DeviceKind]:
    """The kinds of device that ``gpu`` can be without a reset. ``shares_only``: it is to be offered as shares only."""
    if gpu.toggles_freely:
        kinds = ALL_KINDS
    elif gpu.mig_mode.in_force:
        kinds = PARTITION_KINDS
    else:
        kinds = ALL_KINDS - PARTITION_KINDS
    return kinds & {DeviceKind.SHARE, DeviceKind.SHARED} if shares_only else kinds


def in_the_way(device: Device, others: Iterable[Device]) -> list[Device]:
    """Those of ``others`` that leave no room for ``device``; none if it can be allocated together with all of them.

    A device that is in the same spot comes first.
    """
    touched = [other for other in others if other.gpu.uuid == device.gpu.uuid and other.mask & device.mask]
    if device.shared is not None:
        sharing = [other for other in touched if other.kind is DeviceKind.SHARED]
        is_overdrawn = sum(other.spot.at for other in sharing) + device.spot.at > device.shared.gib
        is_overdrawn |= device.clients is not None and len(sharing) >= device.clients
        return [other for other in touched if is_overdrawn or other.kind is not DeviceKind.SHARED]
    same = [other for other in touched if other.spot == device.spot]
    if len(same) < device.spot.kind.instances and len(same) == len(touched):
        return []
    if _has_room(sum(other.weight for other in touched), device.weight):
        return same
    return same + [other for other in touched if other.spot != device.spot]


def overlap(first: Device, second: Device) -> bool:
    """Whether the two devices exclude each other."""
    return bool(in_the_way(first, [second]))


def _has_room(taken: int, weight: int) -> bool:
    """Whether a memory slice of which ``taken`` is taken can give ``weight``."""
    return taken + weight <= SLICE_VALUE


class GpuState(NamedTuple):
    """The occupancy of one GPU and what it may offer, as a small hashable value.

    A cluster has thousands of GPUs: equal GPUs share one state, and results are cached by state.

    ``kinds`` are the devices that it may offer at all and ``shares`` into how many it is divided. ``mask`` are the
    memory slices taken whole, ``taken`` what is used of each limit of the geometry, ``shared`` what shares take of
    every slice (of SLICE_VALUE), ``numbers`` a bit mask of the shares in use. ``room`` are the GiB of its shared device
    (0: it has none), ``used`` those that claims have of it; nothing else of the GPU is free while there are any.
    ``clients``: the number of claims that can still get a part of it; None: any number.
    ``claims``: how many claims have each of the held shared partitions.
    """

    geometry: Geometry
    kinds: frozenset[DeviceKind] = ALL_KINDS
    shares: int = 0
    mask: int = 0
    taken: tuple[int, ...] = ()
    shared: int = 0
    numbers: int = 0
    room: int = 0
    used: int = 0
    clients: int | None = None
    claims: tuple[tuple[Spot, int], ...] = ()

    @classmethod
    def of(
        cls,
        gpu: Gpu,
        held: Iterable[Device] = (),
        foreign: int = 0,
        shares: int = 0,
        kinds: frozenset[DeviceKind] = ALL_KINDS,
        memory: SharedMemory | None = None,
    ) -> GpuState:
        """``gpu`` under ``held`` and the slices in ``foreign``, offering at most ``kinds``.

        ``memory``: its shared device. A part that is held counts as at least 1 GiB: the amount may not be known.
        """
        geometry = geometry_of(gpu.memory_slices, gpu.profiles)
        room, clients = (0, None) if memory is None else (memory.gib, memory.clients(gpu.cuda_driver_version))
        mask, taken, shared, numbers, used = foreign, [0] * len(geometry.limits), 0, 0, 0
        claims: dict[Spot, int] = {}
        for device in held:
            if device.kind is DeviceKind.SHARED:
                used += max(device.spot.at, 1)
                clients = None if clients is None else max(0, clients - 1)
                continue
            if device.kind is DeviceKind.SHARE:
                shared += device.weight
                numbers |= 1 << device.spot.at
                continue
            if device.kind is DeviceKind.SHARED_PARTITION:
                claims[device.spot] = claims.get(device.spot, 0) + 1
            mask |= device.mask
            if device.profile is not None and claims.get(device.spot, 1) == 1:
                usage = (limit.taken_by(device.profile) for limit in geometry.limits)
                taken = [used + more for used, more in zip(taken, usage, strict=True)]
        parts = tuple(sorted(claims.items()))
        return cls(geometry, kinds, shares, mask, tuple(taken), shared, numbers, room, used, clients, parts)

    @property
    def whole(self) -> bool:
        """Whether the full GPU can be allocated."""
        return not self.mask and not self.shared and not self.used and DeviceKind.FULL in self.kinds

    @property
    def free(self) -> float:
        """Free memory slices; shares, and claims of a shared device or partition, occupy a part of each."""
        free = (self.geometry.slices - self.mask.bit_count()) * (SLICE_VALUE - self.shared) / SLICE_VALUE
        for spot, _ in self.claims:
            [window, *_] = self.geometry.windows[spot.kind.profile or ""]
            free += window.bit_count() * self.left_of(spot) / spot.kind.instances
        return free * max(0, self.room - self.used) / max(1, self.room) if self.used else free

    @property
    def left(self) -> int:
        """The GiB of its shared device that claims can still get; 0 while something else of the GPU is held."""
        is_possible = DeviceKind.SHARED in self.kinds and not self.mask and not self.shared and self.clients != 0
        return max(0, self.room - self.used) if is_possible else 0

    def parts_left(self, gib: int) -> int:
        """The number of claims for ``gib`` each that can still get a part of its shared device."""
        parts = self.left // gib
        return parts if self.clients is None else min(parts, self.clients)

    def left_of(self, spot: Spot) -> int:
        """How many claims can still get a compute instance of a held shared partition; 0 also if it is not held."""
        return next((spot.kind.instances - claims for held, claims in self.claims if held == spot), 0)

    @property
    def open_spots(self) -> list[Spot]:
        """The held devices of which more claims can get a part."""
        shared = [Spot(SHARED)] if self.used and self.left else []
        return [*shared, *(spot for spot, _ in self.claims if self.left_of(spot) > 0 and spot.kind.type in self.kinds)]

    def spots(self, kind: OfferKind) -> Iterator[Spot]:
        """Free spots for a device of ``kind``; those of held shared partitions with room come first."""
        if kind.type is DeviceKind.SHARED:
            yield from [Spot(SHARED)] * bool(self.left)
        elif self.used or kind.type not in self.kinds:
            return
        elif kind.type is DeviceKind.FULL:
            if not self.mask and not self.shared:
                yield Spot(FULL)
        elif kind.type is DeviceKind.SHARE:
            if self.shares and not self.mask and _has_room(self.shared, SLICE_VALUE // self.shares):
                yield from (Spot(SHARE, at) for at in range(self.shares) if not self.numbers >> at & 1)
        elif not self.shared:
            profile = kind.profile or ""
            yield from (spot for spot, _ in self.claims if spot.kind == kind and self.left_of(spot) > 0)
            windows = self.geometry.windows.get(profile, ())
            if windows and self.geometry.has_room(profile, self.taken):
                yield from (Spot(kind, start_of(mask)) for mask in windows if not mask & self.mask)

    def admits(self, spot: Spot) -> bool:
        return spot in self.spots(spot.kind)

    def fits(self, device: Device) -> bool:
        """Whether the slices and engines of ``device``, possibly a share of another size, are free."""
        if device.shared is not None:
            free = device.shared.gib - self.used if not self.mask and not self.shared else 0
            return max(device.spot.at, 1) <= free
        if self.used:
            return False
        if self.left_of(device.spot) > 0:
            return True
        if not _has_room(SLICE_VALUE if device.mask & self.mask else self.shared, device.weight):
            return False
        return device.profile is None or self.geometry.has_room(device.profile.name, self.taken)

    def offered(self) -> Iterator[OfferKind]:
        """All kinds of offer that are possible on an empty GPU."""
        if DeviceKind.FULL in self.kinds:
            yield FULL
        if DeviceKind.SHARE in self.kinds and self.shares:
            yield SHARE
        if DeviceKind.SHARED in self.kinds and self.room:
            yield SHARED
        yield from (kind for kind in map(partition_kind, self.geometry.windows) if kind.type in self.kinds)

    def take(self, spot: Spot, claims: int = 0) -> GpuState:
        """Return the state after the allocation of ``spot``, which must be free; 0 GiB of a shared device: the rest.

        ``claims``: how many get a compute instance of a shared partition; 0: as many as can.
        """
        if spot.kind.type is DeviceKind.SHARED:
            clients = None if self.clients is None else self.clients - 1
            return self._replace(used=self.used + spot.at if spot.at else max(self.room, self.used), clients=clients)
        if spot.kind.type is DeviceKind.FULL:
            return self._replace(mask=self.geometry.all_slices)
        if spot.kind.type is DeviceKind.SHARE:
            return self._replace(shared=self.shared + SLICE_VALUE // self.shares, numbers=self.numbers | 1 << spot.at)
        if self.claims and self.left_of(spot):
            return self._replace(claims=_with_claims(self.claims, spot, claims or self.left_of(spot)))
        profile = spot.kind.profile or ""
        [window] = [mask for mask in self.geometry.windows[profile] if start_of(mask) == spot.at]
        taken = tuple(a + b for a, b in zip(self.taken, self.geometry.usage[profile], strict=True))
        of_shared = self.claims
        if spot.kind.type is DeviceKind.SHARED_PARTITION:
            of_shared = _with_claims(of_shared, spot, claims or spot.kind.instances)
        return self._replace(mask=self.mask | window, taken=taken, claims=of_shared)


def _with_claims(held: tuple[tuple[Spot, int], ...], spot: Spot, more: int) -> tuple[tuple[Spot, int], ...]:
    return tuple(sorted({**dict(held), spot: dict(held).get(spot, 0) + more}.items()))
