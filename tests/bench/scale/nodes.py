"""The fleet: nodes of eight H100, of which six are full of 1g.10gb partitions that claims hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from controller.cluster.fleet import Fleet, FleetGpu
from driver.model.device import Device
from driver.model.gpu import Gpu
from driver.simulator.description import load_description
from driver.slices.slice_names import Pool
from tests.support.published import DRIVER, discover

DESCRIPTION = "dgx-h100"
LOADED_GPUS = 6
"""Of the eight of a node: three quarters of the memory slices are given out."""

HELD_PROFILE = "1g.10gb"


@dataclass(frozen=True)
class HeldGpu:
    """What claims have of one GPU."""

    node: str
    number: int
    devices: tuple[Device, ...]


def loaded_fleet(count: int) -> Fleet:
    """``count`` equal nodes, loaded to three quarters."""
    with TemporaryDirectory(prefix="tessera-scale-") as directory:
        gpus = discover(load_description(DESCRIPTION), Path(directory))
    return Fleet.of(_loaded(entry) for node in range(count) for entry in _node(f"node-{node:04}", gpus))


def held(fleet: Fleet) -> Iterator[HeldGpu]:
    """GPU after GPU, those that have something held."""
    for entry in fleet:
        if entry.held:
            yield HeldGpu(entry.node, entry.number, entry.held)


def pool_of(node: str) -> Pool:
    return Pool(node, DRIVER)


def _node(name: str, gpus: Sequence[Gpu]) -> Iterator[FleetGpu]:
    for gpu in gpus:
        yield FleetGpu(name, replace(gpu, uuid=f"{gpu.uuid[:-5]}-{name[-4:]}"), gpu.minor)


def _loaded(entry: FleetGpu) -> FleetGpu:
    if entry.number >= LOADED_GPUS:
        return entry
    return entry.holding(d for d in entry.devices if d.profile is not None and d.profile.name == HELD_PROFILE)
