"""Connections to one server: kept between requests, replaced when the server has closed them, or through a proxy."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from driver.connections import Connections
from driver.kube.credentials import ProxiedConnections
from tests.harness.certs import Authority
from tests.support.api_server import Exchange, HttpServer

WAIT_S = 10.0


class Server:
    """Answers with the number of requests on the connection; ``hang_up``: closes it first, after so many of them."""

    def __init__(self) -> None:
        self.hang_up: int | None = None
        self.requests: list[str] = []
        self.connections: list[tuple[str, int]] = []
        self.http = HttpServer(self._answer)

    def _answer(self, exchange: Exchange) -> None:
        self.requests.append(exchange.command)
        self.connections.append(exchange.client_address)
        if self.connections.count(exchange.client_address) == self.hang_up:
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
    pair = authority.issue("server", "server", dns=["api.example"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    with HttpServer(lambda exchange: exchange.send_json({"path": exchange.path})) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
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
