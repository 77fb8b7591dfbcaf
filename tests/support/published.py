"""The slices of a simulated node, made by the production parts, without a node plugin behind them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from driver.hardware.host import Host
from driver.hardware.host_paths import HostPaths
from driver.model.device import devices_of, number_gpus
from driver.model.gpu import Gpu
from driver.simulator.description import NodeDescription
from driver.simulator.node import SimulatedNode
from driver.simulator.state.latency import ZERO_LATENCY
from driver.slices.build import Content, PublishedGpu, SliceBuilder, slice_object
from driver.slices.slice_names import Pool

DRIVER = "gpu.tessera.dev"


@contextmanager
def simulated_host(description: NodeDescription, root: Path) -> Iterator[Host]:
    """The hardware of a node that is simulated in ``root``, answering without delay."""
    node = SimulatedNode.open(description, root, latency=ZERO_LATENCY)
    host = Host(node.nvml, HostPaths(root, root), simulated=True)
    try:
        yield host
    finally:
        host.close()


def discover(description: NodeDescription, root: Path) -> tuple[Gpu, ...]:
    """Every GPU of that node; all of them must answer."""
    with simulated_host(description, root) as host:
        found = host.discover()
    assert found.faults == ()
    return tuple(found.gpus)


def build_slices(pool: Pool, gpus: Iterable[PublishedGpu]) -> dict[str, Content]:
    """Content of every slice of the pool, by slice name."""
    return SliceBuilder(pool).build(gpus)


def slices_of(node: str, gpus: Iterable[Gpu]) -> list[dict[str, Any]]:
    """The slices in which a node of that name offers everything its GPUs could ever be."""
    pool = Pool(node, DRIVER)
    found = list(gpus)
    numbers = number_gpus(found, {})
    offered = [PublishedGpu(gpu, numbers[gpu.uuid], (), devices_of(gpu, numbers[gpu.uuid])) for gpu in found]
    built = build_slices(pool, offered)
    return [slice_object(name, content, pool, 1, len(built), None) for name, content in built.items()]


def devices_in(slices: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every device in them, as the API knows it."""
    for item in slices:
        yield from item["spec"].get("devices") or ()
