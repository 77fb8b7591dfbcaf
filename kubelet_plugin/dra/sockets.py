"""The sockets of a node plugin that is part of a rolling update: they outlive the plugin's turns as active instance."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from kubelet_plugin.dra.call_proxy import CallProxy, Handlers
from kubelet_plugin.dra.registration import STOP_TIMEOUT_SECONDS, Registry, SocketServer
from kubelet_plugin.settings import NodeSettings
from kubelet_plugin.upgrade.instance_lock import InstanceLock

log = logging.getLogger(__name__)

Registered = Callable[[bool, str], None]
"""(whether the kubelet accepted the registration, why not)."""


class PluginSockets:
    """The plugin's socket exists until ``close``, the registration socket from ``offer`` to ``withdraw``."""

    def __init__(self, settings: NodeSettings, ownership: InstanceLock, *more: grpc.GenericRpcHandler) -> None:
        """``more`` are further handlers of the plugin's socket. Raises EnvironmentFault."""
        self._settings = settings
        self._ownership = ownership
        self._proxy = CallProxy(ownership.owner)
        self._lock = threading.Lock()
        self._serving: tuple[Handlers, Registered] | None = None
        self._registry: SocketServer | None = None
        self.registered = False
        self._plugin = SocketServer(settings.plugin_socket, [self._proxy, *more])

    @contextmanager
    def serving(self, handlers: Handlers, registered: Registered) -> Iterator[None]:
        """The plugin of this process is active inside the block; calls in progress have ended afterwards."""
        self._serving = handlers, registered
        self._proxy.open(handlers)
        try:
            self.offer()
            if self.registered:  # while another instance was active
                self._notify(True, "")
            yield
        finally:
            self._serving = None
            self.drain(STOP_TIMEOUT_SECONDS)

    def drain(self, timeout_s: float) -> bool:
        """Accept no more calls and wait for those in progress; False after ``timeout_s``."""
        self._proxy.close()
        return self._proxy.empty(timeout_s)

    def reopen(self) -> None:
        """Accept calls again if this instance is active."""
        if self._serving is not None:
            self._proxy.open(self._serving[0])

    def offer(self) -> None:
        """Register with the kubelet, which calls the plugin that registered last. Raises EnvironmentFault."""
        with self._lock:
            if self._registry is None:
                settings = self._settings
                self._registry = Registry(settings, self._notify)
                log.info("serving", extra={"driver": settings.driver_name, "socket": str(settings.plugin_socket)})

    def quiet_s(self) -> float:
        """Seconds since the last call."""
        return self._proxy.quiet_s()

    def withdraw(self) -> None:
        """End the registration with the kubelet; calls are still answered."""
        with self._lock:
            registry, self._registry = self._registry, None
        if registry is not None:
            registry.stop()

    def close(self) -> None:
        """Refuse waiting calls, remove the sockets."""
        self.withdraw()
        self._proxy.end()
        self._plugin.stop()

    def _notify(self, accepted: bool, reason: str) -> None:
        self.registered = accepted
        serving = self._serving
        if serving is not None:
            if accepted:
                self._ownership.note_registered()
            serving[1](accepted, reason)
