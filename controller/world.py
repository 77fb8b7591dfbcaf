"""What the API server says of claims, classes, pods, nodes, slices and plans: caches, and one snapshot of them all."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec

from controller import kept
from controller.claim_book import ClaimBook
from controller.claim_queue import Cluster
from controller.fenced import PoolDevice
from controller.objects import Claim, DeviceClass, Node, Pod
from controller.picture import NodeView
from controller.pools import PoolPart
from controller.views import Published, Views
from controller.waiting import claims_of
from driver.kube.objects import Key, ObjectMeta
from driver.kube.plans import GpuNodePlan
from driver.kube.transport import KubeClient
from driver.kube.watch_cache import Change, WatchCache
from driver.model.plan import PATH
from driver.slices.build import CLOSED as NOT_OFFERED
from driver.slices.names import Pool

RESOURCE = "/apis/resource.k8s.io/v1"

T = TypeVar("T")


class SliceAttribute(msgspec.Struct, frozen=True):
    number: int | None = msgspec.field(default=None, name="int")


class SliceAttributes(msgspec.Struct, frozen=True):
    """The only one that is read here: of how many shares a device is one."""

    shares: SliceAttribute | None = None


class SliceTaint(msgspec.Struct, frozen=True):
    key: str


class SliceDevice(msgspec.Struct, frozen=True):
    name: str
    attributes: SliceAttributes = SliceAttributes()
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


@dataclass(frozen=True)
class Snapshot:
    """Everything as known at one moment; ``incomplete`` are pools that the scheduler leaves aside, and why.

    What has not changed since the snapshot before is the same object.
    """

    cluster: Cluster
    plans: Mapping[str, GpuNodePlan]
    views: tuple[NodeView, ...]
    incomplete: Mapping[str, str]
    withdrawing: Mapping[str, GpuNodePlan]
    """Of the plans those that tell their nodes to take something away."""
    changed: frozenset[str]
    """Nodes of which anything has changed since the snapshot before."""


class World:
    """The caches. ``on_change`` is called after every change of any; it must return quickly."""

    def __init__(self, client: KubeClient, driver: str, on_change: Callable[[], None]) -> None:
        self._driver = driver
        self._on_change = on_change
        self._lock = threading.Lock()
        self._ours = threading.local()
        self._book = ClaimBook(driver)
        self._nodes_now: dict[str, Node] = {}
        self._plans_now: dict[str, GpuNodePlan] = {}
        self._withdrawing: dict[str, GpuNodePlan] = {}
        self._slices_now: dict[str, dict[Key, Published]] = {}
        self._node_of: dict[str, str] = {}
        """By the name of its pool."""
        self._views = Views(driver)
        self._dirty: set[str] = set()
        """Nodes of which something has changed since the last snapshot."""
        self._node_objects: tuple[Node, ...] = ()

        def cache(
            path: str,
            kind: type[Any],
            project: Callable[[Any], Any],
            changed: Callable[[Sequence[Change[Any]]], bool],
            **selectors: str,
        ) -> WatchCache[Any, Any]:
            return WatchCache(client, path, kind, project, partial(self._changed, changed), selectors)

        of_driver = f"spec.driver={driver}"
        self._claims = cache(f"{RESOURCE}/resourceclaims", Claim, kept.claim, self._claims_changed)
        self._classes = cache(f"{RESOURCE}/deviceclasses", DeviceClass, lambda found: found, bool)
        self._slices = cache(
            f"{RESOURCE}/resourceslices", ResourceSlice, _published, self._slices_changed, fieldSelector=of_driver
        )
        self._pods = cache("/api/v1/pods", Pod, kept.pod, self._pods_changed, fieldSelector="status.phase=Pending")
        self._nodes = cache("/api/v1/nodes", Node, kept.node, self._nodes_changed)
        self._plans = cache(PATH, GpuNodePlan, kept.plan, self._plans_changed)
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
        with self._lock:
            return frozenset(PoolDevice(pool, name) for pool in self._book.pools for name in self._book.held(pool))

    def observe_plan(self, stored: Mapping[str, Any]) -> None:
        """Take over a plan as we stored it, before the watch brings it; that is no news to who decided it."""
        self._ours.write = True
        try:
            self._plans.observe(stored)
        finally:
            self._ours.write = False

    def snapshot(self) -> Snapshot:
        classes, pods = tuple(self._classes.snapshot().values()), tuple(self._pods.snapshot().values())
        with self._lock:
            dirty, self._dirty = self._dirty, set()
            for name in dirty:
                self._views.make(
                    name,
                    self._nodes_now.get(name),
                    self._plans_now.get(name),
                    self._slices_now.get(name, {}).values(),
                    self._book.held(Pool(name, self._driver).name),
                )
            if len(self._node_objects) != len(self._nodes_now) or dirty:
                objects = tuple(self._nodes_now.values())
                self._node_objects = self._node_objects if objects == self._node_objects else objects
            return Snapshot(
                Cluster(self._book.reading(), classes, pods, self._node_objects),
                dict(self._plans_now),
                self._views.all(),
                dict(self._views.incomplete),
                dict(self._withdrawing),
                frozenset(dirty),
            )

    # What has changed: each says whether it is news

    def _changed(self, take_over: Callable[[Sequence[Change[Any]]], bool], changes: Sequence[Change[Any]]) -> None:
        with self._lock:
            news = take_over(changes)
        # A list that changed nothing tells that there is one now.
        if (news or not changes) and not getattr(self._ours, "write", False):
            self._on_change()

    def _claims_changed(self, changes: Sequence[Change[Claim]]) -> bool:
        for change in changes:
            pools = self._book.put(change.key, change.new)
            self._dirty |= {self._node_of[pool] for pool in pools if pool in self._node_of}
        return True

    def _pods_changed(self, changes: Sequence[Change[Pod]]) -> bool:
        """That a pod starts, all of whose claims have what they asked for, changes nothing for those that wait."""
        return any(
            change.new is not None or change.old is None or not self._book.satisfies(claims_of(change.old))
            for change in changes
        )

    def _slices_changed(self, changes: Sequence[Change[Published]]) -> bool:
        for change in changes:
            for each in filter(None, (change.old, change.new)):
                self._dirty.add(each.node)
                self._slices_now.setdefault(each.node, {}).pop(change.key, None)
            if change.new is not None:
                self._slices_now[change.new.node][change.key] = change.new
        return True

    def _nodes_changed(self, changes: Sequence[Change[Node]]) -> bool:
        self._node_of |= {Pool(change.key.name, self._driver).name: change.key.name for change in changes}
        return self._take(changes, self._nodes_now)

    def _plans_changed(self, changes: Sequence[Change[GpuNodePlan]]) -> bool:
        self._take(changes, self._plans_now)
        for name, new in ((change.key.name, change.new) for change in changes):
            self._withdrawing.pop(name, None)
            if new is not None and new.spec.withdrawn:
                self._withdrawing[name] = new
        return any(kept.says_more(change.old, change.new) for change in changes)

    def _take(self, changes: Sequence[Change[T]], into: dict[str, T]) -> bool:
        for change in changes:
            self._dirty.add(change.key.name)
            into.pop(change.key.name, None)
            if change.new is not None:
                into[change.key.name] = change.new
        return True


def _published(found: ResourceSlice) -> Published:
    devices = found.spec.devices
    shares = {
        sys.intern(each.name): each.attributes.shares.number or 1 if each.attributes.shares is not None else 1
        for each in devices
    }
    closed = NOT_OFFERED["key"]
    offered = (sys.intern(each.name) for each in devices if all(taint.key != closed for taint in each.taints))
    pool = found.spec.pool
    part = PoolPart(sys.intern(pool.name), pool.generation, pool.resource_slice_count)
    return Published(sys.intern(found.spec.node_name), part, shares, frozenset(offered))
