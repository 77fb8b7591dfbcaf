"""The Node objects of the fleet: created, kept ready by Leases, and removed with their plans, slices and Leases."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import click

from driver.errors import CONFLICT, ApiError, EnvironmentFault
from driver.kube.client import KubeClient, Object
from driver.kube.clock import micro_time, seconds_time
from driver.kube.lease import LeaseSpec, lease_object, leases
from driver.kube.types import Node, ResourceSlice
from driver.model.plan import PATH
from driver.slices.publisher import SLICES
from tessera.cluster_options import read_all

log = logging.getLogger(__name__)

NODES = "/api/v1/nodes"
NODE_LEASES = "kube-node-lease"

FLEET_LABEL = "gpu.tessera.dev/simulated-fleet"
"""Label of every Node of a fleet; its value is the fleet's name."""

CAPACITY = {"cpu": "192", "memory": "2Ti", "ephemeral-storage": "1Ti", "pods": "500"}

CONCURRENT_REQUESTS = 8
"""Concurrent requests while objects are created or removed."""

LEASE_RENEWAL_SECONDS = 20.0
"""Kubernetes marks a node not ready after 50 s without a renewal."""

LEASE_DURATION_SECONDS = 40


class NodeObjects:
    """The Nodes ``name``-0000 and so on, as many as ``count``."""

    def __init__(self, client: KubeClient, driver: str, name: str, count: int) -> None:
        self._client = client
        self._driver = driver
        self._fleet = name
        self.names = tuple(f"{name}-{number:04}" for number in range(count))

    def create(self) -> Mapping[str, Object]:
        """Create them; returns owner references by name. Raises ApiError, EnvironmentFault if one exists already."""
        stored = [node["metadata"] for node in self._each("creating nodes", self.names, self._create)]
        owner = {"apiVersion": "v1", "kind": "Node", "controller": True}
        return {node["name"]: {**owner, "name": node["name"], "uid": node["uid"]} for node in stored}

    def remove(self) -> None:
        """Remove all Nodes of the fleet, also of an earlier run, with their plans, slices and Leases."""
        selector = {"labelSelector": f"{FLEET_LABEL}={self._fleet}"}
        nodes = [node.metadata.name for node in read_all(self._client, NODES, Node, selector)]
        if not nodes:
            return
        driver = {"fieldSelector": f"spec.driver={self._driver}"}
        found = read_all(self._client, SLICES, ResourceSlice, driver)
        slices = [item.metadata.name for item in found if item.spec.node_name in set(nodes)]
        self._each("removing nodes", [f"{NODES}/{name}" for name in nodes], self._delete)
        self._each("removing plans", [f"{PATH}/{name}" for name in nodes], self._delete)
        self._each("removing slices", [f"{SLICES}/{name}" for name in slices], self._delete)
        self._each("removing node leases", [f"{leases(NODE_LEASES)}/{name}" for name in nodes], self._delete)

    def keep_alive(self, stop: threading.Event) -> None:
        """Renew every node's Lease, as kubelets do, until ``stop`` is set."""
        while not stop.is_set():
            for name in self.names:
                if stop.wait(LEASE_RENEWAL_SECONDS / len(self.names)):
                    return
                try:
                    self._renew(name)
                except ApiError as error:
                    log.warning("renewing a node's Lease failed", extra={"node": name, "error": str(error)})

    def _create(self, name: str) -> Object:
        own = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", FLEET_LABEL: self._fleet}
        now = seconds_time(datetime.now(UTC))
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "Simulated",
            "message": "tessera sim fleet simulates its kubelet",
            "lastHeartbeatTime": now,
            "lastTransitionTime": now,
        }
        body: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": own},
            "status": {"capacity": CAPACITY, "allocatable": CAPACITY, "conditions": [ready]},
        }
        try:
            return self._client.create(NODES, body)
        except ApiError as error:
            if error.status != CONFLICT:
                raise
        raise EnvironmentFault(f"Node {name} exists already and belongs to no simulated fleet: choose another --name")

    def _renew(self, name: str) -> None:
        spec = LeaseSpec(name, LEASE_DURATION_SECONDS, renew_time=micro_time(datetime.now(UTC)))
        self._client.create_or_patch(f"{leases(NODE_LEASES)}/{name}", lease_object(NODE_LEASES, name, spec))

    def _delete(self, path: str) -> None:
        self._client.delete(path, missing_ok=True)

    def _each(self, step: str, items: Sequence[str], work: Callable[[str], Any]) -> list[Any]:
        """Call ``work`` with every item, several at once; returns the results. Raises what ``work`` raises."""
        with (
            ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool,
            click.progressbar(pool.map(work, items), len(items), step) as results,
        ):
            return list(results)
