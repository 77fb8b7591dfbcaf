"""What is wrong with the node as a whole: in the plan's status, in Events of the node, in a metric."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from driver.clock import written_time
from driver.model.plan import NodeCondition, NodeConditionType
from kubelet_plugin.changes import ChangeNotifier, NodeChange, NodeEventSink

log = logging.getLogger(__name__)

EVENT_REASONS = {
    NodeConditionType.UNREGISTERED: ("PluginNotRegistered", "PluginRegistered"),
    NodeConditionType.UNABLE: ("NodeUnable", "NodeAble"),
    NodeConditionType.DRIVER_FILES_CHANGED: ("DriverFilesChanged", "DriverFilesCurrent"),
}
"""Reasons of the Events about each condition: when it begins or has another message, and when it ends."""


class NodeConditions:
    """Thread-safe. Reports every change."""

    def __init__(self, changes: ChangeNotifier, events: NodeEventSink, clock: Callable[[], float] = time.time) -> None:
        self._changes, self._events, self._clock = changes, events, clock
        self._lock = threading.Lock()
        self._current: dict[NodeConditionType, NodeCondition] = {}

    def set(self, kind: NodeConditionType, message: str | None) -> bool:
        """Begin or continue a condition, or end it (None); returns whether that changes anything."""
        begun, ended = EVENT_REASONS[kind]
        with self._lock:
            before = self._current.pop(kind, None)
            if message is not None:
                since = before.since if before is not None else written_time(int(self._clock()))
                self._current[kind] = NodeCondition(kind.value, since, message)
            if self._current.get(kind) == before:
                return False
            if message is not None:
                log.error("a condition of this node", extra={"kind": kind.value, "why": message})
                self._events.node(begun, message)
            elif before is not None:
                self._events.node(ended, f"no longer: {before.message}", False)
        self._changes.report(NodeChange.CONDITION)
        return True

    def current(self) -> tuple[NodeCondition, ...]:
        """The present conditions, by type."""
        with self._lock:
            return tuple(self._current[kind] for kind in NodeConditionType if kind in self._current)
