"""Connections to one server: kept between requests, replaced when the server has closed them, or through a proxy."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import IncompleteRead
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from driver.http_client import Connections
from driver.kube.credentials import ProxiedConnections
from tests.harness.certs import Authority
from tests.support.api_server import Exchange, HttpServer

WAIT_S = 10.0


class Server:
    """Answers with the number of requests on the connection.

    ``hang_up``: closes it first, after so many of them; ``hang_up_at``: at requests of this method.
    ``wait_for``: does not answer before.
    """

    def __init__(self) -> None:
        self.hang_up: int | None = None
        self.hang_up_at: str | None = None
        self.wait_for: threading.Event | None = None
        self.requests: list[str] = []
        self.connections: list[tuple[str, int]] = []
        self.http = HttpServer(self._answer)

    def _answer(self, exchange: Exchange) -> None:
        self.requests.append(exchange.command)
        self.connections.append(exchange.client_address)
        if self.wait_for is not None:
            self.wait_for.wait(WAIT_S)
        if self.connections.count(exchange.client_address) == self.hang_up or exchange.command == self.hang_up_at:
            exchange.cut()
        else:
            exchange.send(200, str(self.connections.count(exchange.client_address)).encode())


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    with server.http:
        yield server


def asked(connections: Connections, method: str = "GET") -> str:
    return connections.open(method, "/", {}, None, WAIT_S).read().decode()


def test_requests_one_after_the_other_use_one_connection(server: Server) -> None:
    connections = Connections(server.http.url)
    assert [asked(connections) for _ in range(3)] == ["1", "2", "3"]


def test_a_request_during_another_uses_a_connection_of_its_own(server: Server) -> None:
    connections = Connections(server.http.url)
    first = connections.open("GET", "/", {}, None, WAIT_S)
    assert asked(connections) == "1"
    first.close()
    assert asked(connections) == "2"


def test_many_threads_share_the_connections(server: Server) -> None:
    connections = Connections(server.http.url)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: asked(connections), range(200)))
    assert len(answers) == 200
    assert len(set(server.connections)) <= 8


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_a_request_is_sent_again_if_the_server_has_closed_the_connection(server: Server, method: str) -> None:
    connections, server.hang_up = Connections(server.http.url), 2
    assert [asked(connections, method) for _ in range(2)] == ["1", "1"]
    assert len(server.requests) == 3


@pytest.mark.parametrize("method", ["POST", "PATCH"])
def test_a_request_that_may_have_been_received_is_not_repeated(server: Server, method: str) -> None:
    connections, server.hang_up = Connections(server.http.url), 2
    assert asked(connections, method) == "1"
    with pytest.raises(ConnectionError):
        asked(connections, method)
    assert server.requests == [method] * 2


def test_a_new_connection_that_is_closed_at_once_is_an_error(server: Server) -> None:
    server.hang_up = 1
    with pytest.raises(ConnectionError):
        asked(Connections(server.http.url))
    assert len(server.requests) == 1


def test_a_connection_that_the_server_closed_while_it_was_idle_is_not_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        connections = Connections(f"http://127.0.0.1:{listening.getsockname()[1]}")
        closed = threading.Event()

        def serve() -> None:
            for _ in range(2):
                with listening.accept()[0] as peer:
                    peer.recv(65536)
                    peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                closed.set()

        thread = threading.Thread(target=serve)
        thread.start()
        assert asked(connections, "POST") == "ok"
        assert closed.wait(WAIT_S)
        assert asked(connections, "POST") == "ok"
        thread.join(WAIT_S)


def read_together(connections: Connections, number: int) -> None:
    """Leave ``number`` idle connections."""
    for response in [connections.open("GET", "/", {}, None, WAIT_S) for _ in range(number)]:
        response.read()


@pytest.mark.parametrize(("method", "times"), [("PUT", 2), ("POST", 1)])
def test_a_request_at_which_the_server_hangs_up_is_not_sent_on_each_idle_connection(
    server: Server, method: str, times: int
) -> None:
    connections = Connections(server.http.url)
    read_together(connections, 5)
    server.hang_up_at = method
    with pytest.raises(ConnectionError):
        asked(connections, method)
    assert server.requests == ["GET"] * 5 + [method] * times
    server.hang_up_at = None
    assert asked(connections, "POST") == "1", "a new connection"


def test_idle_connections_that_died_silently_cost_one_timeout(server: Server) -> None:
    connections, revived = Connections(server.http.url), threading.Event()
    read_together(connections, 3)
    server.wait_for = revived
    with pytest.raises(TimeoutError):
        connections.open("GET", "/", {}, None, 0.05)
    server.wait_for = None
    assert asked(connections) == "1", "a new connection"
    revived.set()


def test_a_server_that_refuses_a_body_before_its_end_is_heard() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def refuse() -> None:
            with listening.accept()[0] as peer:
                peer.recv(1024)
                peer.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")

        thread = threading.Thread(target=refuse)
        thread.start()
        connections = Connections(f"http://127.0.0.1:{listening.getsockname()[1]}")
        response = connections.open("POST", "/", {}, b"x" * 16_000_000, WAIT_S)
        assert (response.status, response.read()) == (413, b"big")
        thread.join(WAIT_S)


def test_a_stream_that_ends_early_is_an_error() -> None:
    def half(exchange: Exchange) -> None:
        exchange.send_response(200)
        exchange.send_header("Content-Length", "10")
        exchange.end_headers()
        exchange.wfile.write(b"ab")
        exchange.cut()

    with HttpServer(half) as server:
        response = Connections(server.url).open("GET", "/", {}, None, WAIT_S)
        chunks = response.stream()
        assert next(chunks) == b"ab"
        with pytest.raises(IncompleteRead):
            next(chunks)
        response.close()


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("https://[fd00::1]", "fd00::1", 443),
        ("https://[fd00::1]:6443", "fd00::1", 6443),
        ("http://[fd00::abcd]", "fd00::abcd", 80),
        ("https://api.example", "api.example", 443),
    ],
)
def test_a_server_without_a_port_is_reached_at_the_port_of_its_scheme(
    monkeypatch: pytest.MonkeyPatch, url: str, host: str, port: int
) -> None:
    reached = []

    def connect(address: tuple[str, int], *_: object) -> socket.socket:
        reached.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(ConnectionRefusedError):
        asked(Connections(url, ssl.create_default_context() if url.startswith("https:") else None))
    assert reached == [(host, port)]


def test_the_certificate_of_a_host_with_a_trailing_dot_names_it_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, connect = Authority(tmp_path), socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda address, *rest: connect(("127.0.0.1", address[1]), *rest))
    with HttpServer(lambda exchange: exchange.send(200, b"ok")) as server:
        server.socket = server_context(authority, "api.example").wrap_socket(server.socket, server_side=True)
        trusted = ssl.create_default_context(cafile=authority.pair.certificate)
        assert asked(Connections(f"https://api.example.:{server.server_address[1]}", trusted)) == "ok"


def test_a_watch_waits_as_long_as_it_is_told_and_a_request_does_not(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        connections = Connections(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(TimeoutError):
            connections.open("GET", "/", {}, None, 0.05)
        with pytest.raises(TimeoutError):
            connections.open("GET", "/", {}, None, WAIT_S, 0.05)


@pytest.mark.parametrize("url", ["https://h", "ftp://h", "h:1", "", "http://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="the address of a server is"):
        Connections(url)


def server_context(authority: Authority, name: str) -> ssl.SSLContext:
    pair = authority.issue("server", "server", dns=[name])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    return context


class Proxy(BaseHTTPRequestHandler):
    """Tunnels, by CONNECT."""

    targets: list[str] = []  # noqa: RUF012 - one test

    def do_CONNECT(self) -> None:
        self.targets.append(self.path)
        with socket.create_connection(("127.0.0.1", int(self.path.rpartition(":")[2]))) as far:
            self.send_response(200)
            self.end_headers()
            back = threading.Thread(target=self._copy, args=(far, self.connection))
            back.start()
            self._copy(self.connection, far)
            back.join()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def log_message(self, *_: object) -> None:
        pass


def test_a_server_behind_a_proxy_answers_under_its_own_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with HttpServer(lambda exchange: exchange.send_json({"path": exchange.path})) as server:
        server.socket = server_context(authority, "api.example").wrap_socket(server.socket, server_side=True)
        with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
            proxy.daemon_threads = True  # it closes while the connection is kept
            threading.Thread(target=proxy.serve_forever, args=(0.01,), daemon=True).start()
            trusted = ssl.create_default_context(cafile=authority.pair.certificate)
            url = f"https://api.example:{urlsplit(server.url).port}/below"
            connections = ProxiedConnections(f"http://127.0.0.1:{proxy.server_address[1]}", url, trusted)
            response = connections.open("GET", "/below/x", {}, None, WAIT_S)
            assert response.read() == b'{"path": "/below/x"}'
            proxy.shutdown()
        assert Proxy.targets == [url.removeprefix("https://").removesuffix("/below")]
