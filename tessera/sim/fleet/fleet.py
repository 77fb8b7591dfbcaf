"""A simulated fleet: its Node objects, one watch of each resource for all nodes, and few threads."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import click

from driver.clock import micro_time, seconds_time
from driver.errors import CONFLICT, ApiError, EnvironmentFault, accepted_status
from driver.kube.client import KubeClient, Object
from driver.kube.controller_heartbeat import HeartbeatWatch
from driver.kube.get_and_list import read_all
from driver.kube.lease import LeaseSpec, lease_object, leases
from driver.kube.slice_types import ResourceSlice
from driver.kube.types import GpuNodePlan, Node
from driver.kube.watch_cache import Change, WatchCache
from driver.kube.work_loop import LoopPool
from driver.model.gpu import Gpu
from driver.model.plan import PATH, PlanMode
from driver.slices.dropped_fields import SLICES, KeptFields
from kubelet_plugin.plan.follower import MODE_CHECK_INTERVAL_SECONDS
from kubelet_plugin.plan.instructions import NODES_PATH, without_status
from tessera.gpu_sources import hardware
from tessera.sim.fleet.kubelets import Kubelets
from tessera.sim.fleet.simulated_plugin import FleetInstructions, FleetNode, FleetSettings

log = logging.getLogger(__name__)

THREADS = 8
"""Concurrent work loops of node plugins, and as many of kubelets; they mostly wait for the API server."""

PUBLISHED_CHECK_INTERVAL_SECONDS = 0.2

LEASE_NAMESPACE = "kube-node-lease"

FLEET_LABEL = "gpu.tessera.dev/simulated-fleet"
"""Label of every Node of a fleet; its value is the fleet's name."""

SIMULATED_CAPACITY = {"cpu": "192", "memory": "2Ti", "ephemeral-storage": "1Ti", "pods": "500"}

CONCURRENT_REQUESTS = 8

LEASE_RENEWAL_SECONDS = 20.0
"""Kubernetes marks a node not ready after 50 s without a renewal."""

LEASE_DURATION_SECONDS = 40


def discover(gpus: str) -> tuple[Gpu, ...]:
    """The GPUs of a simulated node of this name or file. Raises UsageError, HardwareError and EnvironmentFault."""
    return tuple(report.gpu for report in hardware(gpus=f"sim:{gpus.removeprefix('sim:')}"))


