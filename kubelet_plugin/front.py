"""A node plugin's sockets, where they outlive the plugin behind them: two plugins of one node take turns."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from driver.config.settings import NodeSettings
from kubelet_plugin.gate import Gate, Handlers
from kubelet_plugin.ownership import Ownership
from kubelet_plugin.registration import STOP_GRACE_S, Registry, SocketServer

log = logging.getLogger(__name__)

Registered = Callable[[bool, str], None]
"""(whether the kubelet took it, why not)."""


class Front:
    """The plugin's socket from when it is made until ``close``, the registration socket from ``offer`` on."""

    def __init__(self, settings: NodeSettings, ownership: Ownership, *more: grpc.GenericRpcHandler) -> None:
        """``more`` is answered on the plugin's socket, too. Raises EnvironmentFault where it can't be made."""
        self._settings = settings
        self._ownership = ownership
        self._gate = Gate(ownership.owner)
        self._lock = threading.Lock()
        self._answering: tuple[Handlers, Registered] | None = None
        self._registry: SocketServer | None = None
        self.registered = False
        self._plugin = SocketServer(settings.plugin_socket, [self._gate, *more])

    @contextmanager
    def answering(self, handlers: Handlers, registered: Registered) -> Iterator[None]:
        """The plugin of this process is at work inside the block; claims in work have ended when it has."""
        self._answering = handlers, registered
        self._gate.open(handlers)
        try:
            self.offer()
            if self.registered:  # while another was at work
                self._heard(True, "")
            yield
        finally:
            self._answering = None
            self.emptied(STOP_GRACE_S)

    def emptied(self, timeout_s: float) -> bool:
        """Let no call through; False where one is still being worked on after so many seconds."""
        self._gate.close()
        return self._gate.empty(timeout_s)

    def reopen(self) -> None:
        """Let calls through again, where somebody answers them."""
        if self._answering is not None:
            self._gate.open(self._answering[0])

    def offer(self) -> None:
        """Make the plugin known to the kubelet, which calls whom it met last. Raises EnvironmentFault."""
        with self._lock:
            if self._registry is None:
                settings = self._settings
                self._registry = Registry(settings, self._heard)
                log.info("serving", extra={"driver": settings.driver_name, "socket": str(settings.plugin_socket)})

    def quiet_s(self) -> float:
        """For how many seconds nobody has called."""
        return self._gate.quiet_s()

    def withdraw(self) -> None:
        """Let the kubelet forget this plugin; calls are answered all the same."""
        with self._lock:
            registry, self._registry = self._registry, None
        if registry is not None:
            registry.stop()

    def close(self) -> None:
        """Refuse what still waits, remove the sockets."""
        self.withdraw()
        self._gate.end()
        self._plugin.stop()

    def _heard(self, accepted: bool, reason: str) -> None:
        self.registered = accepted
        answering = self._answering
        if answering is not None:
            if accepted:
                self._ownership.note_registered()
            answering[1](accepted, reason)
