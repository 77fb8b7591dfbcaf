"""Watch caches of claims, classes, pods, nodes, slices and plans, and snapshots of all of them.

Only the needed parts of objects are kept, and equal parts of many objects once. An object whose kept parts are
unchanged is not a change: kubelets and node plugins write statuses every few seconds.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

import msgspec

from controller.cluster.claim_index import ClaimIndex, ClusterState, PoolDevice
from controller.cluster.node_views import NodeChanges, NodeView, NodeViews, PoolPart, PublishedSlice
from controller.cluster.optional_resources import OptionalCache, claim_templates, device_taint_rules, pod_groups
from driver.kube.client import KubeClient
from driver.kube.get_and_list import RESOURCE_GROUP
from driver.kube.slice_types import ResourceSlice
from driver.kube.types import (
    POD_GROUP_VERSION,
    VOLCANO_GROUP_VERSION,
    Allocation,
    Claim,
    ClaimSpec,
    ClaimStatus,
    ClaimTemplate,
    ClaimTemplateSpec,
    DeviceAllocation,
    DeviceClass,
    GpuNodePlan,
    Key,
    Metadata,
    Node,
    NodeSelector,
    NodeStatus,
    Pod,
    Reference,
    Result,
)
from driver.kube.watch_cache import Change, WatchCache
from driver.model.plan import KIND, PATH, Held, NodeConditionType, PlanStatus
from driver.slices.build import CLOSED as NOT_OFFERED
from driver.slices.slice_names import MONITORS, Pool

T = TypeVar("T")

MAX_SHARED_VALUES = 1 << 14
"""Distinct claim specs and node selectors that are kept; each node has a selector of its own."""

MAX_SHARED_BYTES = 1 << 12
"""Size of the largest of them: a spec that hardly any other claim has may take most of a MiB."""


@dataclass(frozen=True)
class Snapshot:
    """Everything that is known at one moment; whatever did not change since the last snapshot is the same object.

    ``incomplete`` are the pools that the scheduler ignores, with the reasons; ``changed`` what changed since the last
    decision.
    """

    cluster: ClusterState
    plans: Mapping[str, GpuNodePlan]
    views: tuple[NodeView, ...]
    incomplete: Mapping[str, str]
    changed: NodeChanges


class ClusterCache:
    """The caches. ``on_change`` is called after every change that matters, ``claim_changed`` with each changed claim
    before and after; both must return quickly."""

    def __init__(
        self,
        client: KubeClient,
        driver: str,
        on_change: Callable[[], None],
        claim_changed: Callable[[Claim | None, Claim | None], None] | None = None,
    ) -> None:
        self._driver = driver
        self._claim_changed = claim_changed
        self._on_change = on_change
        self._lock = threading.Lock()
        self._own_write = threading.local()
        self._claim_index = ClaimIndex(driver)
        self._nodes_by_name: dict[str, Node] = {}
        self._plans_by_node: dict[str, GpuNodePlan] = {}
        """Replaced, not changed: snapshots have it, too."""
        self._slices_by_node: dict[str, dict[Key, PublishedSlice]] = {}
        self._node_of_pool: dict[str, str] = {}
        self._views = NodeViews(driver)
        self._outdated: set[str] = set()
        """Nodes whose views are to be renewed by the next snapshot."""
        self._outdated_nodes: set[str] = set()
        """Of these, the ones whose Node object changed."""
        cache = partial(self._cache, client)
        of_driver, pending = f"spec.driver={driver}", "status.phase=Pending"
        self._claims = cache(f"{RESOURCE_GROUP}/resourceclaims", Claim, _kept_claim, self._claims_changed)
        self._classes = cache(f"{RESOURCE_GROUP}/deviceclasses", DeviceClass, lambda device_class: device_class, bool)
        self._slices = cache(
            f"{RESOURCE_GROUP}/resourceslices", ResourceSlice, _published, self._slices_changed, fieldSelector=of_driver
        )
        self._pods = cache("/api/v1/pods", Pod, _kept_pod, self._pods_changed, fieldSelector=pending)
        self._nodes = cache("/api/v1/nodes", Node, _kept_node, self._nodes_changed)
        self._plans = cache(PATH, GpuNodePlan, _kept_plan, self._plans_changed)
        self._kinds = {
            "ResourceClaim": self._claims,
            "DeviceClass": self._classes,
            "ResourceSlice": self._slices,
            "Pod": self._pods,
            "Node": self._nodes,
            KIND: self._plans,
        }
        self._pod_groups = [pod_groups(client, on_change, of) for of in (POD_GROUP_VERSION, VOLCANO_GROUP_VERSION)]
        self._taint_rules = device_taint_rules(client, on_change)
        self.templates = claim_templates(client, _kept_template, on_change)
        self._optional: tuple[OptionalCache[Any], ...] = (*self._pod_groups, self._taint_rules, self.templates)

    def _cache(
        self,
        client: KubeClient,
        path: str,
        kind: type[Any],
        project: Callable[[Any], Any],
        changed: Callable[[Sequence[Change[Any]]], bool],
        **selectors: str,
    ) -> WatchCache[Any, Any]:
        return WatchCache(client, path, kind, project, partial(self._changed, changed), selectors)

    def start(self, stop: threading.Event) -> list[threading.Thread]:
        """Watch each resource in a thread of its own until ``stop`` is set."""
        runs = [*(cache.run for cache in self._kinds.values()), *(optional.run for optional in self._optional)]
        threads = [threading.Thread(target=run, args=(stop,), daemon=True) for run in runs]
        for thread in threads:
            thread.start()
        return threads

    def load(self) -> None:
        """List each resource once, for a caller that does not watch. Raises ApiError."""
        for cache in self._kinds.values():
            cache.load()
        for optional in self._optional:
            optional.load()

    @property
    def synced(self) -> bool:
        """Whether every resource has been listed."""
        optional = all(optional.synced for optional in self._optional)
        return optional and all(cache.synced for cache in self._kinds.values())

    def stale(self) -> str | None:
        """Why the caches may be out of date; None if all are current."""
        return next((why for cache in self._kinds.values() if (why := cache.stale()) is not None), None)

    def unreadable(self) -> list[tuple[Reference, str]]:
        """The objects that are unreadable at present, and why."""
        return [
            (Reference(kind, at.name, at.namespace, at.uid, cache.api_version), why)
            for kind, cache in (*self._kinds.items(), *((optional.kind, optional.cache) for optional in self._optional))
            for at, why in cache.unreadable
        ]

    def wait_for_version(self, version: int, timeout_s: float) -> bool:
        """Wait until all changes of claims up to ``version`` are processed; False after ``timeout_s`` seconds."""
        return self._claims.wait_for_version(version, timeout_s)

    def held(self) -> frozenset[PoolDevice]:
        """The devices that are allocated according to all processed changes of claims."""
        with self._lock:
            index = self._claim_index
            return frozenset(PoolDevice(pool, name) for pool in index.pools for name in index.held(pool))

    def held_on(self, pool: str) -> Mapping[str, Held]:
        """The devices of ``pool`` that are allocated according to all processed changes of claims."""
        with self._lock:
            return self._claim_index.held(pool)

    def observe_plan(self, stored: Mapping[str, Any]) -> None:
        """Take over a plan that this controller wrote, ahead of the watch and without calling ``on_change``."""
        self._own_write.active = True
        try:
            self._plans.observe(stored)
        finally:
            self._own_write.active = False

    def snapshot(self) -> Snapshot:
        """The present state. ``changed`` accumulates until ``acknowledge``, so that a failed decision loses nothing."""
        classes, pods = tuple(self._classes.snapshot().values()), tuple(self._pods.snapshot().values())
        groups = {key: group for cache in self._pod_groups for key, group in cache.snapshot().items()}
        rules = tuple(self._taint_rules.snapshot().values())
        templates = tuple(self.templates.snapshot().values())
        with self._lock:
            outdated, self._outdated = self._outdated, set()
            changed_nodes, self._outdated_nodes = self._outdated_nodes, set()
            for name in outdated:
                self._views.update(
                    name,
                    self._nodes_by_name.get(name),
                    self._plans_by_node.get(name),
                    self._slices_by_node.get(name, {}).values(),
                    self._claim_index.held(Pool(name, self._driver).name),
                    node_changed=name in changed_nodes,
                    shared=self._claim_index.shared(Pool(name, self._driver).name),
                    is_monitored=bool(self._claim_index.held(Pool(name, self._driver, MONITORS).name)),
                )
            return Snapshot(
                ClusterState(
                    self._claim_index.view(),
                    classes,
                    pods,
                    tuple(self._nodes_by_name.values()),
                    groups,
                    rules,
                    templates,
                ),
                self._plans_by_node,
                self._views.all(),
                dict(self._views.incomplete),
                self._views.changes(),
            )

    def acknowledge(self) -> None:
        """The decision from the last snapshot is made: ``changed`` begins anew."""
        self._views.acknowledge()

    # Each of these takes changes over, and returns whether a decision may depend on them.

    def _changed(self, take_over: Callable[[Sequence[Change[Any]]], bool], changes: Sequence[Change[Any]]) -> None:
        with self._lock:
            relevant = take_over(changes)
        # Without changes, the first list has been read.
        if (relevant or not changes) and not getattr(self._own_write, "active", False):
            self._on_change()

    def _claims_changed(self, changes: Sequence[Change[Claim]]) -> bool:
        for change in changes:
            if self._claim_changed is not None:
                self._claim_changed(change.old, change.new)
            pools = self._claim_index.put(change.key, change.new)
            self._outdated |= {self._node_of_pool[pool] for pool in pools if pool in self._node_of_pool}
        return True

    def _pods_changed(self, changes: Sequence[Change[Pod]]) -> bool:
        """A pod that leaves the queue with all of its claims allocated changes nothing for pending claims."""
        return any(
            change.new is not None or change.old is None or not self._claim_index.satisfies(change.old.claims)
            for change in changes
        )

    def _slices_changed(self, changes: Sequence[Change[PublishedSlice]]) -> bool:
        for change in changes:
            for version in filter(None, (change.old, change.new)):
                self._outdated.add(version.node)
                self._slices_by_node.setdefault(version.node, {}).pop(change.key, None)
            if change.new is not None:
                self._slices_by_node[change.new.node][change.key] = change.new
        return True

    def _nodes_changed(self, changes: Sequence[Change[Node]]) -> bool:
        for name in (change.key.name for change in changes):
            self._node_of_pool |= dict.fromkeys(Pool(name, self._driver).names, name)
        self._outdated_nodes |= {change.key.name for change in changes}
        return self._take(changes, self._nodes_by_name)

    def _plans_changed(self, changes: Sequence[Change[GpuNodePlan]]) -> bool:
        self._plans_by_node = dict(self._plans_by_node)
        self._take(changes, self._plans_by_node)
        return any(_without_version(change.old) != _without_version(change.new) for change in changes)

    def _take(self, changes: Sequence[Change[T]], into: dict[str, T]) -> bool:
        for change in changes:
            self._outdated.add(change.key.name)
            into.pop(change.key.name, None)
            if change.new is not None:
                into[change.key.name] = change.new
        return True


def _published(found: ResourceSlice) -> PublishedSlice:
    devices = found.spec.devices
    shares = {
        sys.intern(device.name): device.attributes.shares.integer or 1 if device.attributes.shares is not None else 1
        for device in devices
    }
    closed = NOT_OFFERED["key"]
    offered = (sys.intern(device.name) for device in devices if all(taint.key != closed for taint in device.taints))
    pool = found.spec.pool
    part = PoolPart(sys.intern(pool.name), pool.generation, pool.resource_slice_count)
    return PublishedSlice(sys.intern(found.spec.node_name), part, shares, frozenset(offered))


def _kept_claim(found: Claim) -> Claim:
    """A claim without reservations and labels; of one that waits the controller is kept, a pod that may not name it."""
    allocation = found.status.allocation
    status = ClaimStatus(None if allocation is None else _allocation(allocation))
    kept = _metadata(found.metadata, with_controller=allocation is None)
    return Claim(kept, _shared(ClaimSpec, found.spec), status)


def _kept_template(found: ClaimTemplate) -> ClaimTemplate:
    at, spec = found.metadata, _shared(ClaimSpec, found.spec.spec)
    return ClaimTemplate(Metadata(name=at.name, namespace=sys.intern(at.namespace)), ClaimTemplateSpec(spec))


def _kept_pod(found: Pod) -> Pod | None:
    """A pod that may request devices, or that belongs to a group with such pods. None for other pods."""
    common = {"cpu", "memory", "ephemeral-storage", "pods"}
    if not found.spec.resource_claims and not found.spec.resource_names - common and found.pod_group is None:
        return None
    kept = _metadata(found.metadata, with_labels=True, with_controller=True)
    return Pod(msgspec.structs.replace(kept, annotations=found.metadata.annotations), found.spec, found.status)


def _kept_node(found: Node) -> Node:
    """A Node with its labels and the resources of NVIDIA's device plugin."""
    plugged = {
        sys.intern(name): sys.intern(amount)
        for name, amount in found.status.allocatable.items()
        if name.startswith("nvidia.com/") and amount != "0"
    }
    return Node(_metadata(found.metadata, with_labels=True), found.spec, NodeStatus(allocatable=plugged))


