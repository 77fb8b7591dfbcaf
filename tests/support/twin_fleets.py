"""Two fleets that are alike on one control plane: one offers everything that fits, one what a controller chooses.

Both have the same GPUs, labels, taints and held devices; a label tells them apart. A case is scheduled on one, then on
the other, by the same scheduler.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from driver.model.gpu_settings import GpuSharing
from kubelet_plugin.inventory.inventory import ClaimReference
from tests.bench.placement.fleet import FleetNode, Mode
from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.controller import ControllerProcess
from tests.support.plugin import DRIVER
from tests.support.podgen import CLASS, Case, Vocabulary, classes
from tests.support.twin_nodes import NODES, LogicalNode, held_on

OPEN, CURATED = "open", "curated"
SIDE = "side"
SETTLED_S = 60.0
OCCUPANCY = "/apis/resource.k8s.io/v1/namespaces/occupancy/resourceclaims"
POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"


@dataclass(frozen=True)
class Side:
    """``nodes`` by logical name."""

    name: str
    nodes: Mapping[str, FleetNode]

    @property
    def pods(self) -> str:
        return f"/api/v1/namespaces/{self.name}/pods"

    @property
    def devices(self) -> str:
        return f"/apis/resource.k8s.io/v1/namespaces/{self.name}"


@dataclass
class Outcome:
    """What became of a case. ``bound``: node of each pod that got one; ``refused``: why others got none.

    ``devices``: how many all claims have together.
    """

    bound: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    devices: int = 0


class TwinFleets:
    """Runs cases. ``known`` is what the fleets have."""

    def __init__(self, cluster: Cluster, stop: threading.Event) -> None:
        self.cluster = cluster
        self.gpus = {node.name: node.gpus(cluster.directory) for node in NODES}
        labels = [{**node.labels, "logical": node.name} for node in NODES]
        self.known = Vocabulary([gpu for gpus in self.gpus.values() for gpu in gpus], labels)
        self._holders: list[tuple[FleetNode, ClaimReference]] = []
        self._pool = ThreadPoolExecutor(8)
        for namespace in (OPEN, CURATED, "occupancy"):
            cluster.api.post("/api/v1/namespaces", {"metadata": {"name": namespace}})
        for each in classes():
            cluster.api.post("/apis/resource.k8s.io/v1/deviceclasses", each)
        _let_through_what_is_held(cluster)
        with ThreadPoolExecutor(4) as pool:
            self.sides = {
                name: Side(name, dict(zip([n.name for n in NODES], pool.map(self._adding(name), NODES), strict=True)))
                for name in (OPEN, CURATED)
            }
        for node in self.nodes:
            node.start(stop)
        for node in self.nodes:
            assert node.publisher.published.wait(SETTLED_S), f"{node.name} did not publish"
        for namespace in (OPEN, CURATED):
            account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
            wait_for(lambda path=account: cluster.api.get(path), SETTLED_S, account)  # type: ignore[misc]

    @property
    def nodes(self) -> list[FleetNode]:
        return [node for side in self.sides.values() for node in side.nodes.values()]

    def _adding(self, side: str) -> Callable[[LogicalNode], FleetNode]:
        mode = Mode.CURATED if side == CURATED else Mode.BEST_FIRST

        def add(node: LogicalNode) -> FleetNode:
            gpus = self.gpus[node.name]
            shares = {gpu.uuid: node.shares.get(at, 0) for at, gpu in zip(node.positions, gpus, strict=True)}
            name, labels = f"{side}-{node.name}", {SIDE: side, "logical": node.name, **node.labels}
            sharing = GpuSharing(lambda gpu: shares[gpu.uuid])
            found = FleetNode(
                self.cluster, name, gpus, mode, sharing=sharing, labels=labels, capacity={"cpu": node.cpu}
            )
            if node.taint:
                taint = {"key": node.taint[0], "value": node.taint[1], "effect": "NoSchedule"}
                self.cluster.api.patch(f"/api/v1/nodes/{name}", {"spec": {"taints": [taint]}})
            return found

        return add

    def free_all(self) -> None:
        """Let nothing be held."""
        self._release(0)

    def occupy(self, random: Random) -> None:
        """Let devices be held that are drawn by ``random``, the same on both sides, and nothing else."""
        self.free_all()
        for node in NODES:
            if names := [device.name for device in held_on(node, self.gpus[node.name], random)]:
                for side in self.sides.values():
                    self.hold(side.nodes[node.name], names)

    def _release(self, begin: int) -> None:
        """Let go what was held from the ``begin``-th holder on."""
        for node, holder in self._holders[begin:]:
            self.cluster.api.request("DELETE", f"{OCCUPANCY}/{holder.name}")
            node.inventory.release(holder.uid)
            node.notify()
        del self._holders[begin:]

    def hold(self, node: FleetNode, names: Sequence[str]) -> None:
        """A claim that has these devices of ``node``."""
        exactly = {"deviceClassName": CLASS, "count": len(names)}
        body = {
            "metadata": {"generateName": f"{node.name}-"},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
        }
        metadata = self.cluster.api.post(OCCUPANCY, body)["metadata"]
        results = [{"request": "gpu", "driver": DRIVER, "pool": node.pool.name, "device": name} for name in names]
        allocation = {"devices": {"results": results}}
        self.cluster.api.patch(f"{OCCUPANCY}/{metadata['name']}/status", {"status": {"allocation": allocation}})
        devices = [node.inventory.device(name) for name in names]
        holder = ClaimReference("occupancy", metadata["name"], metadata["uid"])
        node.inventory.hold(holder, [device for device in devices if device is not None])
        self._holders.append((node, holder))
        node.notify()

    def wait_settled(self) -> None:
        """Wait until one side offers all that fits, the other what is planned when nobody waits."""
        self._wait_open()
        curated = self.sides[CURATED].nodes.values()
        wait_for(lambda: all(node.settled for node in curated), SETTLED_S, "what is planned is offered")
        wait_for(lambda: self.offered() <= 2 * len(self.known.profiles) + 4, SETTLED_S, "few offers")

    def _wait_open(self) -> None:
        nodes = self.sides[OPEN].nodes.values()
        wait_for(lambda: all(map(offers_everything, nodes)), SETTLED_S, "all that fits is offered")

    def offers(self, kind: str) -> list[tuple[str, str]]:
        """Pool and name of the devices of one type that the curated side publishes."""
        found = []
        for node in self.sides[CURATED].nodes.values():
            devices = {device.name: device for gpu in node.inventory.gpus for device in node.inventory.devices_on(gpu)}
            published = [devices[name] for name in node.publisher.device_names()]
            found += [(node.pool.name, device.name) for device in published if device.kind.value == kind]
        return found

    def offered(self) -> int:
        """How many devices the curated side offers."""
        return sum(node.report.status().summary.offered for node in self.sides[CURATED].nodes.values())

    def create(self, case: Case, side: Side) -> None:
        for template in case.templates:
            self.cluster.api.post(f"{side.devices}/resourceclaimtemplates", template)
        for claim in case.claims:
            self.cluster.api.post(f"{side.devices}/resourceclaims", claim)
        list(self._pool.map(lambda pod: self.cluster.api.post(side.pods, pinned(pod, side)), case.pods))

    def forget(self, side: Side) -> None:
        """Delete everything and wait until it is gone."""
        self.cluster.api.request("DELETE", side.pods, {"gracePeriodSeconds": 0})
        for resource in ("resourceclaims", "resourceclaimtemplates"):
            self.cluster.api.request("DELETE", f"{side.devices}/{resource}")
        for path in (side.pods, f"{side.devices}/resourceclaims"):
            wait_for(lambda path=path: not self.cluster.api.get(path)["items"], SETTLED_S, f"{path} empty")  # type: ignore[misc]

    def look(self, case: Case, side: Side, began: float) -> Outcome:
        """What became of the pods of ``case`` on ``side`` so far."""
        bound, refused, names = {}, {}, {pod["metadata"]["name"] for pod in case.pods}
        for pod in self.cluster.api.get(side.pods)["items"]:
            if (name := pod["metadata"]["name"]) not in names:
                continue
            if node := pod["spec"].get("nodeName"):
                bound[name] = node
            elif (reason := _refusal(pod)) is not None:
                refused[name] = reason
        return Outcome(bound, refused, time.monotonic() - began)

    def run_open(self, case: Case, quiet_s: float = 0.4) -> Outcome:
        """The scheduler's verdict on every pod where everything is offered; the pods stay."""
        side = self.sides[OPEN]
        self.create(case, side)
        began = changed = time.monotonic()
        last = self.look(case, side, began)
        while len(last.bound) < len(case.pods):
            now = self.look(case, side, began)
            if now.bound != last.bound:
                changed = time.monotonic()
            last = now
            if len(now.bound) + len(now.refused) == len(case.pods) and time.monotonic() - changed > quiet_s:
                break
            assert now.seconds < SETTLED_S, f"case {case.name}: no verdict on {len(case.pods) - len(now.bound)} pods"
            time.sleep(0.03)
        last.devices = self.devices(side)
        return last

    def run_curated(self, case: Case, wanted: Callable[[Outcome], bool], deadline_s: float) -> Outcome:
        """The state of the pods on the curated side once it is as ``wanted``, or when ``deadline_s`` have passed."""
        side = self.sides[CURATED]
        self.create(case, side)
        began = time.monotonic()
        while not wanted(found := self.look(case, side, began)) and found.seconds < deadline_s:
            time.sleep(0.03)
        found.devices = self.devices(side)
        return found

    def devices(self, side: Side) -> int:
        claims = self.cluster.api.get(f"{side.devices}/resourceclaims")["items"]
        return sum(len(_results(claim)) for claim in claims)

    @contextmanager
    def mirrored(self) -> Iterator[None]:
        """Let the open side's devices be held that pods of the curated side have."""
        begin = len(self._holders)
        pools = {node.pool.name: name for name, node in self.sides[CURATED].nodes.items()}
        for claim in self.cluster.api.get(f"{self.sides[CURATED].devices}/resourceclaims")["items"]:
            by_node: dict[str, list[str]] = {}
            for result in _results(claim):
                by_node.setdefault(pools[result["pool"]], []).append(result["device"])
            for name, names in by_node.items():
                self.hold(self.sides[OPEN].nodes[name], names)
        self._wait_open()
        yield
        self._release(begin)

    def mirror_pods(self) -> None:
        """Pods like those of the curated side, as other pods and the node's CPU see them, on the open side's nodes."""
        logical = {node.name: name for name, node in self.sides[CURATED].nodes.items()}
        for pod in self.cluster.api.get(self.sides[CURATED].pods)["items"]:
            if on := pod["spec"].get("nodeName"):
                cpu = pod["spec"]["containers"][0]["resources"].get("requests", {}).get("cpu", "0")
                resources = {"resources": {"requests": {"cpu": cpu}}}
                spec = {"nodeName": self.sides[OPEN].nodes[logical[on]].name, "affinity": pod["spec"].get("affinity")}
                copied = busybox_pod(f"like-{pod['metadata']['name']}", container=resources, **spec)
                copied["metadata"] |= {"labels": pod["metadata"]["labels"], "namespace": OPEN}
                self.cluster.api.post(self.sides[OPEN].pods, copied)


