"""What changes on a node while its plugin runs, which parts act on it, and where they report it to people.

A part that detects a change reports it and knows nobody who acts on it. The composition subscribes the parts in one
place, before the first thread starts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol


class NodeEventSink(Protocol):
    """Records Events on the node (``PluginEvents``)."""

    def node(self, reason: str, message: str, warning: bool = True) -> None:
        """Record an Event. Does not block."""


class NodeChange(StrEnum):
    """What has changed, by the part that reports it."""

    KEPT_FIELDS = "kept-fields"
    """The fields of devices that the API server keeps may have changed (``KeptFields``)."""

    PLAN = "plan"
    """The plan, whether there is a controller, whether Tessera is being uninstalled (``WatchedInstructions``)."""

    LABEL = "label"
    """The label that selects what the node publishes (``WatchedInstructions``)."""

    MODE = "mode"
    """Whether the node follows the plan, is standalone, or publishes every device (``PlanFollower``)."""

    PUBLISHED = "published"
    """The published devices, of which the plan's status reports (``PlanFollower``)."""

    RESERVATIONS = "reservations"
    """The GPUs that are reserved for other drivers (``OtherDriverWatch``)."""

    HARDWARE = "hardware"
    """GPUs or partitions: a scan has found a difference (``ScanLoop``)."""

    HEALTH = "health"
    """Conditions of devices (``HealthMonitor``)."""

    PREPARED = "prepared"
    """A claim has new devices (``Preparer``)."""

    RELEASED = "released"
    """A claim has no devices any more (``ClaimCleanup``)."""

    RELEASE_FAILED = "release-failed"
    """The release of a claim has to be repeated (``ClaimCleanup``)."""

    CDI_RESTORED = "cdi-restored"
    """The CDI directory was missing and has been created again (``CdiDirectory``)."""


class ChangeNotifier:
    """Calls the subscribers of a change in the order of their subscription. They must return quickly."""

    def __init__(self) -> None:
        self._receivers: dict[NodeChange, list[Callable[[], object]]] = defaultdict(list)

    def subscribe(self, change: NodeChange, *receivers: Callable[[], object]) -> None:
        self._receivers[change] += receivers

    def report(self, change: NodeChange) -> None:
        """Call the subscribers of ``change``, in the thread that has detected it."""
        for receive in tuple(self._receivers.get(change, ())):
            receive()
