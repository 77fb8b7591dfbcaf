"""Which kinds of devices are smaller than others, and which are as large as their GPU (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from controller.cluster.fleet import Fleet, FleetGpu
from driver.model.offer import FULL, SHARE, DeviceKind, OfferKind
from driver.placement.occupancy import geometry_of


class KindSize(NamedTuple):
    """What kinds are compared by: memory of a device in bytes, then compute slices, then the name of the kind."""

    memory_bytes: int
    compute_slices: float
    name: str


def sizes_of(fleet: Fleet) -> dict[OfferKind, KindSize]:
    """The size of each kind of device in ``fleet``; where it differs between products, the smallest.

    A share has its part of the GPU's memory.
    """
    sizes: dict[OfferKind, KindSize] = {}
    for gpu in _of_each_product(fleet):
        for kind, size in _sizes_on(gpu):
            sizes[kind] = min(size, sizes.get(kind, size))
    return sizes


@dataclass(frozen=True)
class ProfileSizes:
    """``smallest``: by kind that is the smallest partition of some product, the UUIDs of GPUs of these products; None:
    all that have the kind. ``whole``: kinds of partitions that are as large as their GPU."""

    smallest: Mapping[OfferKind, frozenset[str] | None]
    whole: frozenset[OfferKind]

    @classmethod
    def of(cls, fleet: Fleet) -> ProfileSizes:
        smallest_on: dict[tuple[object, ...], OfferKind] = {}
        having: dict[tuple[object, ...], frozenset[OfferKind]] = {}
        whole = set[OfferKind]()
        for gpu in _of_each_product(fleet):
            sizes = {kind: size for kind, size in _sizes_on(gpu) if kind.type is DeviceKind.PARTITION}
            having[_product(gpu)] = frozenset(sizes)
            if sizes:
                smallest_on[_product(gpu)] = min(sizes, key=sizes.__getitem__)
            geometry = geometry_of(gpu.gpu.memory_slices, gpu.gpu.profiles)
            whole |= {kind for kind in sizes if geometry.windows[kind.profile or ""] == (geometry.all_slices,)}
        smallest: dict[OfferKind, frozenset[str] | None] = {}
        for kind in smallest_on.values():
            products = {product for product, smallest_kind in smallest_on.items() if smallest_kind == kind}
            if {product for product, kinds in having.items() if kind in kinds} == products:
                smallest[kind] = None
            else:
                smallest[kind] = frozenset(gpu.gpu.uuid for gpu in fleet if _product(gpu) in products)
        return cls(smallest, frozenset(whole))


def _product(gpu: FleetGpu) -> tuple[object, ...]:
    return (gpu.state.geometry, gpu.gpu.memory_bytes, gpu.shares)


def _of_each_product(fleet: Fleet) -> list[FleetGpu]:
    """One GPU of each kind of hardware, the first."""
    return list({_product(gpu): gpu for gpu in reversed([*fleet])}.values())


def _sizes_on(gpu: FleetGpu) -> Iterator[tuple[OfferKind, KindSize]]:
    yield SHARE, KindSize(gpu.gpu.memory_bytes // max(gpu.shares, 1), 0, str(SHARE))
    for profile in gpu.gpu.profiles:
        kind = OfferKind(DeviceKind.PARTITION, profile.name)
        yield kind, KindSize(profile.memory_bytes, profile.compute_slices, profile.name)
    yield FULL, KindSize(gpu.gpu.memory_bytes, math.inf, str(FULL))
