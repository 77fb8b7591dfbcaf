"""A fleet in one process, against a real API server: the node plugin's own parts, and a kubelet that is played.

What is left out of a node is the hardware and the preparing: a claim is held as soon as its pod is bound, and let go
as soon as the pod is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from driver.kube.client import KubeClient, load_configuration
from driver.kube.get_and_list import RESOURCE_GROUP
from driver.kube.types import Claim, Key, Pod
from driver.kube.watch_cache import Change, WatchCache
from driver.model.device import Device, number_gpus
from driver.model.gpu import Gpu
from driver.model.gpu_settings import UNSHARED, GpuSharing, parse_layouts
from driver.model.offer import OfferKind
from driver.model.plan import COUNTERS_FIELD, CURATED, PlanMode
from driver.placement.occupancy import GpuState, overlap
from driver.simulator.description import load_description
from driver.slices.build import Content, PublishedGpu, SliceBuilder
from driver.slices.dropped_fields import KeptFields
from driver.slices.publisher import PresentSlices, Publisher
from driver.slices.slice_names import Pool
from kubelet_plugin.changes import ChangeNotifier, NodeChange
from kubelet_plugin.inventory.inventory import ClaimReference, Inventory
from kubelet_plugin.plan.follower import PlanFollower
from kubelet_plugin.plan.instructions import WatchedInstructions
from kubelet_plugin.plan.plan_status import PlanReport, PlanStatusWriter
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.following import GivenFields, GivenInstructions, GivenStore
from tests.support.published import DRIVER, discover

NAMESPACE = "tessera"
USER_AGENT = "tessera-fleet"
READY_S = 60.0


class Mode(StrEnum):
    """What nodes offer."""

    LOWEST_START = "everything, lowest start first"
    BEST_FIRST = "everything, FGD order"
    CURATED = "curated, K=2"
    STATIC = "static layouts by hand"
    COMPLETE = "complete nodes"


STATIC_LAYOUT = parse_layouts(
    "0=7g.80gb;1=7g.80gb;2=7g.80gb;3=4g.40gb,3g.40gb;4=4g.40gb,3g.40gb;5=4g.40gb,3g.40gb;"
    "6=2g.20gb,2g.20gb,1g.20gb,1g.20gb;7=2g.20gb,1g.20gb,1g.10gb,1g.10gb,1g.10gb,1g.10gb"
)
"""Three of each profile, one more of 1g.10gb: what the uniform mix needs on 8 GPUs of 80 GB."""


class FleetNode:
    """One node without hardware. ``notify`` when what it holds has changed.

    ``labels`` and ``capacity`` are the Node's.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        gpus: Sequence[Gpu],
        mode: Mode,
        *,
        sharing: GpuSharing = UNSHARED,
        labels: Mapping[str, str] | None = None,
        capacity: Mapping[str, str] | None = None,
    ) -> None:
        node = cluster.add_node_object(name, labels, capacity)
        kubeconfig = cluster.service_account_kubeconfig("tessera", "tessera-node", node=name)
        fields = KeptFields()
        client = KubeClient(load_configuration(kubeconfig), USER_AGENT, fields.observer(None))
        owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": node["metadata"]["uid"], "controller": True}
        self.name = name
        self.pool = Pool(name, DRIVER)
        self.inventory = Inventory(gpus, number_gpus(gpus, {}), sharing)
        self._builder = SliceBuilder(self.pool)
        self._mode, self._owner = mode, owner
        self._has_plan = mode in {Mode.CURATED, Mode.COMPLETE}
        changes = ChangeNotifier()
        self._word = WatchedInstructions(client, NAMESPACE, name, lambda: CURATED, changes)
        instructions = GivenInstructions(
            self._word.plan,
            self._word.controller_is_alive,
            lambda: mode is Mode.COMPLETE,
            lacks_plan=self._word.lacks_plan,
        )
        dropped = GivenFields(lambda: (COUNTERS_FIELD,) if mode is Mode.STATIC else fields.dropped)
        self.follower = PlanFollower(
            instructions, self.inventory, dropped, GivenStore(None), changes, layouts=STATIC_LAYOUT
        )
        self.publisher = Publisher(client, self.pool, self, fields)
        self.report = PlanReport(self.follower)
        self._plan_status = PlanStatusWriter(client, name, self.report)
        changes.subscribe(NodeChange.PLAN, self.notify)
        changes.subscribe(NodeChange.MODE, self.notify)
        changes.subscribe(NodeChange.PUBLISHED, self._plan_status.notify)

    def start(self, stop: threading.Event) -> None:
        loops: list[Callable[[threading.Event], None]] = [self.publisher.cache.run, self.publisher.run]
        if self._has_plan:
            loops += [*self._word.loops[:2], self.follower.run, self._plan_status.run]
        for loop in loops:
            threading.Thread(target=loop, args=(stop,), daemon=True).start()

    def held_changed(self) -> None:
        self.publisher.notify_within(self.follower.mode_choice.held_lag_seconds if self._mode is Mode.CURATED else 0.0)
        if self._mode is Mode.CURATED:
            self._plan_status.notify()

    def notify(self) -> None:
        self.publisher.notify()
        if self._has_plan:
            self._plan_status.notify()

    def admits(self, key: OfferKind) -> bool:
        """Whether a device of ``key`` would fit beside what is held, offered or not."""
        for gpu in self.inventory.gpus:
            taken = GpuState.of(gpu, self.inventory.held_on(gpu))
            if any(device.spot.kind == key and taken.fits(device) for device in self.inventory.devices_on(gpu)):
                return True
        return False

    @property
    def settled(self) -> bool:
        """Follows the plan, and its slices have nothing that the plan doesn't."""
        plan = self._word.plan()
        planned = plan is not None and self.follower.mode_choice.mode is PlanMode.PLANNED
        if not planned or plan is None:
            return False
        spec = plan.spec
        return len(self.publisher.device_names()) == len({*spec.offers, *spec.listed}) + len(spec.held)

    def monitors(self) -> Mapping[str, Content]:
        return self._builder.monitors(self.follower.monitors() or ()) if self._has_plan else {}

    def is_complete(self) -> bool:
        return True

    def creation_delay(self, absent_since: float | None) -> float:
        return 0.0

    def owner(self) -> Mapping[str, Any]:
        return self._owner

    def desired(self, slices: PresentSlices) -> Mapping[str, Content]:
        if self._mode in {Mode.CURATED, Mode.STATIC, Mode.COMPLETE}:
            return self._builder.build(self.follower.published(slices))
        published = self.inventory.published()
        built = self._builder.build(published)
        return built if self._mode is Mode.BEST_FIRST else lowest_start_first(built, published, self.inventory)