def gpus_of(node: str, template: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """``template`` with UUIDs of the node's own, the same at each start; all other properties are shared."""
    return tuple(replace(gpu, uuid=f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{node}/{gpu.uuid}')}") for gpu in template)


class SimulatedFleet:
    """Simulated nodes whose Node objects exist (``owners``: owner references by name)."""

    def __init__(self, client: KubeClient, settings: FleetSettings, owners: Mapping[str, Mapping[str, Any]]) -> None:
        self._pool = LoopPool()
        self._kubelet_pool = LoopPool()  # of their own: offers must not wait until all pods of a burst run
        self._heartbeat = HeartbeatWatch(client, settings.namespace)
        self._plans = WatchCache(client, PATH, GpuNodePlan, without_status, self._plans_changed)
        fields = KeptFields()
        self._nodes = {
            name: FleetNode(
                client,
                settings,
                FleetInstructions(self._plans, self._heartbeat, name),
                self._pool.loop,
                owner,
                gpus_of(name, settings.gpus),
                fields,
            )
            for name, owner in owners.items()
        }
        self._kubelets = Kubelets(client, settings.driver, self._nodes.values(), self._kubelet_pool.loop)
        self._watches: list[Callable[[threading.Event], None]] = [*self._kubelets.loops]
        if settings.mode is PlanMode.PLANNED:
            self._watches += [self._plans.run, self._heartbeat.run, self._check_heartbeat]

    def start(self, stop: threading.Event) -> None:
        """Publish slices and follow plans and pods until ``stop`` is set."""
        pools = [self._pool.run, self._kubelet_pool.run] * THREADS
        for target in (*self._watches, *pools, self._wake):
            threading.Thread(target=target, args=(stop,), daemon=True, name=target.__qualname__).start()
        for node in self._nodes.values():
            node.plan_changed()

    @property
    def published(self) -> int:
        return sum(node.published for node in self._nodes.values())

    def __str__(self) -> str:
        follow = sum(node.follower.mode_choice.mode is PlanMode.PLANNED for node in self._nodes.values())
        return f"{len(self._nodes)} nodes, {follow} follow the controller; {self._kubelets}"

    def _plans_changed(self, changes: Sequence[Change[GpuNodePlan]]) -> None:
        for change in changes:
            if change.key.name in self._nodes:
                self._nodes[change.key.name].plan_changed()

    def _check_heartbeat(self, stop: threading.Event) -> None:
        """Let every node check the age of the heartbeat periodically."""
        while not stop.wait(MODE_CHECK_INTERVAL_SECONDS):
            for node in self._nodes.values():
                node.follower.update_mode()

    def _wake(self, stop: threading.Event) -> None:
        stop.wait()
        self._pool.wake()
        self._kubelet_pool.wake()


class NodeObjects:
    """The Nodes of a fleet, with its name and a number from 0000 on."""

    def __init__(self, client: KubeClient, settings: FleetSettings) -> None:
        self._client, self._settings = client, settings
        self._names = tuple(f"{settings.name}-{number:04}" for number in range(settings.nodes))

    def create(self) -> Mapping[str, Object]:
        """Create them; returns owner references by name. Raises ApiError, EnvironmentFault if one exists already."""
        stored = [node["metadata"] for node in self._each("creating nodes", self._names, self._create)]
        owner = {"apiVersion": "v1", "kind": "Node", "controller": True}
        return {node["name"]: {**owner, "name": node["name"], "uid": node["uid"]} for node in stored}

    def remove(self) -> None:
        """Remove all Nodes of the fleet, also of an earlier run, with their plans, slices and Leases."""
        selector = {"labelSelector": f"{FLEET_LABEL}={self._settings.name}"}
        nodes = {node.metadata.name for node in read_all(self._client, NODES_PATH, Node, selector)}
        if not nodes:
            return
        driver = {"fieldSelector": f"spec.driver={self._settings.driver}"}
        slices_of_driver = read_all(self._client, SLICES, ResourceSlice, driver)
        slices = [item.metadata.name for item in slices_of_driver if item.spec.node_name in nodes]
        delete = partial(self._client.delete, missing_ok=True)
        self._each("removing nodes", [f"{NODES_PATH}/{name}" for name in nodes], delete)
        self._each("removing plans", [f"{PATH}/{name}" for name in nodes], delete)
        self._each("removing slices", [f"{SLICES}/{name}" for name in slices], delete)
        self._each("removing node leases", [f"{leases(LEASE_NAMESPACE)}/{name}" for name in nodes], delete)

    def keep_alive(self, stop: threading.Event) -> None:
        """Renew every node's Lease, as kubelets do, until ``stop`` is set."""
        while not stop.is_set():
            for name in self._names:
                if stop.wait(LEASE_RENEWAL_SECONDS / len(self._names)):
                    return
                spec = LeaseSpec(name, LEASE_DURATION_SECONDS, renew_time=micro_time(datetime.now(UTC)))
                path, lease = f"{leases(LEASE_NAMESPACE)}/{name}", lease_object(LEASE_NAMESPACE, name, spec)
                try:
                    self._client.create_or_patch(path, lease)
                except ApiError as error:
                    log.warning("renewing a node's Lease failed", extra={"node": name, "error": str(error)})

    def _create(self, name: str) -> Object:
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", FLEET_LABEL: self._settings.name}
        times = dict.fromkeys(("lastHeartbeatTime", "lastTransitionTime"), seconds_time(datetime.now(UTC)))
        message = "tessera sim fleet simulates its kubelet"
        ready = {"type": "Ready", "status": "True", "reason": "Simulated", "message": message, **times}
        body: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": labels},
            "status": {"capacity": SIMULATED_CAPACITY, "allocatable": SIMULATED_CAPACITY, "conditions": [ready]},
        }
        with accepted_status(CONFLICT):
            return self._client.create(NODES_PATH, body)
        raise EnvironmentFault(f"Node {name} exists already and belongs to no simulated fleet: choose another --name")

    def _each(self, step: str, items: Sequence[str], work: Callable[[str], Any]) -> list[Any]:
        """Call ``work`` with every item, several at once; returns the results. Raises what ``work`` raises."""
        with (
            ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool,
            click.progressbar(pool.map(work, items), length=len(items), label=step) as results,
        ):
            return list(results)


@contextmanager
def running_fleet(client: KubeClient, settings: FleetSettings) -> Iterator[SimulatedFleet]:
    """A fleet that publishes while the block runs; afterwards its Nodes, slices and plans are gone.

    Raises ApiError and EnvironmentFault.
    """
    stop = threading.Event()
    objects = NodeObjects(client, settings)
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
