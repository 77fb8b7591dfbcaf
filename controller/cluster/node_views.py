"""One view of each node: from its Node object, its plan, its ResourceSlices, the allocated claims and its labels.

The views are kept between decisions, and what changed is collected here, once for everything that is derived from them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from controller.cluster.node_dedication import UNDEDICATED, Dedication, dedication_of
from driver.kube.slice_types import newest_generation
from driver.kube.types import PAUSED, GpuNodePlan, Node
from driver.model.plan import Held, NodeConditionType, PlanMode, PlanStatus
from driver.slices.slice_names import MONITORS, Pool

UNREACHABLE_TAINTS = frozenset({"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"})
"""Taints of a node on which no new pod can start: nothing is offered there."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node: the GPUs that it reports, its published and its allocated devices, and its dedication.

    ``uid`` is that of the Node. ``published`` maps the device names in its slices, and those that the node left out of
    them, to the number of shares that its GPU has with such devices (1: not a share); ``offered`` are those that new
    claims can be allocated. ``held`` maps the names of allocated devices to their claims, ``shared`` those of shared
    devices to all their claims; ``is_monitored``: a claim has monitor devices, which are not among all these.
    ``why_no_offers``: why it accepts no offers, such as ``is not ready``; empty if new pods can start there and its
    plan is not paused. ``follows_plan``: the node does what its plan says. ``unable``: why no pod with a GPU can start
    there.
    """

    name: str
    uid: str
    pool: str
    status: PlanStatus
    published: Mapping[str, int]
    offered: frozenset[str]
    held: Mapping[str, Held]
    dedication: Dedication = UNDEDICATED
    why_no_offers: str = ""
    follows_plan: bool = True
    is_monitored: bool = False
    unable: str | None = None
    shared: Mapping[str, tuple[Held, ...]] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether the node publishes every device, so that there is nothing to offer or to withdraw."""
        return self.status.mode is PlanMode.COMPLETE


class PoolPart(NamedTuple):
    """The pool of one slice, its generation, and the number of slices in that generation."""

    pool: str
    generation: int
    slices: int


@dataclass(frozen=True, slots=True)
class PublishedSlice:
    """One ResourceSlice. ``devices`` and ``offered`` are its part of ``NodeView.published`` and ``offered``."""

    node: str
    part: PoolPart
    devices: Mapping[str, int]
    offered: frozenset[str]


@dataclass(frozen=True)
class NodeChanges:
    """The nodes that changed since the last decision.

    ``names``: nodes of which the Node, the plan, a slice or an allocated device changed. ``nodes``: changed Node
    objects by name, None where a Node was deleted. ``views``: changed and new views. ``membership``: a view was added
    or removed, so that whatever was derived from all views has to be made anew.
    """

    names: frozenset[str]
    nodes: Mapping[str, Node | None]
    views: Sequence[NodeView]
    membership: bool


class NodeViews:
    """The nodes that have or had a plan or slices, in order of name. A view ends with its Node."""

    def __init__(self, driver: str) -> None:
        self._driver = driver
        self._views: dict[str, NodeView] = {}
        self._all: tuple[NodeView, ...] | None = None
        self.incomplete: dict[str, str] = {}
        """By pool, why the scheduler ignores it."""
        self._pools: dict[str, frozenset[str]] = {}
        self._changed: dict[str, Node | None] = {}
        """The updated nodes, with their Node objects; these and the next two until ``acknowledge``."""
        self._changed_nodes: set[str] = set()
        self._changed_views: set[str] = set()
        self._membership = False

    def all(self) -> tuple[NodeView, ...]:
        """The same tuple as long as no view changes."""
        if self._all is None:
            self._all = tuple(map(self._views.__getitem__, sorted(self._views)))
        return self._all

    def changes(self) -> NodeChanges:
        """What changed since ``acknowledge`` was called last."""
        views = [self._views[name] for name in sorted(self._changed_views) if name in self._views]
        nodes = {name: self._changed[name] for name in self._changed_nodes}
        return NodeChanges(frozenset(self._changed), nodes, views, self._membership)

    def acknowledge(self) -> None:
        """Forget the changes: a decision has been made from them."""
        self._changed, self._changed_nodes, self._changed_views, self._membership = {}, set(), set(), False

    def update(
        self,
        name: str,
        node: Node | None,
        plan: GpuNodePlan | None,
        slices: Collection[PublishedSlice],
        held: Mapping[str, Held],
        *,
        node_changed: bool,
        shared: Mapping[str, tuple[Held, ...]] = MappingProxyType({}),
        is_monitored: bool = False,
    ) -> None:
        self._changed[name] = node
        if node_changed:
            self._changed_nodes.add(name)
        self._update_pools(name, slices)
        is_ours = plan is not None or slices
        view = None
        if node is not None and is_ours:
            view = self._view(node, plan, slices, held, shared, is_monitored=is_monitored)
        before = self._views.get(name)
        if view != before:
            self._all = None
            self._changed_views.add(name)
            self._membership |= before is None or view is None
            if view is not None:
                self._views[name] = view
            else:
                del self._views[name]

    def _update_pools(self, node: str, slices: Collection[PublishedSlice]) -> None:
        for pool in self._pools.pop(node, frozenset()):
            self.incomplete.pop(pool, None)
        parts = [published.part for published in slices]
        self.incomplete |= incomplete_pools(parts)
        if parts:
            self._pools[node] = frozenset(part.pool for part in parts)

    def _view(
        self,
        node: Node,
        plan: GpuNodePlan | None,
        slices: Collection[PublishedSlice],
        held: Mapping[str, Held],
        shared: Mapping[str, tuple[Held, ...]],
        *,
        is_monitored: bool,
    ) -> NodeView:
        name = node.metadata.name
        of_monitors = Pool(name, self._driver, MONITORS).name
        slices = [published for published in slices if published.part.pool != of_monitors]
        paused = plan is not None and plan.metadata.paused
        status = plan.status if plan is not None else PlanStatus()
        return NodeView(
            name=name,
            uid=node.metadata.uid,
            pool=Pool(name, self._driver).name,
            status=status,
            published=dict.fromkeys(status.left_out, 1)
            | {name: shares for part in slices for name, shares in part.devices.items()},
            offered=frozenset().union(*(part.offered for part in slices)),
            held=held,
            dedication=dedication_of(node.metadata.labels),
            why_no_offers=_why_no_offers(node, paused=paused),
            follows_plan=not paused and plan is not None and plan.followed,
            is_monitored=is_monitored,
            shared=shared,
            unable=next((item.message for item in status.conditions if item.type == NodeConditionType.UNABLE), None),
        )