def lowest_start_first(
    built: Mapping[str, Content], published: Iterable[PublishedGpu], inventory: Inventory
) -> dict[str, Content]:
    """``built`` with the offers of every slice GPU after GPU, each profile's lowest start first: as the peers do."""
    ranks: dict[str, tuple[int, int]] = {}
    for entry in published:
        devices = enumerate(inventory.devices_on(entry.gpu))
        ranks |= {device.name: (entry.number, position) for position, device in devices}
        ranks |= {device.name: (-1, 0) for device in entry.held}
    return {
        name: {**content, "devices": sorted(content["devices"], key=lambda device: ranks[device["name"]])}
        if "devices" in content
        else content
        for name, content in built.items()
    }


@dataclass(frozen=True)
class Allocated:
    """What one claim has: pool and name of each device."""

    holder: ClaimReference
    devices: tuple[tuple[str, str], ...]


class Kubelets:
    """Plays the kubelets of all nodes: a claim is prepared while a pod of its own name runs.

    ``overlaps`` are allocations of what another claim had. Overlaps are found in the order in which the API server
    stored the allocations, whatever nodes know of them.
    """

    def __init__(self, client: KubeClient, nodes: Iterable[FleetNode]) -> None:
        self._nodes = {node.pool.name: node for node in nodes}
        self._lock = threading.Lock()
        self._claims = WatchCache(client, f"{RESOURCE_GROUP}/resourceclaims", Claim, _allocated, self._claims_changed)
        self._pods = WatchCache(client, "/api/v1/pods", Pod, _bound, self._pods_changed)
        self._holding: dict[str, Allocated] = {}
        self._released = threading.Condition(self._lock)
        self.overlaps: list[str] = []
        self.allocations = 0
        self.slices_over_time: list[tuple[float, int]] = [(time.monotonic(), 0)]
        """When it changed, and how many memory slices were allocated from then on."""

    def start(self, stop: threading.Event) -> None:
        for cache in (self._claims, self._pods):
            threading.Thread(target=cache.run, args=(stop,), daemon=True).start()

    def _claims_changed(self, changes: Sequence[Change[Allocated]]) -> None:
        used = self.slices_over_time[-1][1]
        for change in changes:
            if change.new:
                self.allocations += 1
                self._look_for_overlaps(change.new)
            used += self._slices(change.new) - self._slices(change.old)
            self._sync(change.key.name)
        self.slices_over_time.append((time.monotonic(), used))

    def _pods_changed(self, changes: Sequence[Change[str]]) -> None:
        for change in changes:
            self._sync(change.key.name)

    def _look_for_overlaps(self, new: Allocated) -> None:
        devices = self._devices(new)
        for other in self._claims.snapshot().values():
            for device, theirs in product(devices, self._devices(other) if other.holder != new.holder else ()):
                if overlap(device, theirs):
                    found = f"{new.holder} got {device.name} on {new.devices[0][0]}; {other.holder} has {theirs.name}"
                    self.overlaps.append(f"{time.strftime('%H:%M:%S')} {found}")

    def _sync(self, name: str) -> None:
        """Hold or release what the claim of this name has; called at every change of it and of its pod."""
        with self._lock:
            key = Key("default", name)
            wanted = self._claims.get(key) if self._pods.get(key) else None
            known = self._holding.pop(name, None)
            self._released.notify_all()
            if wanted:
                self._holding[name] = wanted
            if wanted == known:
                return
            for node in self._nodes_of(known) | self._nodes_of(wanted):
                if known:
                    node.inventory.release(known.holder.uid)
                if wanted:
                    node.inventory.hold(wanted.holder, self._devices(wanted))
                node.held_changed()

    def wait_released(self, name: str, timeout_s: float = 5.0) -> None:
        """Wait until no node holds what the claim of this name has: a kubelet unprepares it before it is deallocated.

        A claim that was deallocated first could be given out again while its node withdraws what overlaps it.
        """
        pod = Key("default", name)
        with self._released:
            self._released.wait_for(lambda: name not in self._holding and not self._pods.get(pod), timeout_s)

    def _nodes_of(self, allocated: Allocated | None) -> set[FleetNode]:
        return {self._nodes[pool] for pool, _ in allocated.devices} if allocated else set()

    def _devices(self, allocated: Allocated) -> list[Device]:
        found = (self._nodes[pool].inventory.device(name) for pool, name in allocated.devices)
        return [device for device in found if device is not None]

    def _slices(self, allocated: Allocated | None) -> int:
        return sum(device.mask.bit_count() for device in self._devices(allocated)) if allocated else 0


