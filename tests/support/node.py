"""A node plugin without kubelet and API server: production parts on a simulated GPU node."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from driver.hardware.host import HostPaths
from driver.hardware.nvml_host import NvmlHost
from driver.hardware.simulator import ZERO_LATENCY, SimulatedNode, load_description
from driver.model.device import number_gpus
from driver.model.gpu import Partition
from driver.slices.names import Pool
from kubelet_plugin.cdi import CdiDirectory
from kubelet_plugin.checkpoint import Checkpoint
from kubelet_plugin.driver_files import find_driver_files
from kubelet_plugin.inventory import Inventory
from kubelet_plugin.locks import KeyedLocks
from kubelet_plugin.preparation import Node, Preparer
from kubelet_plugin.recovery import recover
from kubelet_plugin.scan import Choice, Scanner
from kubelet_plugin.steps import Observer, Steps, unobserved
from tests.support.claims import DRIVER, NODE, ClaimApi

EVERY_GPU_AS_FOUND = Choice()


@dataclass
class NodeUnderTest:
    """The parts a test looks at. ``changes`` counts how often the publisher was told of a change."""

    root: Path
    simulated: SimulatedNode
    node: Node
    preparer: Preparer
    scanner: Scanner
    api: ClaimApi
    changes: list[None]

    def partitions(self, gpu: int = 0) -> list[Partition]:
        """What is cut on the hardware."""
        return list(self.node.host.partitions(self.node.inventory.gpus[gpu]))

    def cdi_specs(self) -> dict[str, Any]:
        return {path.name: json.loads(path.read_text()) for path in (self.root / "cdi").iterdir()}

    def records(self) -> list[str]:
        return sorted(path.name for path in (self.root / "state" / "claims").iterdir())

    def offered(self, gpu: int = 0) -> set[str]:
        return {device.name for device in self.node.inventory.published()[gpu].offers}

    def held(self, gpu: int = 0) -> set[str]:
        return {device.name for device in self.node.inventory.published()[gpu].held}

    def restart(self, observer: Observer = unobserved) -> NodeUnderTest:
        """A new process on the same disk and hardware."""
        return start_node(self.root, self.api, observer, self.simulated.description.name)

    def nothing_left(self) -> bool:
        gpus = range(len(self.node.inventory.gpus))
        return not (self.cdi_specs() or self.records() or any(self.partitions(gpu) for gpu in gpus))


def start_node(
    root: Path,
    api: ClaimApi | None = None,
    observer: Observer = unobserved,
    gpus: str = "dgx-h100",
    choice: Choice = EVERY_GPU_AS_FOUND,
) -> NodeUnderTest:
    """Start, or start again, what the node plugin is made of, below ``root``."""
    api = api or ClaimApi()
    simulated = SimulatedNode.open(load_description(gpus), root / "host", latency=ZERO_LATENCY)
    paths = HostPaths(simulated.root, simulated.root)
    host = NvmlHost(simulated.nvml, paths, simulated=True)
    checkpoint = Checkpoint(root / "state")
    records = checkpoint.load()
    scanner = Scanner(host, choice)
    found, _ = scanner.discover()
    kept = {device.gpu_uuid: device.number for record in records for device in record.devices}
    inventory = Inventory(found, number_gpus(found, kept))
    files = find_driver_files(paths, Path("/"))
    node = Node(Pool(NODE, DRIVER), host, inventory, checkpoint, CdiDirectory(root / "cdi", DRIVER), files)
    changes: list[None] = []
    preparer = Preparer(node, api.read, lambda: changes.append(None), Steps(observer), KeyedLocks(deadline_s=5))
    recover(node, preparer, records)
    scanner.look_at_partitions(inventory, inventory.gpus)
    return NodeUnderTest(root, simulated, node, preparer, scanner, api, changes)
