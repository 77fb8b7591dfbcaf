"""Which kinds of devices are smaller than others, and which are as large as their GPU (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from controller.cluster.fleet import Fleet, FleetGpu
from driver.model.device import Device, devices_of
from driver.model.offer import DeviceKind, OfferKind


class KindSize(NamedTuple):
    """What kinds are compared by: memory of a device in bytes, then compute slices, then the name of the kind."""

    memory_bytes: int
    compute_slices: float
    name: str

    @classmethod
    def of(cls, device: Device) -> KindSize:
        without_profile = 0 if device.kind in {DeviceKind.SHARE, DeviceKind.SHARED} else math.inf
        compute_slices = without_profile if device.profile is None else device.profile.compute_slices
        return cls(device.memory_bytes, compute_slices, str(device.spot.kind))


def sizes_of(fleet: Fleet) -> dict[OfferKind, KindSize]:
    """The size of each kind of device in ``fleet``; where it differs between products, the smallest.

    A share has its part of the GPU's memory, a shared device all that claims can have of it.
    """
    sizes: dict[OfferKind, KindSize] = {}
    for gpu in _of_each_product(fleet):
        for device in _devices_on(gpu):
            size = KindSize.of(device)
            sizes[device.spot.kind] = min(size, sizes.get(device.spot.kind, size))
    return sizes


@dataclass(frozen=True)
class ProfileSizes:
    """The smallest profile of each product, and the profiles that are as large as the GPU.

    ``smallest``: by kind that is the smallest partition of some product, the UUIDs of the GPUs of these products; None:
    all GPUs that have the kind. ``whole``: kinds of partitions that are as large as their GPU.
    """

    smallest: Mapping[OfferKind, frozenset[str] | None]
    whole: frozenset[OfferKind]

    @classmethod
    def of(cls, fleet: Fleet) -> ProfileSizes:
        smallest_on: dict[tuple[object, ...], OfferKind] = {}
        having: dict[tuple[object, ...], frozenset[OfferKind]] = {}
        whole = set[OfferKind]()
        for gpu in _of_each_product(fleet):
            partitions = [device for device in _devices_on(gpu) if device.kind is DeviceKind.PARTITION]
            having[_product(gpu)] = frozenset(device.spot.kind for device in partitions)
            if partitions:
                smallest_on[_product(gpu)] = min(partitions, key=KindSize.of).spot.kind
            whole |= {device.spot.kind for device in partitions if device.mask == gpu.gpu.all_slices}
        smallest: dict[OfferKind, frozenset[str] | None] = {}
        for kind in smallest_on.values():
            products = {product for product, smallest_kind in smallest_on.items() if smallest_kind == kind}
            if {product for product, kinds in having.items() if kind in kinds} == products:
                smallest[kind] = None
            else:
                smallest[kind] = frozenset(gpu.gpu.uuid for gpu in fleet if _product(gpu) in products)
        return cls(smallest, frozenset(whole))


def _product(gpu: FleetGpu) -> tuple[object, ...]:
    return (gpu.state.geometry, gpu.gpu.memory_bytes, gpu.shares, gpu.shared)


def _of_each_product(fleet: Fleet) -> list[FleetGpu]:
    """One GPU of each kind of hardware, the first."""
    return list({_product(gpu): gpu for gpu in reversed([*fleet])}.values())


def _devices_on(gpu: FleetGpu) -> tuple[Device, ...]:
    return devices_of(gpu.gpu, gpu.number, gpu.shares, shared=gpu.shared)
