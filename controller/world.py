"""What the API server says of claims, classes, pods, nodes, slices and plans: caches, and one snapshot of them all."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from controller.claim_queue import Cluster
from controller.dedication import dedication_of
from controller.fenced import PoolDevice
from controller.objects import Claim, DeviceClass, Node, Pod
from controller.picture import NodeView
from controller.pools import PoolPart, incomplete_pools
from driver.kube.objects import Key, ObjectMeta
from driver.kube.plans import GpuNodePlan
from driver.kube.transport import KubeClient
from driver.kube.watch_cache import WatchCache
from driver.model.plan import PATH, Held, PlanStatus
from driver.slices.build import CLOSED as NOT_OFFERED
from driver.slices.names import Pool

CLOSED = frozenset({"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"})
"""Taints of a node that answers nobody: what is offered there would be offered in vain."""

RESOURCE = "/apis/resource.k8s.io/v1"


class SliceAttribute(msgspec.Struct, frozen=True):
    number: int | None = msgspec.field(default=None, name="int")


class SliceTaint(msgspec.Struct, frozen=True):
    key: str


class SliceDevice(msgspec.Struct, frozen=True):
    name: str
    attributes: dict[str, SliceAttribute] = {}
    taints: tuple[SliceTaint, ...] = ()


class SlicePool(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    generation: int = 0
    resource_slice_count: int = 1


class SliceSpec(msgspec.Struct, frozen=True, rename="camel"):
    driver: str
    pool: SlicePool
    node_name: str = ""
    devices: tuple[SliceDevice, ...] = ()


class ResourceSlice(msgspec.Struct, frozen=True):
    metadata: ObjectMeta
    spec: SliceSpec


@dataclass(frozen=True, slots=True)
class Published:
    """One slice: its node and pool, its devices by name with the number of shares of that kind (1: no share).

    ``open`` are those that new claims may get.
    """

    node: str
    part: PoolPart
    devices: Mapping[str, int]
    open: frozenset[str]


@dataclass(frozen=True)
class Snapshot:
    """Everything as known at one moment; ``incomplete`` are pools that the scheduler leaves aside, and why."""

    cluster: Cluster
    plans: Mapping[str, GpuNodePlan]
    views: tuple[NodeView, ...]
    incomplete: Mapping[str, str]


class World:
    """The caches. ``on_change`` is called after every change of any; it must return quickly."""

    def __init__(self, client: KubeClient, driver: str, on_change: Callable[[], None]) -> None:
        self._driver = driver

        def cache(path: str, kind: type[Any], project: Callable[[Any], Any], **selectors: str) -> WatchCache[Any, Any]:
            return WatchCache(client, path, kind, project, lambda _: on_change(), selectors)

        self._claims = cache(f"{RESOURCE}/resourceclaims", Claim, lambda claim: claim)
        self._classes = cache(f"{RESOURCE}/deviceclasses", DeviceClass, lambda found: found)
        self._slices = cache(
            f"{RESOURCE}/resourceslices", ResourceSlice, _published, fieldSelector=f"spec.driver={driver}"
        )
        self._pods = cache("/api/v1/pods", Pod, _with_demand, fieldSelector="status.phase=Pending")
        self._nodes = cache("/api/v1/nodes", Node, lambda node: node)
        self._plans = cache(PATH, GpuNodePlan, lambda plan: plan)
        self._all = (self._claims, self._classes, self._slices, self._pods, self._nodes, self._plans)

    def start(self, stop: threading.Event) -> list[threading.Thread]:
        """Begin to watch, each resource in a thread of its own, until ``stop`` is set."""
        threads = [threading.Thread(target=cache.run, args=(stop,), daemon=True) for cache in self._all]
        for thread in threads:
            thread.start()
        return threads

    @property
    def synced(self) -> bool:
        """Whether everything has been read once."""
        return all(cache.synced for cache in self._all)

    def wait_for_version(self, version: int, timeout_s: float) -> bool:
        """Whether every change of a claim up to ``version`` was processed within ``timeout_s`` seconds."""
        return self._claims.wait_for_version(version, timeout_s)

    def held(self) -> frozenset[PoolDevice]:
        """What is allocated by all changes of claims that were processed."""
        found = _held(self._claims.snapshot().values(), self._driver)
        return frozenset(PoolDevice(pool, device) for pool, devices in found.items() for device in devices)

    def observe_plan(self, stored: Mapping[str, Any]) -> None:
        """Take over a plan as it was stored, before the watch brings it."""
        self._plans.observe(stored)

    def snapshot(self) -> Snapshot:
        claims = tuple(self._claims.snapshot().values())
        nodes = tuple(self._nodes.snapshot().values())
        plans: Mapping[Key, GpuNodePlan] = self._plans.snapshot()
        slices = tuple(cast("Iterable[Published]", self._slices.snapshot().values()))
        by_name = {key.name: plan for key, plan in plans.items()}
        classes, pods = tuple(self._classes.snapshot().values()), tuple(self._pods.snapshot().values())
        return Snapshot(
            Cluster(claims, classes, pods, nodes),
            by_name,
            tuple(_views(self._driver, nodes, by_name, slices, _held(claims, self._driver))),
            incomplete_pools(each.part for each in slices),
        )


def _views(
    driver: str,
    nodes: Iterable[Node],
    plans: Mapping[str, GpuNodePlan],
    slices: Iterable[Published],
    held: Mapping[str, Mapping[str, Held]],
) -> Iterable[NodeView]:
    """The nodes that publish our devices or did; one that is gone takes its plan with it."""
    published: dict[str, dict[str, int]] = {}
    offered: dict[str, frozenset[str]] = defaultdict(frozenset)
    for each in slices:
        published.setdefault(each.node, {}).update(each.devices)
        offered[each.node] |= each.open
    known = {node.metadata.name: node for node in nodes}
    for name in sorted((published.keys() | plans.keys()) & known.keys()):
        node, pool, plan = known[name], Pool(name, driver).name, plans.get(name)
        paused = plan is not None and plan.metadata.paused
        yield NodeView(
            name=name,
            uid=node.metadata.uid,
            pool=pool,
            status=plan.status if plan is not None else PlanStatus(),
            published=published.get(name, {}),
            offered=offered[name],
            held=held.get(pool, {}),
            dedication=dedication_of(node.metadata.labels),
            open=not paused and not node.spec.unschedulable and not {taint.key for taint in node.spec.taints} & CLOSED,
            follows=not paused and plan is not None and plan.followed,
        )


def _held(claims: Iterable[Claim], driver: str) -> dict[str, dict[str, Held]]:
    found: dict[str, dict[str, Held]] = {}
    for claim in claims:
        allocation = claim.status.allocation
        for result in allocation.devices.results if allocation is not None else ():
            if result.driver == driver and not result.admin_access:
                held = Held(result.device, claim.metadata.path)
                found.setdefault(result.pool, {})[result.device] = held
    return found


def _published(found: ResourceSlice) -> Published:
    shares = {
        device.name: device.attributes.get("shares", SliceAttribute()).number or 1 for device in found.spec.devices
    }
    closed = NOT_OFFERED["key"]
    offered = (device.name for device in found.spec.devices if closed not in {taint.key for taint in device.taints})
    pool = found.spec.pool
    part = PoolPart(pool.name, pool.generation, pool.resource_slice_count)
    return Published(found.spec.node_name, part, shares, frozenset(offered))


def _with_demand(pod: Pod) -> Pod | None:
    """Pods that may want devices: those with claims, or with resources beyond what every node has."""
    common = {"cpu", "memory", "ephemeral-storage", "pods"}
    containers = (*pod.spec.containers, *pod.spec.init_containers)
    asked = {name for each in containers for name in (*each.resources.requests, *each.resources.limits)}
    return pod if pod.spec.resource_claims or asked - common else None