def _allocated(claim: Claim) -> Allocated | None:
    if claim.status.allocation is None:
        return None
    results = claim.status.allocation.devices.results
    devices = tuple((result.pool, result.device) for result in results if result.driver == DRIVER)
    metadata = claim.metadata
    return Allocated(ClaimReference(metadata.namespace, metadata.name, metadata.uid), devices) if devices else None


def _bound(pod: Pod) -> str | None:
    return pod.spec.node_name or None


@dataclass
class RunningFleet:
    nodes: list[FleetNode]
    kubelets: Kubelets

    def admits(self, key: OfferKind) -> bool:
        return any(node.admits(key) for node in self.nodes)

    def wait_settled(self, deadline_s: float) -> None:
        """Wait until all nodes follow their plans, and what they had offered before is withdrawn."""
        wait_for(lambda: all(node.settled for node in self.nodes), deadline_s, "all nodes offer what is planned")


@contextmanager
def running_fleet(cluster: Cluster, count: int, mode: Mode, description: str = "dgx-h100") -> Iterator[RunningFleet]:
    """``count`` nodes whose slices are published, until the block ends. The cluster must be installed."""
    stop = threading.Event()
    gpus: Callable[[str], Sequence[Gpu]] = partial(simulated_gpus, description, cluster.directory)
    nodes = [FleetNode(cluster, name, gpus(name), mode) for name in (f"node-{i:03}" for i in range(count))]
    kubelets = Kubelets(KubeClient(load_configuration(cluster.kubeconfig), USER_AGENT), nodes)
    kubelets.start(stop)
    try:
        for node in nodes:
            node.start(stop)
        for node in nodes:
            assert node.publisher.published.wait(READY_S), f"{node.name} did not publish within {READY_S:g} s"
        yield RunningFleet(nodes, kubelets)
    finally:
        stop.set()
        for node in nodes:
            node.notify()


def simulated_gpus(description: str, directory: Path, node: str) -> Sequence[Gpu]:
    """The GPUs of a node of this description, with UUIDs of its own."""
    loaded: Any = load_description(description).replaced(serial=node)
    return discover(loaded, directory / "fleet-gpus" / node)
