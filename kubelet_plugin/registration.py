"""Making the plugin known to the kubelet: two unix sockets, both for root only.

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

from driver.config.settings import NodeSettings
from driver.errors import EnvironmentFault
from kubelet_plugin.health_service import STREAMS
from kubelet_plugin.health_service import VERSIONS as HEALTH_VERSIONS
from kubelet_plugin.protocol.generated import registration_v1_pb2 as messages
from kubelet_plugin.service import VERSIONS

log = logging.getLogger(__name__)

PLUGIN_TYPE = "DRAPlugin"
CALLS_AT_ONCE = 16 + STREAMS
"""gRPC calls served at once: the kubelet makes one for each pod that starts or ends, and keeps one open to hear how
devices are."""

STOP_GRACE_S = 20.0
"""How long calls in progress may go on after SIGTERM; a pod's default grace period is 30 s."""

SILENT_S = 15.0
"""A kubelet that watches the directory calls within a second."""


class Registration:
    """The Registration service. ``registered`` is called with the outcome the kubelet reports."""

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
            supported_versions=[name for name, _ in (*VERSIONS, *HEALTH_VERSIONS)],
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

    def __init__(self, path: Path, handlers: Sequence[grpc.GenericRpcHandler], calls: int = CALLS_AT_ONCE) -> None:
        """Listens when this returns. Raises EnvironmentFault where the socket can't be made."""
        self._path = path
        self._calls = ThreadPoolExecutor(calls, thread_name_prefix=path.stem)
        self._server = grpc.server(self._calls, handlers=tuple(handlers))
        try:
            path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            # gRPC creates the socket file with the umask's mode; nobody but root may connect.
            previous = os.umask(0o177)
            try:
                self._server.add_insecure_port(f"unix://{path}")
            finally:
                os.umask(previous)
        except (OSError, RuntimeError) as error:
            raise EnvironmentFault(f"can't listen on {path}: {error}; is --kubelet-dir right?") from error
        self._server.start()

    def stop(self) -> None:
        """Refuse new calls, let running ones end, remove the socket."""
        self._path.unlink(missing_ok=True)
        self._server.stop(STOP_GRACE_S).wait()
        self._calls.shutdown(wait=False)
        self._path.unlink(missing_ok=True)


class Registry(SocketServer):
    """The registration socket. Where no kubelet comes to it within SILENT_S the log says so, once."""

    def __init__(self, settings: NodeSettings, registered: Callable[[bool, str], None]) -> None:
        """``registered`` is called with the outcome the kubelet reports. Raises EnvironmentFault."""
        self._registered = registered
        self._kubelet_dir = settings.kubelet_dir
        self._silence = threading.Timer(SILENT_S, self._tell)
        self._silence.daemon, self._silence.name = True, "registration"
        registration = Registration(settings.driver_name, settings.plugin_socket, self._heard)
        super().__init__(settings.registration_socket, [registration.handler()], calls=2)
        self._silence.start()

    def stop(self) -> None:
        self._silence.cancel()
        super().stop()

    def _heard(self, accepted: bool, reason: str) -> None:
        self._silence.cancel()
        self._registered(accepted, reason)

    def _tell(self) -> None:
        log.warning(
            "the kubelet has not registered this plugin: is its --root-dir really %s? (--kubelet-dir)",
            self._kubelet_dir,
        )
