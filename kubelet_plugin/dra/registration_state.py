"""Whether the kubelet knows this plugin, and how long slices wait for that.

A pod that is scheduled to the devices of a plugin that its kubelet does not know waits 15 s for the kubelet's next
attempt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from driver.model.plan import NodeConditionType
from kubelet_plugin.health.node_problems import NodeConditions

WIPE_TIMEOUT_SECONDS = 5.0
"""How long slices that have all been deleted wait for a registration: a kubelet deletes them in the background when it
starts, before or after it registers the plugin again, and nothing says which."""


class Registration:
    """Thread-safe. ``has_kubelet``: whether the node has a kubelet; None: not known yet.

    A Node object whose status no kubelet has written belongs to a simulation: its plugin counts as registered.
    """

    def __init__(
        self,
        has_kubelet: Callable[[], bool | None],
        conditions: NodeConditions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._has_kubelet, self._conditions, self._clock = has_kubelet, conditions, clock
        self._registered_at: float | None = None
        self._failure: str | None = (
            "the kubelet has not called the registration socket yet; is it running, and is --kubelet-dir its directory?"
        )

    def failure(self) -> str | None:
        """Why the plugin is not registered, or None."""
        return None if self._has_kubelet() is False else self._failure

    def set(self, accepted: bool, reason: str) -> None:
        """Record the kubelet's answer, or that there was none for long."""
        if accepted:
            self._registered_at = self._clock()
        self._failure = None if accepted else reason
        self._conditions.set(NodeConditionType.UNREGISTERED, self.failure())

    def creation_delay(self, absent_since: float | None) -> float:
        """Seconds until slices may be created while there are none; infinite: until the kubelet registers the plugin.

        ``absent_since``: when this process missed the slices that it had published; None: it has published none.
        """
        if self.failure() is None and (absent_since is None or self._has_kubelet() is False):
            return 0.0
        if absent_since is None:
            return math.inf
        if self._registered_at is not None and self._registered_at > absent_since:
            return 0.0
        return max(0.0, absent_since + WIPE_TIMEOUT_SECONDS - self._clock())