def _why_no_offers(node: Node, *, paused: bool) -> str:
    if {taint.key for taint in node.spec.taints} & UNREACHABLE_TAINTS:
        return "is not ready"
    if node.spec.unschedulable:
        return "is cordoned"
    return f"has a paused plan (annotation {PAUSED})" if paused else ""


def incomplete_pools(parts: Iterable[PoolPart]) -> dict[str, str]:
    """Of the pools that lack slices: why. As the scheduler does, only the newest generation of a pool is counted."""
    newest = newest_generation(parts, lambda part: (part.pool, part.generation))
    counts = ((pool, len(parts_of_pool), parts_of_pool[0]) for pool, parts_of_pool in newest.items())
    return {
        pool: f"is incomplete: it has {count} of the {part.slices} slices of its generation {part.generation}"
        for pool, count, part in counts
        if count < part.slices
    }


REPORT_TIMEOUT_SECONDS = 30.0
"""Time that a node has for its first report; a starting node plugin needs seconds."""

SHOWN_CAUSES = 2
"""Reasons that are shown of a node that does not follow its plan."""


def silent_nodes(views: Iterable[NodeView], incomplete: Mapping[str, str]) -> dict[str, str]:
    """The nodes that publish nothing that the scheduler takes, though they have reported GPUs; and why."""
    silent = {}
    for view in views:
        if view.pool in incomplete:
            silent[view.name] = f"publishes a pool that {incomplete[view.pool]}"
        elif view.status.inventory and not view.published:
            silent[view.name] = "publishes no device"
    return silent


def refusing_nodes(views: Iterable[NodeView]) -> dict[str, str]:
    """The nodes that do not publish some of what their plan offers, and why."""
    refusing = {}
    for view in views:
        if view.status.refused:
            reasons = dict.fromkeys(refusal.partition(": ")[2] for refusal in view.status.refused)
            refusing[view.name] = (
                f"does not offer all that its plan requests: {'; '.join(list(reasons)[:SHOWN_CAUSES])}"
            )
    return refusing


@dataclass(frozen=True)
class UnreportedNodes:
    """``may_report``: for one of ``nodes``, or for the first node of all, the time has not run out yet."""

    nodes: tuple[str, ...] = ()
    may_report: bool = False


ALL_REPORTED = UnreportedNodes()


class UnreportedNodesTracker:
    """Remembers since when nodes have been without a report; a new leader begins anew."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._none_since: float | None = None
        """Since when no node at all has reported."""
        self._since: dict[str, float] = {}

    def update(self, views: Collection[NodeView]) -> UnreportedNodes:
        now, times = self._clock(), list[float]()
        self._since = {view.name: self._since.get(view.name, now) for view in views if not view.status.inventory}
        if len(self._since) < len(views):
            self._none_since = None
        else:
            self._none_since = now if self._none_since is None else self._none_since
            times.append(self._none_since)
        times += self._since.values()
        return UnreportedNodes(tuple(sorted(self._since)), any(now - began < REPORT_TIMEOUT_SECONDS for began in times))
