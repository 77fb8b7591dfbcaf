"""A few pages over HTTP, GET only, from a thread of their own: what a process tells of itself to programs."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from urllib.parse import parse_qs

from driver.config.listen import ListenAddress
from driver.errors import EnvironmentFault

log = logging.getLogger(__name__)

TEXT = "text/plain; charset=utf-8"
IDLE_S = 10.0
"""A client that is slower than that loses its connection, and with it our thread."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a page may look at: the query's keys, and which content types the client takes."""

    keys: frozenset[str]
    accept: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    status: HTTPStatus
    body: bytes
    content_type: str = TEXT


Page = Callable[[Question], Reply]
"""Called by a thread of its own for each request; what it raises is told as a defect and ends nothing."""


class Endpoint:
    """Serves ``pages`` by path from when it is made until ``close``; ``address`` has the port that was taken."""

    def __init__(self, pages: Mapping[str, Page], address: ListenAddress, flag: str) -> None:
        """``flag`` gave the address. Raises EnvironmentFault where it can't be had."""
        try:
            self._server = _Server(pages, address)
        except (OSError, UnicodeError) as error:  # the latter for a name that is none
            reason = getattr(error, "strerror", None) or error
            raise EnvironmentFault(
                f"{flag} {address}: can't listen there: {reason}; "
                "name an address of this machine and a port that nobody uses"
            ) from error
        self.address = ListenAddress(address.host, self._server.server_address[1])
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="web")
        self._thread.start()
        log.info("serving over HTTP", extra={"address": str(self.address), "paths": ",".join(sorted(pages))})

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

    def __init__(self, pages: Mapping[str, Page], address: ListenAddress) -> None:
        self.pages = pages
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
        log.debug("a request was cut off", extra={"client": str(client_address)}, exc_info=True)


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
        path, _, query = self.path.partition("?")
        page = self.server.pages.get(path)
        if page is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        keys = frozenset(parse_qs(query, keep_blank_values=True))
        try:
            reply = page(Question(keys, self.headers.get("Accept", "")))
        except Exception as error:
            log.exception("defect while answering over HTTP")
            reason = f"internal error, please report it: {type(error).__name__}: {error}\n"
            reply = Reply(HTTPStatus.INTERNAL_SERVER_ERROR, reason.encode())
        self._send(reply)

    def send_error(self, code: int, *_: object) -> None:
        """Also called for every other method; the library's own answer would be a page of HTML."""
        status = HTTPStatus.NOT_FOUND if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        paths = ", ".join(sorted(self.server.pages))
        self._send(Reply(status, f"only GET {paths} is answered\n".encode()))

    def _send(self, reply: Reply) -> None:
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        self.wfile.write(reply.body)

    def log_message(self, *_: object) -> None:
        """A request every few seconds is no news."""
