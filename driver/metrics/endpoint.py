"""``GET /metrics`` over HTTP, from a thread of its own."""

from __future__ import annotations

import logging
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from driver.config.listen import ListenAddress
from driver.errors import EnvironmentFault

log = logging.getLogger(__name__)

PATH = "/metrics"
TEXT = "text/plain; charset=utf-8"
IDLE_S = 10.0
"""A client that is slower than that loses its connection, and with it our thread."""


class MetricsEndpoint:
    """Serves ``registry`` from when it is made until ``close``; ``address`` has the port that was taken."""

    def __init__(self, registry: CollectorRegistry, address: ListenAddress) -> None:
        """Raises EnvironmentFault where the address can't be had."""
        try:
            self._server = _Server(registry, address)
        except (OSError, UnicodeError) as error:  # the latter for a name that is none
            reason = getattr(error, "strerror", None) or error
            raise EnvironmentFault(
                f"--metrics-address {address}: can't listen there: {reason}; "
                "name an address of this machine and a port that nobody uses"
            ) from error
        self.address = ListenAddress(address.host, self._server.server_address[1])
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="metrics")
        self._thread.start()
        log.info("serving metrics", extra={"address": str(self.address), "path": PATH})

    def close(self) -> None:
        """The port is free when this returns; answers under way are finished or cut off."""
        self._closed.set()
        self._server.socket.shutdown(socket.SHUT_RDWR)  # whoever waits for a connection hears of it
        self._thread.join()
        self._server.server_close()

    def _serve(self) -> None:
        """The library's own loop would look twice a second whether it is to end."""
        while not self._closed.is_set():
            self._server.handle_request()


class _Server(ThreadingTCPServer):
    """Not the library's HTTPServer, which asks DNS for the host's name before it listens."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, registry: CollectorRegistry, address: ListenAddress) -> None:
        self.registry = registry
        self.every_address = not address.host
        self.address_family = _family(address)
        super().__init__(("::" if self._dual_stack else address.host, address.port), _Handler)

    @property
    def _dual_stack(self) -> bool:
        return self.every_address and self.address_family == socket.AF_INET6

    def server_bind(self) -> None:
        if self._dual_stack:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is its own business."""
        log.debug("a scrape was cut off", extra={"client": str(client_address)}, exc_info=True)


def _family(address: ListenAddress) -> socket.AddressFamily:
    if not address.host:
        return socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    return socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = IDLE_S
    server_version = "tessera"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        encoder, content_type = choose_encoder(self.headers.get("Accept", ""))
        try:
            body = encoder(self.server.registry)
        except Exception as error:
            log.exception("defect while collecting metrics")
            reason = f"internal error, please report it: {type(error).__name__}: {error}\n"
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, TEXT, reason.encode())
            return
        self._send(HTTPStatus.OK, content_type, body)

    def send_error(self, code: int, *_: object) -> None:
        """Also called for every other method; the library's own answer would be a page of HTML."""
        status = HTTPStatus.NOT_FOUND if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        self._send(status, TEXT, b"only GET /metrics is answered\n")

    def _send(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """A scrape every few seconds is no news."""
