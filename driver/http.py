"""HTTP endpoints of a process: /metrics, /livez and /readyz, answered by a thread of their own (GET only)."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from urllib.parse import parse_qs

from driver.config.flag_values import ListenAddress
from driver.errors import EnvironmentFault

log = logging.getLogger(__name__)

TEXT = "text/plain; charset=utf-8"

CLIENT_TIMEOUT_SECONDS = 10.0
"""A slower client loses its connection, so that it does not keep a thread."""

LIVE, READY = "livez", "readyz"
VERBOSE = "verbose"


@dataclass(frozen=True, slots=True)
class PageRequest:
    """The parts of a request that a page may depend on: the keys of the query and the Accept header."""

    keys: frozenset[str]
    accept: str


@dataclass(frozen=True, slots=True)
class Reply:
    status: HTTPStatus
    body: bytes
    content_type: str = TEXT


Page = Callable[[PageRequest], Reply]
"""Called for each request, by a thread of that request; an exception is logged and answered with status 500."""


@dataclass(frozen=True, slots=True)
class Check:
    """A named health check. ``failure`` returns the reason why it fails, or None; it is called for each request.

    A liveness check fails if a restart would help; a readiness check fails while others must not rely on the process.
    """

    name: str
    failure: Callable[[], str | None]


def _failure(check: Check) -> str | None:
    """Why the check fails, or None; an exception in it counts as its failure."""
    try:
        return check.failure()
    except Exception as error:
        log.exception("defect in a health check", extra={"check": check.name})
        return f"internal error, please report it: {type(error).__name__}: {error}"


def health_pages(live: Sequence[Check], ready: Sequence[Check]) -> Mapping[str, Page]:
    """``/livez`` and ``/readyz`` as Kubernetes' own components serve them.

    200 if every check passes, else 503 with the result of each; ``?verbose`` shows the results in any case.
    """
    return {f"/{LIVE}": _health_page(LIVE, live), f"/{READY}": _health_page(READY, ready)}


def _health_page(name: str, checks: Sequence[Check]) -> Page:
    def answer(request: PageRequest) -> Reply:
        failures = {check.name: _failure(check) for check in checks}
        passed = not any(failures.values())
        if passed and VERBOSE not in request.keys:
            return Reply(HTTPStatus.OK, b"ok")
        lines = [f"[-]{failing} failed: {why}" if why else f"[+]{failing} ok" for failing, why in failures.items()]
        lines.append(f"{name} check {'passed' if passed else 'failed'}")
        body = "".join(f"{line}\n" for line in lines).encode()
        return Reply(HTTPStatus.OK if passed else HTTPStatus.SERVICE_UNAVAILABLE, body)

    return answer


PageSet = tuple[str, ListenAddress | None, Callable[[], Mapping[str, Page]]]
"""The flag that sets the address, the address (None: not served), and a function that makes the pages."""


def serve(stack: ExitStack, page_sets: Iterable[PageSet]) -> None:
    """Serve pages until ``stack`` is unwound, with one server per address.

    Raises EnvironmentFault if an address can't be listened on.
    """
    pages_by_address: dict[ListenAddress, dict[str, Page]] = {}
    flags: dict[ListenAddress, list[str]] = {}
    for flag, address, pages in page_sets:
        if address is not None:
            pages_by_address.setdefault(address, {}).update(pages())
            flags.setdefault(address, []).append(flag)
    for address, pages_there in pages_by_address.items():
        stack.callback(Endpoint(pages_there, address, " and ".join(flags[address])).close)


class Endpoint:
    """An HTTP server for ``pages`` by path, from construction until ``close``; ``address`` has the actual port."""

    def __init__(self, pages: Mapping[str, Page], address: ListenAddress, flag: str) -> None:
        """``flag`` names the setting of the address. Raises EnvironmentFault if the address can't be listened on."""
        try:
            self._server = _Server(pages, address)
        except (OSError, UnicodeError) as error:  # UnicodeError: not a host name
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
        """Stop serving. The port is free when this returns; responses in progress are finished or cut off."""
        self._closed.set()
        self._server.socket.shutdown(socket.SHUT_RDWR)  # ends the wait for a connection
        self._thread.join()
        self._server.server_close()

    def _serve(self) -> None:
        """Handle requests until closed; the library's own loop would wake up twice a second."""
        while not self._closed.is_set():
            self._server.handle_request()


class _Server(ThreadingTCPServer):
    """Not the library's HTTPServer, which resolves the host name by DNS before it listens."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, pages: Mapping[str, Page], address: ListenAddress) -> None:
        self.pages = pages
        self.address_family = _family(address)
        self._dual_stack = not address.host and self.address_family == socket.AF_INET6
        super().__init__(("::" if self._dual_stack else address.host, address.port), _Handler)

    def server_bind(self) -> None:
        if self._dual_stack:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def handle_error(self, request: object, client_address: object) -> None:
        """Log at debug level only: clients may close a connection at any time."""
        log.debug("a request was cut off", extra={"client": str(client_address)}, exc_info=True)


def _family(address: ListenAddress) -> socket.AddressFamily:
    if not address.host:
        return socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    return socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = CLIENT_TIMEOUT_SECONDS
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
            reply = page(PageRequest(keys, self.headers.get("Accept", "")))
        except Exception as error:
            log.exception("defect while answering over HTTP")
            reason = f"internal error, please report it: {type(error).__name__}: {error}\n"
            reply = Reply(HTTPStatus.INTERNAL_SERVER_ERROR, reason.encode())
        self._send(reply)

    def send_error(self, code: int, *_: object) -> None:
        """Also called for every other method. The library's own response would be an HTML page."""
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
        """Do not log requests: probes and scrapes arrive every few seconds."""
