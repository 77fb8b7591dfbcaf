"""A simulated fleet: nodes, one watch of each resource for all of them, and few threads."""

from __future__ import annotations

import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from driver.errors import UsageError
from driver.hardware.host import Host
from driver.hardware.host_paths import HostPaths
from driver.kube.client import KubeClient
from driver.kube.heartbeat import HeartbeatWatch
from driver.kube.types import GpuNodePlan, Key
from driver.kube.watch_cache import Change, WatchCache
from driver.kube.work_loop import LoopPool
from driver.model.gpu import Gpu
from driver.model.plan import PATH, PlanMode
from driver.simulator import ZERO_LATENCY, NodeDescription, SimulatedNode
from kubelet_plugin.plan.api import without_status
from kubelet_plugin.plan.follower import MODE_CHECK_INTERVAL_SECONDS
from tessera.sim.fleet.kubelets import Kubelets
from tessera.sim.fleet.node import FleetContext, FleetNode
from tessera.sim.fleet.node_objects import NodeObjects, Progress


def discover(description: NodeDescription) -> tuple[Gpu, ...]:
    """The GPUs of one such node, as the node plugin discovers them. Raises UsageError if they can't be read."""
    with tempfile.TemporaryDirectory(prefix="tessera-fleet-") as directory:
        root = Path(directory)
        node = SimulatedNode.open(description, root, latency=ZERO_LATENCY)
        host = Host(node.nvml, HostPaths(root, root), simulated=True)
        try:
            found = host.discover()
        finally:
            host.close()
    if found.faults:
        raise UsageError(f"the GPUs of {description.name} can't be read: {found.faults[0]}")
    return tuple(found.gpus)


def gpus_of(node: str, template: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """``template`` with UUIDs of the node's own, the same at each start; all other properties are shared."""
    return tuple(replace(gpu, uuid=f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{node}/{gpu.uuid}')}") for gpu in template)


THREADS = 8
"""Concurrent work loops, which mostly wait for the API server."""


@dataclass(frozen=True)
class FleetSettings:
    """``follows``: nodes follow plans, otherwise they are standalone. ``leases``: renew the nodes' Leases; without it
    Kubernetes marks them not ready."""

    name: str
    nodes: int
    description: NodeDescription
    driver: str
    namespace: str
    follows: bool = True
    leases: bool = True


@dataclass(frozen=True)
class FleetState:
    """Counts of nodes, pods and prepared claims; ``planned`` nodes follow a plan."""

    nodes: int
    published: int
    planned: int
    pods: int
    claims: int
    conflicts: int


class SimulatedFleet:
    """Simulated nodes whose Node objects exist (``owners``: owner references by name)."""

    def __init__(self, client: KubeClient, settings: FleetSettings, owners: Mapping[str, Mapping[str, Any]]) -> None:
        self._pool = LoopPool()
        self._heartbeat = HeartbeatWatch(client, settings.namespace)
        self._plans = WatchCache(client, PATH, GpuNodePlan, without_status, self._plans_changed)
        shared = FleetContext(
            client,
            settings.driver,
            settings.namespace,
            self._pool.loop,
            self._plan_of,
            self._heartbeat.alive,
            settings.follows,
        )
        template = discover(settings.description)
        self.nodes = {name: FleetNode(shared, owner, gpus_of(name, template)) for name, owner in owners.items()}
        self.kubelets = Kubelets(client, settings.driver, self.nodes.values(), self._pool.loop)
        self._watches = (
            *self.kubelets.loops,
            *((self._plans.run, self._heartbeat.run, self._check_heartbeat) if settings.follows else ()),
        )

    def start(self, stop: threading.Event) -> None:
        """Publish slices and follow plans and pods until ``stop`` is set."""
        targets: list[Callable[[threading.Event], None]] = [
            *self._watches,
            *[self._pool.run] * THREADS,
            self._wake,
        ]
        for target in targets:
            threading.Thread(target=target, args=(stop,), daemon=True, name=target.__qualname__).start()
        for node in self.nodes.values():
            node.plan_changed()

    @property
    def state(self) -> FleetState:
        modes = Counter(node.follower.mode for node in self.nodes.values())
        published = sum(node.published for node in self.nodes.values())
        kubelets = self.kubelets
        return FleetState(
            len(self.nodes), published, modes[PlanMode.PLANNED], kubelets.running, kubelets.prepared, kubelets.conflicts
        )

    def _plan_of(self, node: str) -> GpuNodePlan | None:
        return self._plans.get(Key("", node))

    def _plans_changed(self, changes: Sequence[Change[GpuNodePlan]]) -> None:
        for change in changes:
            if (node := self.nodes.get(change.key.name)) is not None:
                node.plan_changed()

    def _check_heartbeat(self, stop: threading.Event) -> None:
        """Let every node check the age of the heartbeat periodically."""
        while not stop.wait(MODE_CHECK_INTERVAL_SECONDS):
            for node in self.nodes.values():
                node.follower.update_mode()

    def _wake(self, stop: threading.Event) -> None:
        stop.wait()
        self._pool.wake()


@contextmanager
def running_fleet(client: KubeClient, settings: FleetSettings, progress: Progress) -> Iterator[SimulatedFleet]:
    """A fleet that publishes while the block runs; afterwards its Nodes, slices and plans are gone.

    Raises ApiError, UsageError and EnvironmentFault.
    """
    stop = threading.Event()
    objects = NodeObjects(client, settings.driver, settings.name, settings.nodes, progress)
    objects.remove()
    try:
        fleet = SimulatedFleet(client, settings, objects.create())
        fleet.start(stop)
        if settings.leases:
            threading.Thread(target=objects.keep_alive, args=(stop,), daemon=True).start()
        _await_published(fleet, progress)
        yield fleet
    finally:
        stop.set()
        objects.remove()


def _await_published(fleet: SimulatedFleet, progress: Progress) -> None:
    while (state := fleet.state).published < state.nodes:
        progress("publishing slices", state.published, state.nodes)
        time.sleep(0.2)
    progress("publishing slices", state.nodes, state.nodes)
