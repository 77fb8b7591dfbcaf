"""The unix sockets on which the kubelet registers and calls the plugin. They are for root only.

The kubelet watches its plugins_registry directory, calls GetInfo on a socket that appears there, connects
to the endpoint named in the answer, then reports through NotifyRegistrationStatus.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc

from driver.errors import EnvironmentFault
from kubelet_plugin.acceptance.session import AcceptanceService
from kubelet_plugin.dra.call_proxy import CallProxy, Handlers
from kubelet_plugin.dra.health_service import MAX_STREAMS, HealthService
from kubelet_plugin.dra.health_service import VERSIONS as HEALTH_VERSIONS
from kubelet_plugin.dra.protocol.generated import registration_v1_pb2 as messages
from kubelet_plugin.dra.service import VERSION, DraService, rpc_handler
from kubelet_plugin.settings import NodeSettings
from kubelet_plugin.step_names import NodeStep, StepRunner
from kubelet_plugin.upgrade.instance_lock import InstanceLock

log = logging.getLogger(__name__)

PLUGIN_TYPE = "DRAPlugin"
PARALLEL_CALLS = 16 + MAX_STREAMS
"""Maximum gRPC calls in progress: one for each pod that starts or ends, and the streams of device health."""

STOP_TIMEOUT_SECONDS = 20.0
"""Longest time for calls in progress after SIGTERM; a pod's default grace period is 30 s."""

REGISTRATION_TIMEOUT_SECONDS = 30.0
"""A kubelet that watches the directory calls within a second; after this time none is expected to."""


Registered = Callable[[bool, str], None]
"""(whether the kubelet accepted the registration, why not); also if none has called for long."""


def serve_kubelet(
    stack: ExitStack,
    settings: NodeSettings,
    sockets: PluginSockets | None,
    services: tuple[DraService, HealthService],
    registered: Registered,
    step: StepRunner,
    acceptance: AcceptanceService | None = None,
) -> None:
    """Register with the kubelet and answer its calls until ``stack`` is unwound. Raises EnvironmentFault.

    ``sockets`` are those of a rolling update; None: the plugin is the only one on its node, and makes its own.
    """
    dra, health = services
    handlers = [dra.handler(), *health.handlers()]
    end_streams = [health.close]
    if acceptance is not None:
        handlers.append(acceptance.handler())
        end_streams.append(acceptance.close)
    stack.callback(dra.close)
    if sockets is not None:
        for end in end_streams:
            stack.callback(end)
        stack.enter_context(sockets.serving(handlers, registered))
        return
    with step(NodeStep.LISTEN):
        plugin = SocketServer(settings.plugin_socket, handlers)
    stack.callback(plugin.stop)
    for end in end_streams:
        stack.callback(end)
    with step(NodeStep.OFFER_REGISTRATION):
        registry = Registry(settings, registered)
    stack.callback(registry.stop)
    log.info("serving", extra={"driver": settings.driver_name, "socket": str(settings.plugin_socket)})


class SocketServer:
    """A gRPC server on one unix socket, removed again by ``stop``."""

    def __init__(self, path: Path, handlers: Sequence[grpc.GenericRpcHandler], calls: int = PARALLEL_CALLS) -> None:
        """Listen on the socket. Raises EnvironmentFault."""
        self._path = path
        self._calls = ThreadPoolExecutor(calls, thread_name_prefix=path.stem)
        self._server = grpc.server(self._calls, handlers=tuple(handlers))
        try:
            path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            # gRPC creates the socket file with the umask's mode; only root may connect.
            previous = os.umask(0o177)
            try:
                self._server.add_insecure_port(f"unix://{path}")
            finally:
                os.umask(previous)
        except (OSError, RuntimeError) as error:
            raise EnvironmentFault(f"can't listen on {path}: {error}; is --kubelet-dir right?") from error
        self._server.start()

    def stop(self) -> None:
        """Refuse new calls, wait for those in progress, remove the socket."""
        self._path.unlink(missing_ok=True)
        self._server.stop(STOP_TIMEOUT_SECONDS).wait()
        self._calls.shutdown(wait=False)
        self._path.unlink(missing_ok=True)


class Registry(SocketServer):
    """The registration socket."""

    def __init__(self, settings: NodeSettings, registered: Registered) -> None:
        """``registered`` receives the result that the kubelet reports, or that none has called within
        REGISTRATION_TIMEOUT_SECONDS. Raises EnvironmentFault."""
        self._settings = settings
        self._registered = registered
        self._timer = threading.Timer(REGISTRATION_TIMEOUT_SECONDS, self._not_called)
        self._timer.daemon, self._timer.name = True, "registration"
        methods = {"GetInfo": self._get_info, "NotifyRegistrationStatus": self._notify}
        super().__init__(settings.registration_socket, [rpc_handler(messages, "Registration", methods)], calls=2)
        self._timer.start()

    def stop(self) -> None:
        self._timer.cancel()
        super().stop()

    def _get_info(self, _request: Any, _context: grpc.ServicerContext) -> Any:
        return messages.PluginInfo(
            type=PLUGIN_TYPE,
            name=self._settings.driver_name,
            endpoint=str(self._settings.plugin_socket),
            supported_versions=[VERSION, *(name for name, _ in HEALTH_VERSIONS)],
        )

    def _notify(self, status: Any, _context: grpc.ServicerContext) -> Any:
        self._timer.cancel()
        extra = {"driver": self._settings.driver_name}
        if status.plugin_registered:
            log.info("registered with the kubelet", extra=extra)
        else:
            log.error("the kubelet refused the registration", extra={**extra, "error": status.error})
        why = "" if status.plugin_registered else f"the kubelet refused the registration: {status.error}"
        self._registered(status.plugin_registered, why)
        return messages.RegistrationStatusResponse()

    def _not_called(self) -> None:
        where = self._settings.kubelet_dir
        why = f"the kubelet has not registered this plugin: is its --root-dir really {where}? (--kubelet-dir)"
        log.warning(why)
        self._registered(False, why)


class PluginSockets:
    """The sockets of a plugin that is part of a rolling update: they outlive its turns as active instance.

    The plugin's socket exists until ``close``, the registration socket from ``offer`` to ``withdraw``.
    """

    def __init__(self, settings: NodeSettings, ownership: InstanceLock, *more: grpc.GenericRpcHandler) -> None:
        """``more`` are further handlers of the plugin's socket. Raises EnvironmentFault."""
        self._settings = settings
        self._ownership = ownership
        self._proxy = CallProxy(ownership.owner)
        self.drain, self.quiet_seconds = self._proxy.drain, self._proxy.quiet_seconds
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
