"""Registration with the kubelet, and the gRPC server on a unix socket. Sockets are for root only.

The kubelet watches its plugins_registry directory, calls GetInfo on a socket that appears there, connects
to the endpoint named in the answer, then reports through NotifyRegistrationStatus.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from driver.errors import EnvironmentFault
from kubelet_plugin.dra.health_service import STREAMS
from kubelet_plugin.dra.health_service import VERSIONS as HEALTH_VERSIONS
from kubelet_plugin.dra.protocol.generated import registration_v1_pb2 as messages
from kubelet_plugin.dra.service import VERSION
from kubelet_plugin.settings import NodeSettings

log = logging.getLogger(__name__)

PLUGIN_TYPE = "DRAPlugin"
PARALLEL_CALLS = 16 + STREAMS
"""Maximum gRPC calls in progress: one for each pod that starts or ends, and the streams of device health."""

STOP_TIMEOUT_SECONDS = 20.0
"""Longest time for calls in progress after SIGTERM; a pod's default grace period is 30 s."""

REGISTRATION_TIMEOUT_SECONDS = 15.0
"""A kubelet that watches the directory calls within a second; after this time the log says that none did."""


class Registration:
    """The Registration service. ``registered`` receives the result that the kubelet reports."""

    def __init__(self, driver: str, endpoint: Path, registered: Callable[[bool, str], None]) -> None:
        self._driver = driver
        self._endpoint = endpoint
        self._registered = registered

    def handler(self) -> grpc.GenericRpcHandler:
        service = messages.DESCRIPTOR.services_by_name["Registration"]
        methods = {
            "GetInfo": grpc.unary_unary_rpc_method_handler(
                self._get_info,
                request_deserializer=messages.InfoRequest.FromString,
                response_serializer=messages.PluginInfo.SerializeToString,
            ),
            "NotifyRegistrationStatus": grpc.unary_unary_rpc_method_handler(
                self._notify,
                request_deserializer=messages.RegistrationStatus.FromString,
                response_serializer=messages.RegistrationStatusResponse.SerializeToString,
            ),
        }
        return grpc.method_handlers_generic_handler(service.full_name, methods)

    def _get_info(self, _request: Any, _context: grpc.ServicerContext) -> Any:
        return messages.PluginInfo(
            type=PLUGIN_TYPE,
            name=self._driver,
            endpoint=str(self._endpoint),
            supported_versions=[VERSION, *(name for name, _ in HEALTH_VERSIONS)],
        )

    def _notify(self, status: Any, _context: grpc.ServicerContext) -> Any:
        if status.plugin_registered:
            log.info("registered with the kubelet", extra={"driver": self._driver})
        else:
            log.error("the kubelet refused the registration", extra={"driver": self._driver, "error": status.error})
        self._registered(status.plugin_registered, status.error)
        return messages.RegistrationStatusResponse()


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
    """The registration socket. Logs a warning, once, if no kubelet calls within REGISTRATION_TIMEOUT_SECONDS."""

    def __init__(self, settings: NodeSettings, registered: Callable[[bool, str], None]) -> None:
        """``registered`` receives the result that the kubelet reports. Raises EnvironmentFault."""
        self._registered = registered
        self._kubelet_dir = settings.kubelet_dir
        self._timer = threading.Timer(REGISTRATION_TIMEOUT_SECONDS, self._warn)
        self._timer.daemon, self._timer.name = True, "registration"
        registration = Registration(settings.driver_name, settings.plugin_socket, self._notified)
        super().__init__(settings.registration_socket, [registration.handler()], calls=2)
        self._timer.start()

    def stop(self) -> None:
        self._timer.cancel()
        super().stop()

    def _notified(self, accepted: bool, reason: str) -> None:
        self._timer.cancel()
        self._registered(accepted, reason)

    def _warn(self) -> None:
        log.warning(
            "the kubelet has not registered this plugin: is its --root-dir really %s? (--kubelet-dir)",
            self._kubelet_dir,
        )
