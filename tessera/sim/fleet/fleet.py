"""A simulated fleet: nodes, one watch of each resource for all of them, and few threads."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import click

from driver.errors import UsageError
from driver.kube.client import KubeClient
from driver.kube.heartbeat import HeartbeatWatch
from driver.kube.types import GpuNodePlan, Key
from driver.kube.watch_cache import Change, WatchCache
from driver.kube.work_loop import LoopPool
from driver.model.gpu import Gpu
from driver.model.plan import PATH, PlanMode
from kubelet_plugin.hosts import open_host
from kubelet_plugin.plan.api import without_status
from kubelet_plugin.plan.follower import MODE_CHECK_INTERVAL_SECONDS
from kubelet_plugin.settings import node_settings
from tessera.sim.fleet.kubelets import Kubelets
from tessera.sim.fleet.node import FleetContext, FleetNode
from tessera.sim.fleet.node_objects import NodeObjects


def discover(gpus: str) -> tuple[Gpu, ...]:
    """The GPUs of a simulated node of this name or file, as the node plugin discovers them. Raises UsageError."""
    settings = node_settings(node_name="sim", gpus=f"sim:{gpus.removeprefix('sim:')}", sim_latency="zero")
    with open_host(settings, lasting=False) as (host, _):
        found = host.discover()
    if found.faults:
        raise UsageError(f"the GPUs of {gpus} can't be read: {found.faults[0]}")
    return tuple(found.gpus)


def gpus_of(node: str, template: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """``template`` with UUIDs of the node's own, the same at each start; all other properties are shared."""
    return tuple(replace(gpu, uuid=f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{node}/{gpu.uuid}')}") for gpu in template)


THREADS = 8
"""Concurrent work loops, which mostly wait for the API server."""

PUBLISHED_CHECK_INTERVAL_SECONDS = 0.2


@dataclass(frozen=True)
class FleetSettings:
    """``gpus``: those of each node, which get UUIDs of their own. ``leases``: renew the nodes' Leases; otherwise
    Kubernetes marks the nodes not ready."""

    name: str
    nodes: int
    gpus: Sequence[Gpu]
    driver: str
    namespace: str
    mode: PlanMode
    leases: bool


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
            settings.mode,
            self._pool.loop,
            self._plan_of,
            self._heartbeat.alive,
        )
        self._nodes = {name: FleetNode(shared, owner, gpus_of(name, settings.gpus)) for name, owner in owners.items()}
        self._kubelets = Kubelets(client, settings.driver, self._nodes.values(), self._pool.loop)
        self._watches: list[Callable[[threading.Event], None]] = [*self._kubelets.loops]
        if settings.mode is PlanMode.PLANNED:
            self._watches += [self._plans.run, self._heartbeat.run, self._check_heartbeat]

    def start(self, stop: threading.Event) -> None:
        """Publish slices and follow plans and pods until ``stop`` is set."""
        for target in (*self._watches, *[self._pool.run] * THREADS, self._wake):
            threading.Thread(target=target, args=(stop,), daemon=True, name=target.__qualname__).start()
        for node in self._nodes.values():
            node.plan_changed()

    @property
    def published(self) -> int:
        """Number of nodes whose slices have been written."""
        return sum(node.published for node in self._nodes.values())

    def __str__(self) -> str:
        follow = sum(node.follower.mode is PlanMode.PLANNED for node in self._nodes.values())
        refused = self._kubelets.conflicts
        return (
            f"{len(self._nodes)} nodes, {follow} follow the controller; "
            f"{self._kubelets.running} pods run, {self._kubelets.prepared} claims are prepared"
            + (f", {refused} were refused: their devices are held" if refused else "")
        )

    def _plan_of(self, node: str) -> GpuNodePlan | None:
        return self._plans.get(Key("", node))

    def _plans_changed(self, changes: Sequence[Change[GpuNodePlan]]) -> None:
        for change in changes:
            if (node := self._nodes.get(change.key.name)) is not None:
                node.plan_changed()

    def _check_heartbeat(self, stop: threading.Event) -> None:
        """Let every node check the age of the heartbeat periodically."""
        while not stop.wait(MODE_CHECK_INTERVAL_SECONDS):
            for node in self._nodes.values():
                node.follower.update_mode()

    def _wake(self, stop: threading.Event) -> None:
        stop.wait()
        self._pool.wake()


@contextmanager
def running_fleet(client: KubeClient, settings: FleetSettings) -> Iterator[SimulatedFleet]:
    """A fleet that publishes while the block runs; afterwards its Nodes, slices and plans are gone.

    Raises ApiError and EnvironmentFault.
    """
    stop = threading.Event()
    objects = NodeObjects(client, settings.driver, settings.name, settings.nodes)
    objects.remove()
    try:
        fleet = SimulatedFleet(client, settings, objects.create())
        fleet.start(stop)
        if settings.leases:
            threading.Thread(target=objects.keep_alive, args=(stop,), daemon=True).start()
        with click.progressbar(length=settings.nodes, label="publishing slices") as bar:
            while bar.pos < settings.nodes:
                time.sleep(PUBLISHED_CHECK_INTERVAL_SECONDS)
                bar.update(fleet.published - bar.pos)
        yield fleet
    finally:
        stop.set()
        objects.remove()