def _kept_plan(found: GpuNodePlan) -> GpuNodePlan:
    """A plan without the parts that only people read."""
    status = found.status
    kept = PlanStatus(
        epoch=status.epoch,
        mode=status.mode,
        inventory=status.inventory,
        refused=status.refused,
        dropped=status.dropped,
        left_out=status.left_out,
        unprepared=status.unprepared,
        unreleased=status.unreleased,
        conditions=tuple(item for item in status.conditions if item.type == NodeConditionType.UNABLE),
        config=status.config,
    )
    return GpuNodePlan(found.metadata, found.spec, kept)


def _without_version(plan: GpuNodePlan | None) -> object:
    """What matters of a plan; its resourceVersion changes with everything else, too."""
    return None if plan is None else (plan.spec, plan.status, plan.metadata.paused)


def _metadata(found: Metadata, *, with_labels: bool = False, with_controller: bool = False) -> Metadata:
    owner, labels = found.controller if with_controller else None, found.labels.items() if with_labels else ()
    return Metadata(
        name=found.name,
        namespace=sys.intern(found.namespace),
        uid=found.uid,
        labels={sys.intern(name): sys.intern(value) for name, value in labels},
        creation_timestamp=found.creation_timestamp,
        deletion_timestamp=found.deletion_timestamp,
        owner_references=() if owner is None else (owner,),
    )


def _allocation(found: Allocation) -> Allocation:
    results = tuple(
        Result(
            sys.intern(result.request),
            sys.intern(result.driver),
            sys.intern(result.pool),
            sys.intern(result.device),
            result.admin_access,
            result.share_id,
            result.consumed_capacity,
        )
        for result in found.devices.results
    )
    selector = None if found.node_selector is None else _shared(NodeSelector, found.node_selector)
    return Allocation(DeviceAllocation(results), selector)


def _shared(kind: type[T], value: T) -> T:
    """The one kept object that equals ``value``; ``value`` itself if it is large."""
    encoded = msgspec.json.encode(value)
    if len(encoded) > MAX_SHARED_BYTES:
        return value
    kept: T = _decoded(kind, encoded)  # type: ignore[arg-type]
    return kept


@lru_cache(MAX_SHARED_VALUES)
def _decoded(kind: Any, encoded: bytes) -> Any:
    return msgspec.json.decode(encoded, type=kind)
