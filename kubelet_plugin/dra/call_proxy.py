"""Answers the kubelet on a node plugin's socket while the active instance changes.

Open, it hands calls to the plugin of its own process. Closed, it forwards them, byte for byte, to the active instance
of the node (``kubelet_plugin.upgrade.instance_lock``), and holds them while there is none: no call is lost between two
instances. A call that is cut off is repeated, because prepare and unprepare may be repeated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import grpc

from kubelet_plugin.acceptance import protocol
from kubelet_plugin.dra import health_service, service

OWNER_CHECK_INTERVAL_SECONDS = 0.02
"""Between two checks which instance is active: a pod waits."""

CANCELLED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

CALLS = frozenset(f"/{service.SERVICE}/{name}" for name in ("NodePrepareResources", "NodeUnprepareResources"))
HEALTH_STREAMS = frozenset(
    f"/{messages.DESCRIPTOR.services_by_name['DRAResourceHealth'].full_name}/NodeWatchResources"
    for _, messages in health_service.VERSIONS
)

TEST = f"/{protocol.SERVICE}/{protocol.METHOD}"

FORWARDED = (("tessera-passed-on", "1"),)
"""Metadata of a call that another process has forwarded."""

Handlers = Sequence[grpc.GenericRpcHandler]


class CallProxy(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Thread-safe. ``owner`` returns the socket of the active instance; None: this process, none, or unknown."""

    def __init__(self, owner: Callable[[], Path | None]) -> None:
        self._owner = owner
        self._changed = threading.Condition()
        self._inner: Handlers | None = None
        self._ended = False
        self._in_progress = self._calls = 0
        self._answered_at = time.monotonic()

    def open(self, inner: Handlers) -> None:
        """Give calls to these handlers, waiting ones first."""
        with self._changed:
            self._inner = inner
            self._changed.notify_all()

    def drain(self, timeout_seconds: float) -> bool:
        """Give no more calls to the handlers and wait for those in progress; False after ``timeout_seconds``."""
        with self._changed:
            self._inner = None
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._in_progress, timeout_seconds)

    def end(self) -> None:
        """Refuse waiting and new calls: the process ends, and no other instance exists."""
        with self._changed:
            self._ended, self._inner = True, None
            self._changed.notify_all()

    def quiet_seconds(self) -> float:
        """Seconds since the last call; 0 during a call, wherever it is answered."""
        with self._changed:
            return 0.0 if self._calls else time.monotonic() - self._answered_at

    def service(self, details: Any) -> Any:
        """Return the handler of a method, as gRPC requires; requests and answers stay bytes here."""
        if details.method in CALLS:
            return grpc.unary_unary_rpc_method_handler(lambda *call: self._call(details, *call))
        if details.method in HEALTH_STREAMS:
            return grpc.unary_stream_rpc_method_handler(lambda *call: self._stream(details, *call))
        if details.method == TEST:
            return grpc.unary_stream_rpc_method_handler(lambda *call: self._test(details, *call))
        return None

    def _call(self, details: Any, request: bytes, context: grpc.ServicerContext) -> bytes:
        with self._changed:
            self._calls += 1
        try:
            return self._answer(details, request, context)
        finally:
            with self._changed:
                self._calls -= 1
                self._answered_at = time.monotonic()

    def _answer(self, details: Any, request: bytes, context: grpc.ServicerContext) -> bytes:
        limit = service.ANSWER_TIMEOUT_SECONDS
        end = time.monotonic() + min(limit, context.time_remaining() or limit)
        while (left := end - time.monotonic()) > 0 and not self._ended:
            with self._changed:
                inner = self._inner
                self._in_progress += inner is not None
            if inner is not None:
                try:
                    handler = _handler(inner, details)
                    message = handler.request_deserializer(request)
                    local: bytes = handler.response_serializer(handler.unary_unary(message, context))
                    return local
                finally:
                    with self._changed:
                        self._in_progress -= 1
                        self._changed.notify_all()
            answer = self._forward(details.method, request, context, left)
            if answer is not None:
                return answer
            with self._changed:
                self._changed.wait_for(
                    lambda: self._inner is not None or self._ended, min(left, OWNER_CHECK_INTERVAL_SECONDS)
                )
        return _refuse(context, grpc.StatusCode.UNAVAILABLE, "the node plugin ends, and no other has taken over")

    def _forward(self, method: str, request: bytes, context: grpc.ServicerContext, left: float) -> bytes | None:
        """Forward to the active instance. Return its answer; None if there is none or the connection was lost."""
        owner = self._owner()
        if owner is None:
            return None
        if FORWARDED[0] in map(tuple, context.invocation_metadata()):
            # It could return to the process that waits for it, and two processes would block all their threads.
            return _refuse(context, grpc.StatusCode.UNAVAILABLE, "another plugin is at work by now")
        try:
            with connect(owner) as channel:
                answer: bytes = channel.unary_unary(method)(request, timeout=left, metadata=FORWARDED)
                return answer
        except grpc.RpcError as error:
            if error.code() in CANCELLED:
                return None
            return _refuse(context, error.code(), error.details())

    def _stream(self, details: Any, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Send nothing while another instance is active: the kubelet has a stream to that one, too, and forgets the
        health of all devices when either ends."""
        if not context.add_callback(self._wake):
            return
        while context.is_active() and not self._ended:
            with self._changed:
                self._changed.wait_for(lambda: self._inner or self._ended or not context.is_active())
                inner = self._inner
            if inner is None:
                continue
            handler = _handler(inner, details)
            for message in handler.unary_stream(handler.request_deserializer(request), context):
                yield handler.response_serializer(message)
            if self._inner is inner:
                return  # the plugin has ended it

    def _test(self, details: Any, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Start a test now, once, and only here: one that waits for another instance would begin unasked."""
        inner = self._inner
        if inner is None:
            _refuse(context, grpc.StatusCode.UNAVAILABLE, "no node plugin is active at this socket; try again")
        handler = _handler(inner, details)
        if handler is None:
            _refuse(context, grpc.StatusCode.UNIMPLEMENTED, "the node plugin can't test GPUs at present")
        for message in handler.unary_stream(handler.request_deserializer(request), context):
            yield handler.response_serializer(message)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _refuse(context: grpc.ServicerContext, code: grpc.StatusCode, details: str) -> NoReturn:
    context.abort(code, details)
    raise AssertionError("abort raises")


def connect(path: Path) -> grpc.Channel:
    """A channel of its own, for channels to one address share their back-off. To be closed."""
    return grpc.insecure_channel(f"unix://{path}", [("grpc.use_local_subchannel_pool", 1)])


def _handler(inner: Handlers, details: Any) -> Any:
    return next((found for handlers in inner if (found := handlers.service(details)) is not None), None)
