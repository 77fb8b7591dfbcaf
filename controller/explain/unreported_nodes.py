"""Nodes that have not reported their GPUs yet: no reason may be given that their GPUs could refute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from controller.cluster.node_views import NodeView

REPORT_TIMEOUT_SECONDS = 30.0
"""Time that a node has for its first report; a starting node plugin needs seconds."""


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

    def update(self, views: Iterable[NodeView]) -> UnreportedNodes:
        """The nodes without a report among ``views``."""
        now, reported = self._clock(), False
        since: dict[str, float] = {}
        for view in views:
            if view.status.inventory:
                reported = True
            else:
                since[view.name] = self._since.get(view.name, now)
        self._since = since
        self._none_since = None if reported else now if self._none_since is None else self._none_since
        times = [*since.values(), *([self._none_since] if self._none_since is not None else [])]
        return UnreportedNodes(tuple(sorted(since)), any(now - began < REPORT_TIMEOUT_SECONDS for began in times))
