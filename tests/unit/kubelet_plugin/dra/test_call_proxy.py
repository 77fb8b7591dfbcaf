"""What answers the kubelet while node plugins take turns, between two processes' sockets."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import pytest

from kubelet_plugin.dra.call_proxy import CALLS, TEST, CallProxy, connect
from kubelet_plugin.dra.kubelet_sockets import SocketServer
from tests.harness.waiting import wait_for

METHOD = min(CALLS)
THREADS = 2
"""Of each process: a node that starts many pods at once needs all that it has."""
SOON_S = 20.0
"""Far less than a call may take."""


class Plugin(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers every call with its name."""

    def __init__(self, name: bytes) -> None:
        self._name = name

    def service(self, _details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(
            lambda _request, _context: self._name, lambda data: data, lambda data: data
        )


class Process:
    """A proxy behind its socket; ``owner`` is what it takes for the socket of who is at work elsewhere."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.owner: Path | None = None
        self.proxy = CallProxy(lambda: self.owner)
        self.server = SocketServer(path, [self.proxy], calls=THREADS)

    def close(self) -> None:
        self.proxy.end()
        self.server.stop()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[tuple[Process, Process]]:
    with ExitStack() as stack:
        found = [Process(tmp_path / name) for name in ("old", "new")]
        for process in found:
            stack.callback(process.close)
        yield found[0], found[1]


def test_as_many_calls_as_there_are_threads_survive_that_the_node_changes_hands(
    processes: tuple[Process, Process],
) -> None:
    """They reach the newcomer, which passes them on to the old plugin, and that one hands the node over just then."""
    old, new = processes
    new.owner = old.path
    with ThreadPoolExecutor(THREADS) as pool, connect(new.path) as channel:
        call = channel.unary_unary(METHOD)
        answers = [pool.submit(call, b"", timeout=SOON_S) for _ in range(THREADS)]
        wait_for(lambda: old.proxy.quiet_seconds() == 0.0, 10, "a call has come through")
        new.owner, old.owner = None, new.path
        new.proxy.open([Plugin(b"new")])
        assert [answer.result() for answer in answers] == [b"new"] * THREADS


class LongTest(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Says that a test has begun, and ends it once it may."""

    def __init__(self) -> None:
        self.may_end = Event()

    def service(self, _details: Any) -> Any:
        return grpc.unary_stream_rpc_method_handler(self._test, bytes, bytes)

    def _test(self, _request: bytes, _context: grpc.ServicerContext) -> Iterator[bytes]:
        yield b"begun"
        self.may_end.wait(SOON_S)
        yield b"ended"


def test_a_test_that_ends_during_a_hand_over_is_not_started_again(processes: tuple[Process, Process]) -> None:
    old, tester = processes[0], LongTest()
    old.proxy.open([tester])
    with connect(old.path) as channel:
        messages = channel.unary_stream(TEST)(b"", timeout=SOON_S)
        assert next(messages) == b"begun"
        assert old.proxy.drain(SOON_S)
        tester.may_end.set()
        assert list(messages) == [b"ended"]


@pytest.mark.parametrize(
    ("handlers", "code"), [(None, grpc.StatusCode.UNAVAILABLE), ([], grpc.StatusCode.UNIMPLEMENTED)]
)
def test_an_instance_that_cannot_test_refuses_it_at_once(
    processes: tuple[Process, Process], handlers: list[grpc.GenericRpcHandler] | None, code: grpc.StatusCode
) -> None:
    if handlers is not None:
        processes[0].proxy.open(handlers)
    with connect(processes[0].path) as channel, pytest.raises(grpc.RpcError) as refused:
        list(channel.unary_stream(TEST)(b"", timeout=SOON_S))
    assert refused.value.code() is code
