"""Nodes that have not reported their GPUs, publish nothing, or do not publish all that their plans offer."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from controller.cluster.node_views import NodeView

REPORT_TIMEOUT_SECONDS = 30.0
"""Time that a node has for its first report; a starting node plugin needs seconds."""

SHOWN_CAUSES = 2
"""Reasons that are shown of a node that does not follow its plan."""


def silent_nodes(views: Iterable[NodeView], incomplete: Mapping[str, str]) -> dict[str, str]:
    """The nodes that publish nothing that the scheduler takes, though they have reported GPUs; and why."""
    found = {}
    for view in views:
        if view.pool in incomplete:
            found[view.name] = f"publishes a pool that {incomplete[view.pool]}"
        elif view.status.inventory and not view.published:
            found[view.name] = "publishes no device"
    return found


def refusing_nodes(views: Iterable[NodeView]) -> dict[str, str]:
    """The nodes that do not publish some of what their plan offers, and why."""
    found = {}
    for view in views:
        if view.status.refused:
            reasons = dict.fromkeys(entry.partition(": ")[2] for entry in view.status.refused)
            found[view.name] = f"does not offer all that its plan requests: {'; '.join(list(reasons)[:SHOWN_CAUSES])}"
    return found


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
        """The nodes without a report among ``views``."""
        now, times = self._clock(), list[float]()
        self._since = {view.name: self._since.get(view.name, now) for view in views if not view.status.inventory}
        if len(self._since) < len(views):
            self._none_since = None
        else:
            self._none_since = now if self._none_since is None else self._none_since
            times.append(self._none_since)
        times += self._since.values()
        return UnreportedNodes(tuple(sorted(self._since)), any(now - began < REPORT_TIMEOUT_SECONDS for began in times))
