"""The Node objects of the fleet: made, kept alive, and removed with all that is theirs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import msgspec

from driver.errors import CONFLICT, NOT_FOUND, ApiError, EnvironmentFault
from driver.kube.clock import micro_time, seconds_time
from driver.kube.lease import LeaseSpec, lease_object, leases
from driver.kube.objects import ObjectMeta
from driver.kube.paging import Page, pages
from driver.kube.transport import KubeClient, Object
from driver.model.plan import PATH
from driver.slices.publisher import SLICES

log = logging.getLogger(__name__)

NODES = "/api/v1/nodes"
NODE_LEASES = "kube-node-lease"

LABEL = "gpu.tessera.dev/simulated-fleet"
"""Of every Node that a fleet has made; the value is the fleet's name."""

CAPACITY = {"cpu": "192", "memory": "2Ti", "ephemeral-storage": "1Ti", "pods": "500"}

AT_ONCE = 8
"""Requests under way while many objects are made or removed."""

RENEW_S = 20.0
"""Kubernetes takes a node for lost after 50 s without a sign of life."""

LEASE_S = 40

Progress = Callable[[str, int, int], None]
"""(what is being done, how much of it is done, out of how much)"""


class Named(msgspec.Struct, frozen=True):
    metadata: ObjectMeta


class OfNode(msgspec.Struct, frozen=True, rename="camel"):
    node_name: str = ""


class NamedSlice(msgspec.Struct, frozen=True):
    metadata: ObjectMeta
    spec: OfNode = OfNode()


class NodeObjects:
    """The Nodes ``name``-0000 and so on, as many as ``count``."""

    def __init__(self, client: KubeClient, driver: str, name: str, count: int, progress: Progress) -> None:
        self._client = client
        self._driver = driver
        self._fleet = name
        self.names = tuple(f"{name}-{number:04}" for number in range(count))
        self._progress = progress

    def create(self) -> Mapping[str, Object]:
        """Make them; returns owner references by name. Raises ApiError, and EnvironmentFault if one is there."""
        stored = self._each("creating nodes", self.names, self._create)
        return {
            node["metadata"]["name"]: {
                "apiVersion": "v1",
                "kind": "Node",
                "name": node["metadata"]["name"],
                "uid": node["metadata"]["uid"],
                "controller": True,
            }
            for node in stored
        }

    def remove(self) -> None:
        """Remove all Nodes of the fleet's name, with their plans, slices and Leases; of an earlier run, too."""
        selector = {"labelSelector": f"{LABEL}={self._fleet}"}
        decoder = msgspec.json.Decoder(Page[Named])
        nodes = [
            each.metadata.name for page in pages(self._client, NODES, decoder, selector) for each in page.items or ()
        ]
        if not nodes:
            return
        slices = self._slices(frozenset(nodes))
        self._each("removing nodes", [f"{NODES}/{name}" for name in nodes], self._delete)
        self._each("removing plans", [f"{PATH}/{name}" for name in nodes], self._delete)
        self._each("removing slices", [f"{SLICES}/{name}" for name in slices], self._delete)
        self._each("removing node leases", [f"{leases(NODE_LEASES)}/{name}" for name in nodes], self._delete)

    def keep_alive(self, stop: threading.Event) -> None:
        """Renew every node's Lease, as kubelets do, until ``stop`` is set."""
        while not stop.is_set():
            for name in self.names:
                if stop.wait(RENEW_S / len(self.names)):
                    return
                try:
                    self._renew(name)
                except ApiError as error:
                    log.warning("a node's Lease can't be renewed", extra={"node": name, "error": str(error)})

    def _create(self, name: str) -> Object:
        own = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", LABEL: self._fleet}
        now = seconds_time(datetime.now(UTC))
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "Simulated",
            "message": "tessera sim fleet plays its kubelet",
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
        raise EnvironmentFault(
            f"there is a Node {name} already that no simulated fleet has made: choose another --name"
        )

    def _renew(self, name: str) -> None:
        spec = LeaseSpec(name, LEASE_S, renew_time=micro_time(datetime.now(UTC)))
        body, folder = lease_object(NODE_LEASES, name, spec), leases(NODE_LEASES)
        try:
            self._client.patch(f"{folder}/{name}", body)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            self._client.create(folder, body)

    def _slices(self, nodes: frozenset[str]) -> list[str]:
        decoder = msgspec.json.Decoder(Page[NamedSlice])
        selector = {"fieldSelector": f"spec.driver={self._driver}"}
        found = (item for page in pages(self._client, SLICES, decoder, selector) for item in page.items or ())
        return [item.metadata.name for item in found if item.spec.node_name in nodes]

    def _delete(self, path: str) -> None:
        try:
            self._client.delete(path)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise

    def _each(self, what: str, items: Sequence[str], work: Callable[[str], Any]) -> list[Any]:
        """``work`` on every item, several at once; what it returns. Raises what it raises."""
        return list(self._counted(what, len(items), _at_once(work, items)))

    def _counted(self, what: str, total: int, results: Iterable[Any]) -> Iterator[Any]:
        for done, result in enumerate(results, 1):
            self._progress(what, done, total)
            yield result


def _at_once(work: Callable[[str], Any], items: Sequence[str]) -> Iterator[Any]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(work, items)