def pinned(pod: Mapping[str, Any], side: Side) -> dict[str, Any]:
    """``pod`` for the nodes of one side."""
    found = copy.deepcopy(dict(pod))
    found["metadata"]["namespace"] = side.name
    found["spec"].setdefault("nodeSelector", {})[SIDE] = side.name
    return found


def offers_everything(node: FleetNode) -> bool:
    published = node.inventory.published()
    wanted = {device.name for entry in published for device in (*entry.held, *entry.offers)}
    return set(node.publisher.device_names()) == wanted


def _results(claim: Mapping[str, Any]) -> list[dict[str, str]]:
    found: list[dict[str, str]] = claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", [])
    return found


def _refusal(pod: Mapping[str, Any]) -> str | None:
    """Why the scheduler gave it no node; None while it has not looked at all its claims."""
    for condition in pod["status"].get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            message = str(condition.get("message", ""))
            return None if "waiting for dynamic" in message or "not found" in message else message
    return None


def _let_through_what_is_held(cluster: Cluster) -> None:
    """The fence is for the scheduler: what a case begins with is written by the admin."""
    path = f"{POLICIES}/tessera-fence"
    conditions = cluster.api.get(path)["spec"]["matchConditions"]
    mine = {"name": "not-by-the-test", "expression": '!("system:masters" in request.userInfo.groups)'}
    cluster.api.patch(path, {"spec": {"matchConditions": [*conditions, mine]}})


@contextmanager
def twin_fleets(cluster: Cluster) -> Iterator[TwinFleets]:
    """Both fleets, and a controller for one of them, until the block ends."""
    install(cluster)
    stop = threading.Event()
    fleets = TwinFleets(cluster, stop)
    controller = ControllerProcess(cluster, flags=("--fence-minutes", "1"))
    controller.start()
    try:
        yield fleets
    finally:
        controller.stop()
        stop.set()
        for node in fleets.nodes:
            node.notify()
