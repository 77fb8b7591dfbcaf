"""A node plugin without kubelet and API server: production parts on a simulated GPU node."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from driver.hardware.boot import boot_id
from driver.hardware.host import HostPaths
from driver.hardware.nvml_host import NvmlHost
from driver.hardware.simulator import ZERO_LATENCY, SimulatedNode, load_description
from driver.hardware.simulator.description import NodeDescription
from driver.model.device import number_gpus
from driver.model.gpu import Partition
from driver.slices.names import Pool
from driver.steps import unobserved
from kubelet_plugin.cdi import CdiDirectory
from kubelet_plugin.checkpoint import Checkpoint
from kubelet_plugin.driver_files import find_driver_files
from kubelet_plugin.inventory import UNSHARED, Inventory, Sharing
from kubelet_plugin.locks import KeyedLocks
from kubelet_plugin.node import Node
from kubelet_plugin.preparation import Preparer
from kubelet_plugin.records import ClaimRecord, held_shares
from kubelet_plugin.recovery import recover
from kubelet_plugin.releasing import Listeners
from kubelet_plugin.scan import Choice, Scanner
from kubelet_plugin.steps import Observer, Steps
from tests.support.claims import DRIVER, NODE, ClaimApi

EVERY_GPU_AS_FOUND = Choice()


def usual_host(simulated: SimulatedNode) -> NvmlHost:
    return NvmlHost(simulated.nvml, paths_of(simulated), simulated=True)


def paths_of(simulated: SimulatedNode) -> HostPaths:
    return HostPaths(simulated.root, simulated.root)


@dataclass
class NodeUnderTest:
    """The parts a test looks at. ``changes`` is what the publisher was told: "held" or "let go"; whoever is in
    ``repaired`` is told of repairs."""

    root: Path
    simulated: SimulatedNode
    node: Node
    preparer: Preparer
    scanner: Scanner
    api: ClaimApi
    changes: list[str]
    locks: KeyedLocks
    repaired: list[Callable[[ClaimRecord, Sequence[str]], None]]
    open_host: Callable[[SimulatedNode], NvmlHost] = usual_host

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

    def restart(self, observer: Observer = unobserved, sharing: Sharing = UNSHARED) -> NodeUnderTest:
        """A new process on the same disk and hardware."""
        description, open_host = self.simulated.description, self.open_host
        return start_node(self.root, self.api, observer, description, sharing=sharing, open_host=open_host)

    def nothing_left(self) -> bool:
        gpus = range(len(self.node.inventory.gpus))
        return not (self.cdi_specs() or self.records() or any(self.partitions(gpu) for gpu in gpus))


def start_node(
    root: Path,
    api: ClaimApi | None = None,
    observer: Observer = unobserved,
    gpus: str | NodeDescription = "dgx-h100",
    choice: Choice = EVERY_GPU_AS_FOUND,
    sharing: Sharing = UNSHARED,
    open_host: Callable[[SimulatedNode], NvmlHost] = usual_host,
) -> NodeUnderTest:
    """Start, or start again, what the node plugin is made of, below ``root``."""
    api = api or ClaimApi()
    description = load_description(gpus) if isinstance(gpus, str) else gpus
    simulated = SimulatedNode.open(description, root / "host", latency=ZERO_LATENCY)
    host = open_host(simulated)
    checkpoint = Checkpoint(root / "state")
    records = checkpoint.load()
    scanner = Scanner(host, choice)
    found, _ = scanner.discover()
    kept = {device.gpu_uuid: device.number for record in records for device in record.devices}
    inventory = Inventory(found, number_gpus(found, kept), sharing, held_shares(records))
    paths = paths_of(simulated)
    files = find_driver_files(paths, Path("/"))
    node = Node(
        Pool(NODE, DRIVER), host, inventory, checkpoint, CdiDirectory(root / "cdi", DRIVER), files, boot_id(paths)
    )
    changes: list[str] = []
    repaired: list[Callable[[ClaimRecord, Sequence[str]], None]] = []
    locks = KeyedLocks(deadline_s=5)

    def tell(record: ClaimRecord, made: Sequence[str]) -> None:
        for each in repaired:
            each(record, made)

    listeners = Listeners(lambda: changes.append("held"), lambda: changes.append("let go"), tell)
    steps = Steps(observer)
    preparer = Preparer(node, api.read, listeners, steps, locks)
    recover(node, preparer, records, steps)
    scanner.look_at_partitions(inventory, inventory.gpus)
    return NodeUnderTest(root, simulated, node, preparer, scanner, api, changes, locks, repaired, open_host)
