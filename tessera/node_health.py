"""What a node plugin's ``/livez``, ``/readyz`` and gRPC health tell, put together of its parts.

A node that loses the API server lives: what it prepared stays, and it goes on by itself. It is not ready, though.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import grpc

from driver.checks import Check
from driver.config.settings import NodeSettings
from driver.kube.reach import ApiReach
from driver.model.gpu import Gpu
from driver.watchdog import Watchdog
from kubelet_plugin.answering import Answering
from kubelet_plugin.grpc_health import GrpcHealth
from kubelet_plugin.inventory import Inventory
from kubelet_plugin.soundness import KubeletsWord, Looks, writable
from tessera.endpoints import health_pages, serve

if TYPE_CHECKING:
    from driver.web import Page


class NodeHealth:
    """Thread-safe. ``reach``, ``watchdog``, ``kubelet`` and ``looked`` are to be told of what happens."""

    def __init__(self, settings: NodeSettings, stop: threading.Event) -> None:
        self.reach = ApiReach()
        self.watchdog = Watchdog(stop)
        self.publishing = self.watchdog.watch("publishing slices")
        self.telling_plan = self.watchdog.watch("writing the plan's status")
        self.kubelet = KubeletsWord()
        self._settings = settings
        self._looks: Looks | None = None
        self._answering = Answering(settings.plugin_socket)
        self._ready: list[Check] = [
            Check("registered", self.kubelet.look),
            Check("api", self.reach.failure),
            Check("checkpoint", writable(settings.state_dir)),
        ]

    def hardware(self, inventory: Inventory) -> None:
        """The node's GPUs are known from now on."""
        self._looks = Looks(inventory)
        self._ready.append(Check("hardware", self._looks.look))

    def looked(self, answering: Sequence[Gpu]) -> None:
        """A look at the hardware has ended."""
        if self._looks is not None:
            self._looks.done(answering)

    def slices(self, published: threading.Event) -> None:
        """``published`` is set when the node's slices were as they should be for the first time."""

        def look() -> str | None:
            failure = self.publishing.failure
            return failure or (None if published.is_set() else "they were not published yet")

        self._ready.append(Check("slices", look))

    def also(self, name: str, look: Callable[[], str | None]) -> None:
        """One more thing without which the node is not ready."""
        self._ready.append(Check(name, look))

    def handler(self) -> grpc.GenericRpcHandler:
        """For the plugin's socket."""
        return GrpcHealth(self._turning(), self._ready).handler()

    def serve(self, stack: ExitStack, metrics: Callable[[], Mapping[str, Page]]) -> None:
        """Answer over HTTP at the addresses that settings name. Raises EnvironmentFault."""
        live = [*self._turning(), Check("grpc", self._answering.look)]
        wanted = [
            ("--metrics-address", self._settings.metrics_address, metrics),
            ("--health-address", self._settings.health_address, lambda: health_pages(live, self._ready)),
        ]
        serve(stack, wanted)

    def _turning(self) -> list[Check]:
        return [Check("loops", self.watchdog.look)]
