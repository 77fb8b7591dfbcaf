"""The fleet put together: nodes, one watch of each resource for all of them, few threads."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from driver.hardware.simulator import NodeDescription
from driver.kube.heartbeat import HeartbeatWatch
from driver.kube.loop_pool import LoopPool
from driver.kube.objects import Key
from driver.kube.plans import GpuNodePlan
from driver.kube.transport import KubeClient
from driver.kube.watch_cache import Change, WatchCache
from driver.model.plan import PATH, PlanMode
from kubelet_plugin.plan import LOOK_S
from kubelet_plugin.plan_word import plan_as_told
from tessera.fleet.gpus import discover, gpus_of
from tessera.fleet.kubelets import Kubelets
from tessera.fleet.node import FleetNode, Shared
from tessera.fleet.node_objects import NodeObjects, Progress

THREADS = 8
"""Loops that are at work at once: most of their time is waiting for the API server."""


@dataclass(frozen=True)
class FleetSettings:
    """``follows``: nodes do what a controller's plans say, or else offer whatever fits. ``leases``: renew the nodes'
    Leases, for a cluster that would take them for lost."""

    name: str
    nodes: int
    description: NodeDescription
    driver: str
    namespace: str
    follows: bool = True
    leases: bool = True


@dataclass(frozen=True)
class State:
    """Numbers of one moment; ``planned`` nodes follow a plan, ``devices`` are in the slices."""

    nodes: int
    published: int
    planned: int
    pods: int
    claims: int
    conflicts: int


class Fleet:
    """Nodes whose Node objects are there (``owners``: references to them, by name)."""

    def __init__(self, client: KubeClient, settings: FleetSettings, owners: Mapping[str, Mapping[str, Any]]) -> None:
        self._pool = LoopPool()
        self._heartbeat = HeartbeatWatch(client, settings.namespace)
        self._plans = WatchCache(client, PATH, GpuNodePlan, plan_as_told, self._plans_changed)
        shared = Shared(
            client,
            settings.driver,
            settings.namespace,
            self._pool.loop,
            self._plan_of,
            self._heartbeat.alive,
            settings.follows,
        )
        like = discover(settings.description)
        self.nodes = {name: FleetNode(shared, owner, gpus_of(name, like)) for name, owner in owners.items()}
        self.kubelets = Kubelets(client, settings.driver, self.nodes.values(), self._pool.loop)
        self._watches = (
            *self.kubelets.loops,
            *((self._plans.run, self._heartbeat.run, self._look) if settings.follows else ()),
        )

    def start(self, stop: threading.Event) -> None:
        """Publish, and do as plans and pods say, until ``stop`` is set."""
        targets: list[Callable[[threading.Event], None]] = [*self._watches, *[self._pool.run] * THREADS, self._end]
        for target in targets:
            threading.Thread(target=target, args=(stop,), daemon=True, name=target.__qualname__).start()
        for node in self.nodes.values():
            node.plan_heard()

    @property
    def state(self) -> State:
        modes = Counter(node.follower.mode for node in self.nodes.values())
        published = sum(node.published for node in self.nodes.values())
        kubelets = self.kubelets
        return State(
            len(self.nodes), published, modes[PlanMode.PLANNED], kubelets.running, kubelets.prepared, kubelets.conflicts
        )

    def _plan_of(self, node: str) -> GpuNodePlan | None:
        return self._plans.get(Key("", node))

    def _plans_changed(self, changes: Sequence[Change[GpuNodePlan]]) -> None:
        for change in changes:
            if (node := self.nodes.get(change.key.name)) is not None:
                node.plan_heard()

    def _look(self, stop: threading.Event) -> None:
        """Let every node look at its clock now and then."""
        while not stop.wait(LOOK_S):
            for node in self.nodes.values():
                node.follower.look()

    def _end(self, stop: threading.Event) -> None:
        stop.wait()
        self._pool.wake()


@contextmanager
def running_fleet(client: KubeClient, settings: FleetSettings, progress: Progress) -> Iterator[Fleet]:
    """A fleet that publishes while the block runs; afterwards its Nodes, slices and plans are gone.

    Raises ApiError, UsageError and EnvironmentFault.
    """
    stop = threading.Event()
    objects = NodeObjects(client, settings.driver, settings.name, settings.nodes, progress)
    objects.remove()
    try:
        fleet = Fleet(client, settings, objects.create())
        fleet.start(stop)
        if settings.leases:
            threading.Thread(target=objects.keep_alive, args=(stop,), daemon=True).start()
        _await_published(fleet, progress)
        yield fleet
    finally:
        stop.set()
        objects.remove()


def _await_published(fleet: Fleet, progress: Progress) -> None:
    while (state := fleet.state).published < state.nodes:
        progress("publishing slices", state.published, state.nodes)
        time.sleep(0.2)
    progress("publishing slices", state.nodes, state.nodes)
