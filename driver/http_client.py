"""Connections to one HTTP server, kept open between requests.

``http.client`` itself: a request through urllib3 takes three times the processor time, and a process that loads it
2 MiB more. Only connections through a proxy need it (``driver.kube.credentials``).
"""

from __future__ import annotations

import select
import ssl
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from http.client import HTTP_PORT, HTTPS_PORT, HTTPConnection, HTTPException, HTTPResponse, IncompleteRead
from urllib.parse import urlsplit

MAX_CONNECTIONS = 16
"""Maximum idle connections: one per thread that makes requests."""

CHUNK_BYTES = 64 * 1024

REPEATABLE = frozenset({"GET", "PUT", "DELETE"})
"""Methods of requests that may be sent again although the server may have received them (RFC 9110, 9.2.2)."""

CONNECTION_ERRORS: tuple[type[Exception], ...] = (OSError, HTTPException)


class _TlsConnection(HTTPConnection):
    default_port = HTTPS_PORT

    def __init__(self, host: str, port: int, timeout: float, context: ssl.SSLContext, server_name: str) -> None:
        super().__init__(host, port, timeout)
        self._context, self._server_name = context, server_name

    def connect(self) -> None:
        super().connect()
        self.sock = self._context.wrap_socket(self.sock, server_hostname=self._server_name)


class Connections:
    """Thread-safe: each connection serves one request at a time."""

    errors: tuple[type[Exception], ...] = CONNECTION_ERRORS
    """What ``open`` raises, and the methods of its response."""

    def __init__(self, url: str, context: ssl.SSLContext | None = None, server_name: str | None = None) -> None:
        """``url``: http(s)://HOST[:PORT]; a path is ignored. ``context`` is needed for https, ``server_name`` is the
        name in the server's certificate (default: HOST). Raises ValueError for another URL."""
        parts = urlsplit(url)
        if not parts.hostname or (parts.scheme, context is None) not in {("http", True), ("https", False)}:
            raise ValueError(f"{url}: the address of a server is http://HOST or https://HOST")
        self._host, self._context = parts.hostname, context
        self._port = parts.port or (HTTP_PORT if context is None else HTTPS_PORT)  # never read from an IPv6 address
        self._server_name = server_name or parts.hostname.rstrip(".")  # certificates name hosts without the last dot
        self._idle: list[HTTPConnection] = []
        weakref.finalize(self, _close_all, self._idle)

    def open(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout_s: float,
        read_timeout_s: float | None = None,
    ) -> Response:
        """Send a request and return the response as soon as its headers have arrived.

        ``timeout_s`` is for connecting and for each wait for data afterwards, together; ``read_timeout_s``, if given,
        for each such wait alone. A request that is REPEATABLE is sent once again, on a new connection, if an idle
        one turns out to be closed. Raises OSError, HTTPException; ValueError for a header or path that cannot be sent.
        """
        message = (method, path, body, headers)
        if (idle := self._take_idle()) is not None:
            try:
                return self._exchange(idle, message, read_timeout_s or timeout_s)
            except (ConnectionError, ssl.SSLError):
                if method not in REPEATABLE:
                    raise
        started = time.monotonic()
        connection = self._new(timeout_s)
        try:
            connection.connect()
        except BaseException:
            connection.close()
            raise
        remaining_s = max(timeout_s - (time.monotonic() - started), timeout_s / 10)
        return self._exchange(connection, message, read_timeout_s or remaining_s)

    def keep(self, connection: HTTPConnection) -> None:
        """Use ``connection`` for later requests: its response has been read."""
        if connection.sock is not None and len(self._idle) < MAX_CONNECTIONS:
            self._idle.append(connection)
        else:
            connection.close()

    def _new(self, timeout_s: float) -> HTTPConnection:
        if self._context is None:
            return HTTPConnection(self._host, self._port, timeout_s)
        return _TlsConnection(self._host, self._port, timeout_s, self._context, self._server_name)

    def _take_idle(self) -> HTTPConnection | None:
        """The connection that was used last and that the server has not closed since."""
        with suppress(IndexError):
            while True:
                connection = self._idle.pop()
                poll = select.poll()
                poll.register(connection.sock, select.POLLIN)
                if not poll.poll(0):
                    return connection
                connection.close()
        return None

    def _exchange(
        self, connection: HTTPConnection, message: tuple[str, str, bytes | None, Mapping[str, str]], timeout_s: float
    ) -> Response:
        try:
            connection.sock.settimeout(timeout_s)
            with suppress(BrokenPipeError, ConnectionResetError):  # a server may refuse a body before it is complete
                connection.request(*message)
            return Response(connection.getresponse(), connection, self)
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):  # the other connections probably lead to the same dead server
                _close_all(self._idle)
            raise


class Response:
    """The response to one request. Exactly one of ``read``, ``stream`` and ``close`` has to be called."""

    def __init__(self, response: HTTPResponse, connection: HTTPConnection, connections: Connections) -> None:
        self.status, self.reason, self.headers = response.status, response.reason, response.headers
        self._response, self._connection, self._connections = response, connection, connections

    def read(self) -> bytes:
        """Read the body. Raises HTTPException if it ends early, and OSError."""
        try:
            body = self._response.read()
        except BaseException:
            self.close()
            raise
        self._connections.keep(self._connection)
        return body

    def stream(self, limit: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Yield the body as it arrives, at most ``limit`` bytes at a time; ``close`` ends it.

        Raises HTTPException if it ends early, and OSError.
        """
        while chunk := self._response.read1(limit):
            yield chunk
        if self._response.length:
            raise IncompleteRead(b"", self._response.length)

    def close(self) -> None:
        """Close the connection: the rest of the body is not needed."""
        self._response.close()
        self._connection.close()


def _close_all(connections: list[HTTPConnection]) -> None:
    with suppress(IndexError):  # other threads take connections, too
        while True:
            connections.pop().close()
