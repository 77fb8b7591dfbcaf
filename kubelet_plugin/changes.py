"""What changes on a node while its plugin runs, which parts act on it, and where they report it to people.

A part that detects a change reports it and knows nobody who acts on it. The composition subscribes the parts in one
place, before the first thread starts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from driver.errors import HardwareError
from driver.model.gpu import Gpu


class NodeEventSink(Protocol):
    """Records Events on the node (``PluginEvents``)."""

    def node(self, reason: str, message: str, warning: bool = True, about: str = "") -> None:
        """Record an Event. Does not block. Each thing that Events of one reason are ``about`` has one of its own."""


class GpuChange(StrEnum):
    """Changes of a GPU that its hardware may refuse."""

    CUT = "cut"
    """A new partition."""

    SWITCH = "switch"
    """Another MIG mode."""


class HardwareOutcomes(Protocol):
    """Receives how the hardware answered each change of a GPU (``HealthMonitor``)."""

    def change_failed(self, gpu: Gpu, change: GpuChange, error: HardwareError) -> None:
        """The hardware refused to change ``gpu``."""

    def change_succeeded(self, gpu: Gpu, change: GpuChange) -> None:
        """The hardware changed ``gpu``."""


class NodeChange(StrEnum):
    """A change on the node; the comment names the part that reports it."""

    KEPT_FIELDS = "kept-fields"  # KeptFields: perhaps which fields of devices the API server keeps
    PLAN = "plan"  # WatchedInstructions: the plan, whether there is a controller, whether Tessera is being uninstalled
    LABEL = "label"  # WatchedInstructions: labels, configurations of nodes, whether it has a kubelet; ConfigFollower
    MODE = "mode"  # PlanFollower: whether the node follows the plan, is standalone, or publishes every device
    PUBLISHED = "published"  # PlanFollower: the published devices, of which the plan's status reports
    RESERVATIONS = "reservations"  # OtherDriverWatch: the GPUs that are reserved for other drivers
    HARDWARE = "hardware"  # ScanLoop: GPUs or partitions
    HEALTH = "health"  # HealthMonitor: conditions of devices
    PREPARED = "prepared"  # Preparer: a claim has new devices; MemoryWatch: something else holds it to its memory
    UNPREPARED = "unprepared"  # FailedPreparations: the claims that could not be prepared
    CONDITION = "condition"  # NodeConditions: what is wrong with the node as a whole
    RELEASED = "released"  # ClaimCleanup: a claim has no devices any more
    RELEASE_FAILED = "release-failed"  # ClaimCleanup: the release of a claim has to be repeated
    SETTINGS = "settings"  # ConfigFollower: the plugin has to start again with another configuration
    CDI_RESTORED = "cdi-restored"  # CdiDirectory: the directory was missing and has been created again


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
