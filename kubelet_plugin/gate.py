"""What answers the kubelet on a node plugin's socket while the plugin behind it comes and goes.

Open, it lets calls through to the plugin of its own process. Closed, it passes them on, byte for byte, to the process
that is at work on the node (``kubelet_plugin.ownership``), and keeps them waiting while there is none: no call is lost
between two plugins. One that is cut off is tried again, for prepare and unprepare may be repeated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import grpc

from kubelet_plugin import health_service, service

LOOK_S = 0.02
"""Between two looks for who is at work: a pod waits."""

CUT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

CALLS = frozenset(
    f"/{messages.DESCRIPTOR.services_by_name['DRAPlugin'].full_name}/{name}"
    for _, messages in service.VERSIONS
    for name in ("NodePrepareResources", "NodeUnprepareResources")
)
STREAMS = frozenset(
    f"/{messages.DESCRIPTOR.services_by_name['DRAResourceHealth'].full_name}/NodeWatchResources"
    for _, messages in health_service.VERSIONS
)

PASSED_ON = (("tessera-passed-on", "1"),)
"""Metadata of a call that another process has passed on."""

Handlers = Sequence[grpc.GenericRpcHandler]


class Gate(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Thread-safe. ``owner`` is the socket of another process that is at work; None: there is none, or nobody knows."""

    def __init__(self, owner: Callable[[], Path | None], answer_s: float = service.ANSWER_S) -> None:
        self._owner = owner
        self._answer_s = answer_s
        self._changed = threading.Condition()
        self._inner: Handlers | None = None
        self._ended = False
        self._inside = self._present = 0
        self._left_at = time.monotonic()

    def open(self, inner: Handlers) -> None:
        """Let calls through to these handlers, those that wait first."""
        with self._changed:
            self._inner = inner
            self._changed.notify_all()

    def close(self) -> None:
        """Let nothing more through. What is inside goes on."""
        with self._changed:
            self._inner = None
            self._changed.notify_all()

    def empty(self, timeout_s: float) -> bool:
        """Wait until no call is inside; False where one still is after so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._inside, timeout_s)

    def end(self) -> None:
        """Refuse whatever waits and comes: the process ends, and nobody else is there."""
        with self._changed:
            self._ended, self._inner = True, None
            self._changed.notify_all()

    def quiet_s(self) -> float:
        """For how many seconds nobody has called; 0 while a call lasts, wherever it is answered."""
        with self._changed:
            return 0.0 if self._present else time.monotonic() - self._left_at

    def service(self, details: Any) -> Any:
        """gRPC's question who answers a method; requests and answers stay bytes here."""
        if details.method in CALLS:
            return grpc.unary_unary_rpc_method_handler(lambda *call: self._call(details, *call))
        if details.method in STREAMS:
            return grpc.unary_stream_rpc_method_handler(lambda *call: self._stream(details, *call))
        return _handler(self._inner or (), details)  # about this very process: nobody else can answer

    def _call(self, details: Any, request: bytes, context: grpc.ServicerContext) -> bytes:
        with self._changed:
            self._present += 1
        try:
            return self._answer(details, request, context)
        finally:
            with self._changed:
                self._present -= 1
                self._left_at = time.monotonic()

    def _answer(self, details: Any, request: bytes, context: grpc.ServicerContext) -> bytes:
        end = time.monotonic() + min(self._answer_s, context.time_remaining() or self._answer_s)
        while (left := end - time.monotonic()) > 0 and not self._ended:
            inner = self._enter()
            if inner is not None:
                try:
                    return _local(inner, details, request, context)
                finally:
                    self._leave()
            answer = self._elsewhere(details.method, request, context, left)
            if answer is not None:
                return answer
            with self._changed:
                self._changed.wait_for(lambda: self._inner is not None or self._ended, min(left, LOOK_S))
        return _refuse(context, grpc.StatusCode.UNAVAILABLE, "the node plugin ends, and no other has taken over")

    def _enter(self) -> Handlers | None:
        with self._changed:
            self._inside += self._inner is not None
            return self._inner

    def _leave(self) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def _elsewhere(self, method: str, request: bytes, context: grpc.ServicerContext, left: float) -> bytes | None:
        """The answer of the process that is at work; None where there is none, or the call was cut off."""
        owner = self._owner()
        if owner is None:
            return None
        if PASSED_ON[0] in map(tuple, context.invocation_metadata()):
            # It could come back to where a thread waits for it, for as long as it may take where all threads do.
            return _refuse(context, grpc.StatusCode.UNAVAILABLE, "another plugin is at work by now")
        try:
            with connect(owner) as channel:
                answer: bytes = channel.unary_unary(method)(request, timeout=left, metadata=PASSED_ON)
                return answer
        except grpc.RpcError as error:
            if error.code() in CUT:
                return None
            return _refuse(context, error.code(), error.details())

    def _stream(self, details: Any, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Silent while another process is at work: the kubelet hears that one, and forgets all it heard of both when
        either ends."""
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

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _refuse(context: grpc.ServicerContext, code: grpc.StatusCode, details: str) -> NoReturn:
    context.abort(code, details)
    raise AssertionError("abort raises")


def connect(path: Path) -> grpc.Channel:
    """A channel of its own, for channels to one address share their back-off. To be closed."""
    return grpc.insecure_channel(f"unix://{path}", [("grpc.use_local_subchannel_pool", 1)])


def _local(inner: Handlers, details: Any, request: bytes, context: grpc.ServicerContext) -> bytes:
    handler = _handler(inner, details)
    answer: bytes = handler.response_serializer(handler.unary_unary(handler.request_deserializer(request), context))
    return answer


def _handler(inner: Handlers, details: Any) -> Any:
    return next((found for handlers in inner if (found := handlers.service(details)) is not None), None)
