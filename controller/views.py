"""Of every node what its object, its plan, its slices and the claims say (pure but for a memory)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from controller.dedication import dedication_of
from controller.objects import Node
from controller.picture import NodeView
from controller.pools import PoolPart, incomplete_pools
from driver.kube.plans import GpuNodePlan
from driver.model.plan import Held, PlanStatus
from driver.slices.names import Pool

CLOSED = frozenset({"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"})
"""Taints of a node that answers nobody: what is offered there would be offered in vain."""


@dataclass(frozen=True, slots=True)
class Published:
    """One slice: its node and pool, its devices by name with the number of shares of that kind (1: no share).

    ``open`` are those that new claims may get.
    """

    node: str
    part: PoolPart
    devices: Mapping[str, int]
    open: frozenset[str]


class Views:
    """The nodes that publish our devices or did, in order of name; one that is gone takes its plan with it."""

    def __init__(self, driver: str) -> None:
        self._driver = driver
        self._views: dict[str, NodeView] = {}
        self._names: list[str] = []
        self._ordered: list[NodeView] = []
        self._all: tuple[NodeView, ...] | None = None
        self.incomplete: dict[str, str] = {}
        """By pool why the scheduler leaves it aside."""
        self._pools: dict[str, frozenset[str]] = {}

    def all(self) -> tuple[NodeView, ...]:
        """The same tuple as long as nothing has changed."""
        if self._all is None:
            self._all = tuple(self._ordered)
        return self._all

    def make(
        self,
        name: str,
        node: Node | None,
        plan: GpuNodePlan | None,
        slices: Collection[Published],
        held: Mapping[str, Held],
    ) -> None:
        """Make the view of one node anew; an equal one stays the same object."""
        self._look_at_pools(name, slices)
        is_ours = plan is not None or slices
        found = self._view(node, plan, slices, held) if node is not None and is_ours else None
        before = self._views.get(name)
        if found == before:
            return
        at = bisect_left(self._names, name)
        self._all = None
        if found is None:
            del self._views[name], self._names[at], self._ordered[at]
            return
        self._views[name] = found
        if before is not None:
            self._ordered[at] = found
        else:
            self._names.insert(at, name)
            self._ordered.insert(at, found)

    def _look_at_pools(self, node: str, slices: Collection[Published]) -> None:
        for pool in self._pools.pop(node, frozenset()):
            self.incomplete.pop(pool, None)
        parts = [each.part for each in slices]
        self.incomplete |= incomplete_pools(parts)
        if parts:
            self._pools[node] = frozenset(part.pool for part in parts)

    def _view(
        self, node: Node, plan: GpuNodePlan | None, slices: Collection[Published], held: Mapping[str, Held]
    ) -> NodeView:
        paused = plan is not None and plan.metadata.paused
        closed = node.spec.unschedulable or {taint.key for taint in node.spec.taints} & CLOSED
        return NodeView(
            name=node.metadata.name,
            uid=node.metadata.uid,
            pool=Pool(node.metadata.name, self._driver).name,
            status=plan.status if plan is not None else PlanStatus(),
            published={name: shares for each in slices for name, shares in each.devices.items()},
            offered=frozenset().union(*(each.open for each in slices)),
            held=held,
            dedication=dedication_of(node.metadata.labels),
            open=not paused and not closed,
            follows=not paused and plan is not None and plan.followed,
        )
