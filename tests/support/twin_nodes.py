"""The nodes of two fleets that are alike, as data: products, labels, taints, shares, and what is held on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from controller.cluster.fleet import FleetGpu
from driver.model.device import Device, number_gpus
from driver.model.gpu import Gpu, MigMode
from driver.simulator.description import load_description
from tests.support.fleets import possible
from tests.support.podgen import TAINTS
from tests.support.published import discover


@dataclass(frozen=True)
class LogicalNode:
    """A node that is there on both sides. ``shares`` maps positions of GPUs to the number of their shares."""

    name: str
    description: str
    positions: tuple[int, ...]
    labels: Mapping[str, str]
    shares: Mapping[int, int] = field(default_factory=dict)
    mig: frozenset[int] = frozenset()
    taint: tuple[str, str] | None = None
    cpu: str = "64"

    def gpus(self, directory: Path) -> list[Gpu]:
        description: Any = load_description(self.description)
        found = discover(description.replaced(serial=self.name), directory / "twin-gpus" / self.name)
        modes = dict.fromkeys(self.mig, MigMode.ENABLED)
        return [replace(found[at], mig_mode=modes.get(at, found[at].mig_mode)) for at in self.positions]


NODES = (
    LogicalNode("h0", "dgx-h100", (0, 1, 4, 5), {"zone": "z1", "rank": "1"}),
    LogicalNode("h1", "dgx-h100", (0, 4), {"zone": "z2", "rank": "2"}, shares={4: 4}, taint=TAINTS[0]),
    LogicalNode("h2", "dgx-h200", (0, 4), {"zone": "z1", "rank": "3", "quiet": "yes"}),
    LogicalNode("a0", "dgx-a100", (0, 1, 4), {"zone": "z2", "rank": "4"}, mig=frozenset({0, 1})),
    LogicalNode("l0", "l40s-8", (0, 4), {"zone": "z3", "rank": "5"}, shares={0: 3}, taint=TAINTS[1]),
    LogicalNode("h3", "dgx-h100", (0, 1, 2, 3, 4, 5), {"zone": "z3", "rank": "6", "quiet": "no"}, cpu="4"),
)
"""Mixed products, one GPU without MIG, some with shares, two tainted nodes, one with little CPU."""


def held_on(node: LogicalNode, gpus: Sequence[Gpu], random: Random) -> Iterator[Device]:
    """Devices that fit side by side, drawn by ``random``; on half of the nodes none."""
    level = random.choice((0, 0, 0, 0.3, 0.5, 0.8))
    numbers = number_gpus(gpus, {})
    for at, gpu in zip(node.positions, gpus, strict=True):
        entry = FleetGpu(node.name, gpu, numbers[gpu.uuid], shares=node.shares.get(at, 0))
        while possible(entry) and random.random() < level:
            device = random.choice(possible(entry))
            entry = entry.holding((*entry.held, device))
            yield device
