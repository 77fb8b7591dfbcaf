"""The fleet: nodes of eight H100, of which claims hold six: 1g.10gb partitions, or ten parts of each GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory

from controller.cluster.fleet import Fleet, FleetGpu
from driver.model.device import Device, shared_device
from driver.model.gpu import Gpu
from driver.model.gpu_settings import UNSHARED
from driver.model.offer import SHARE, DeviceKind, OfferKind
from driver.model.shared_memory import SharingStrategy
from driver.simulator.description import load_description
from driver.slices.slice_names import Pool
from tests.support.published import DRIVER, discover

DESCRIPTION = "dgx-h100"
LOADED_GPUS = 6
"""Of the eight of a node: three quarters of the memory slices are given out."""

HELD_PROFILE = "1g.10gb"
PARTS = 10
"""Claims of a GPU that is divided in another way."""


class Division(StrEnum):
    """What claims hold of six GPUs of a node, and what the pods of a burst ask for."""

    PARTITIONS = "partitions"
    SHARES = "shares"
    SHARED = "shared"


def parts(gib: int) -> list[int]:
    """``gib`` in PARTS of whole GiB."""
    return [gib // PARTS + (number < gib % PARTS) for number in range(PARTS)]


@dataclass(frozen=True)
class HeldGpu:
    """What claims have of one GPU."""

    node: str
    number: int
    devices: tuple[Device, ...]


def loaded_fleet(count: int, division: Division = Division.PARTITIONS) -> Fleet:
    """``count`` equal nodes, loaded to three quarters."""
    with TemporaryDirectory(prefix="tessera-scale-") as directory:
        gpus = discover(load_description(DESCRIPTION), Path(directory))
    return Fleet.of(_loaded(entry) for node in range(count) for entry in _node(f"node-{node:04}", gpus, division))


def held(fleet: Fleet) -> Iterator[HeldGpu]:
    """GPU after GPU, those that have something held."""
    for entry in fleet:
        if entry.held:
            yield HeldGpu(entry.node, entry.number, entry.held)


def pool_of(node: str) -> Pool:
    return Pool(node, DRIVER)


def _node(name: str, gpus: Sequence[Gpu], division: Division) -> Iterator[FleetGpu]:
    shares = PARTS if division is Division.SHARES else 0
    strategy = SharingStrategy.TIME_SLICING if division is Division.SHARED else None
    for gpu in gpus:
        renamed = replace(gpu, uuid=f"{gpu.uuid[:-5]}-{name[-4:]}")
        yield FleetGpu(name, renamed, gpu.minor, shares=shares, shared=UNSHARED.memory_of(gpu, strategy))


def _loaded(entry: FleetGpu) -> FleetGpu:
    if entry.number >= LOADED_GPUS:
        return entry
    if entry.shared is not None:
        return entry.holding(
            shared_device(entry.gpu, entry.number, entry.shared, gib) for gib in parts(entry.shared.gib)
        )
    kind = SHARE if entry.shares else OfferKind(DeviceKind.PARTITION, HELD_PROFILE)
    return entry.holding(device for device in entry.devices if device.spot.kind == kind)
