"""A node plugin without kubelet and API server: production parts on a simulated GPU node."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from driver.errors import HardwareError
from driver.hardware.host import Host
from driver.hardware.host_paths import HostPaths, boot_id
from driver.kube.types import Reference
from driver.model.device import number_gpus
from driver.model.gpu import Gpu, Partition
from driver.model.gpu_settings import UNSHARED, GpuSharing
from driver.simulator.description import NodeDescription, load_description
from driver.simulator.node import SimulatedNode
from driver.simulator.state.latency import ZERO_LATENCY
from driver.slices.slice_names import Pool
from driver.step_observer import unobserved
from kubelet_plugin.cdi.driver_files import find_driver_files
from kubelet_plugin.cdi.spec_files import CdiDirectory
from kubelet_plugin.cdi.spec_format import SpecFormat
from kubelet_plugin.changes import ChangeNotifier, GpuChange, HardwareOutcomes, NodeChange
from kubelet_plugin.checkpoint.gpu_and_claim_locks import KeyedLocks
from kubelet_plugin.checkpoint.recorded_gpus import held_profiles, held_shares, held_strategies
from kubelet_plugin.checkpoint.records import Checkpoint, ClaimRecord
from kubelet_plugin.claims.claim_memory import GpuSettingsOfClaims, LimitProbe
from kubelet_plugin.claims.claim_stores import ClaimStores
from kubelet_plugin.claims.cleanup import ClaimCleanup
from kubelet_plugin.claims.partitions import Partitions
from kubelet_plugin.claims.preparer import Preparer
from kubelet_plugin.coexistence.adopted_claims import adopt_claims
from kubelet_plugin.inventory.inventory import Inventory
from kubelet_plugin.inventory.scan import Scanner
from kubelet_plugin.reconcile.recovery import recover
from kubelet_plugin.settings import NodeSettings, node_settings
from kubelet_plugin.status.events import PluginEvents
from kubelet_plugin.step_names import Observer, StepRunner, Took
from tests.support.claims import NODE, ClaimApi


def choosing(**flags: object) -> NodeSettings:
    """Settings with these flags, to choose GPUs."""
    return node_settings(node_name=NODE, **flags)


EVERY_GPU_AS_FOUND = choosing()


@dataclass
class KeptNodeEvents:
    """``told`` gets the Events on the node: (reason, message); ``about`` what each is about."""

    told: list[tuple[str, str]] = field(default_factory=list)
    about: list[str] = field(default_factory=list)

    def node(self, reason: str, message: str, warning: bool = True, about: str = "") -> None:
        self.told.append((reason, message))
        self.about.append(about)


@dataclass
class KeptEvents:
    """``told`` gets the Events: (kind and name of what each is about, reason, message)."""

    told: list[tuple[str, str, str]] = field(default_factory=list)

    def record(self, about: Reference, reason: str, message: str, _type: str, _series: str) -> None:
        self.told.append((f"{about.kind}/{about.name}", reason, message))


@dataclass
class RelayedOutcomes:
    """Passes the outcomes of hardware changes on to ``receivers``."""

    receivers: list[HardwareOutcomes] = field(default_factory=list)

    def change_failed(self, gpu: Gpu, change: GpuChange, error: HardwareError) -> None:
        for receiver in self.receivers:
            receiver.change_failed(gpu, change, error)

    def change_succeeded(self, gpu: Gpu, change: GpuChange) -> None:
        for receiver in self.receivers:
            receiver.change_succeeded(gpu, change)


class KeptChanges(ChangeNotifier):
    """Adds "held" or "let go" to ``kept`` instead of telling subscribers."""

    def __init__(self, kept: list[str]) -> None:
        super().__init__()
        self._kept = kept

    def report(self, change: NodeChange) -> None:
        words = {NodeChange.PREPARED: ["held"], NodeChange.RELEASED: ["let go"]}
        self._kept += words.get(change, [])


def usual_host(simulated: SimulatedNode) -> Host:
    return Host(simulated.nvml, paths_of(simulated), simulated=True)


def paths_of(simulated: SimulatedNode) -> HostPaths:
    return HostPaths(simulated.root, simulated.root)


@dataclass
class NodeUnderTest:
    """The parts a test looks at. ``changes`` is what the publisher was told: "held" or "let go"; whoever is in
    ``repaired`` is told of repairs."""

    root: Path
    simulated: SimulatedNode
    host: Host
    node: ClaimStores
    preparer: Preparer
    cleanup: ClaimCleanup
    scanner: Scanner
    api: ClaimApi
    changes: list[str]
    locks: KeyedLocks
    repaired: list[Callable[[ClaimRecord, str], None]]
    outcomes: RelayedOutcomes
    partitions_of_claims: Partitions
    open_host: Callable[[SimulatedNode], Host] = usual_host
    choice: NodeSettings = EVERY_GPU_AS_FOUND
    adoptions: list[tuple[str, str, str]] = field(default_factory=list)

    def partitions(self, gpu: int = 0) -> list[Partition]:
        """What is cut on the hardware."""
        return list(self.host.partitions(self.node.inventory.gpus[gpu]))

    def cdi_specs(self) -> dict[str, Any]:
        return {path.name: json.loads(path.read_text()) for path in (self.root / "cdi").iterdir()}

    def records(self) -> list[str]:
        return sorted(path.name for path in (self.root / "state" / "claims").iterdir())

    def offered(self, gpu: int = 0) -> set[str]:
        return {device.name for device in self.node.inventory.published()[gpu].offers}

    def held(self, gpu: int = 0) -> set[str]:
        return {device.name for device in self.node.inventory.published()[gpu].held}

    def restart(self, observer: Observer = unobserved, sharing: GpuSharing = UNSHARED) -> NodeUnderTest:
        """A new process on the same disk and hardware."""
        description, open_host = self.simulated.description, self.open_host
        return start_node(self.root, self.api, observer, description, self.choice, sharing, open_host)

    def nothing_left(self) -> bool:
        gpus = range(len(self.node.inventory.gpus))
        return not (self.cdi_specs() or self.records() or any(self.partitions(gpu) for gpu in gpus))


def start_node(
    root: Path,
    api: ClaimApi | None = None,
    observer: Observer = unobserved,
    gpus: str | NodeDescription = "dgx-h100",
    choice: NodeSettings = EVERY_GPU_AS_FOUND,
    sharing: GpuSharing = UNSHARED,
    open_host: Callable[[SimulatedNode], Host] = usual_host,
    took: Took | None = None,
    clock: Callable[[], float] = time.time,
) -> NodeUnderTest:
    """Start, or start again, what the node plugin is made of, below ``root``."""
    api = api or ClaimApi()
    description = load_description(gpus) if isinstance(gpus, str) else gpus
    simulated = SimulatedNode.open(description, root / "host", latency=ZERO_LATENCY, clock=clock)
    host = open_host(simulated)
    checkpoint = Checkpoint(root / "state")
    records = checkpoint.load()
    scanner = Scanner(host, choice, KeptNodeEvents(), held_profiles(records))
    found, _ = scanner.discover()
    kept = {device.gpu_uuid: device.number for record in records for device in record.devices}
    parts = held_shares(records), held_strategies(records)
    limited = sharing.limited_by(LimitProbe(host.memory_limits))
    inventory = Inventory(found, number_gpus(found, kept), limited, *parts)
    inventory.set_reserved({})
    scanner.discover(inventory)  # which asks for MIG mode
    paths = paths_of(simulated)
    files = find_driver_files(paths, Path("/"), choice.cdi_hook, choice.memory_hook)
    cdi = CdiDirectory(root / "cdi", SpecFormat(choice.driver_name, files, choice.framework_variables))
    pool = Pool(NODE, choice.driver_name)
    changes: list[str] = []
    repaired: list[Callable[[ClaimRecord, str], None]] = []
    locks = KeyedLocks(timeout_seconds=5)

    def tell(record: ClaimRecord, made: str) -> None:
        for each in repaired:
            each(record, made)

    outcomes, steps = RelayedOutcomes(), StepRunner(observer, took)
    held = ClaimStores(pool=pool, inventory=inventory, checkpoint=checkpoint, cdi=cdi, locks=locks, boot=boot_id(paths))
    partitions = Partitions(host, inventory, outcomes, steps, publishes_existing=choice.publish_existing)
    gpu_settings = GpuSettingsOfClaims.of(host, checkpoint, steps, root / "mps")
    preparer = Preparer(api, held, partitions, gpu_settings, KeptChanges(changes), tell, steps)
    adopted = KeptEvents()
    adopt_claims(held, choice, host.partitions, api, PluginEvents(adopted.record, NODE))
    recover(held, preparer.cleanup, steps)
    scanner.scan_partitions(inventory, inventory.gpus)
    return NodeUnderTest(
        root, simulated, host, held, preparer, preparer.cleanup, scanner, api, changes, locks, repaired, outcomes,
        partitions, open_host, choice, adopted.told,
    )  # fmt: skip
