"""Reporting device health to the kubelet: the DRAResourceHealth service in both versions (KEP-4680)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import grpc

from driver.model.device import Device
from kubelet_plugin.dra.protocol.generated import dra_health_v1_pb2, dra_health_v1alpha1_pb2
from kubelet_plugin.dra.service import rpc_handler

VERSIONS: Sequence[tuple[str, ModuleType]] = (
    ("v1.DRAResourceHealth", dra_health_v1_pb2),
    ("v1alpha1.DRAResourceHealth", dra_health_v1alpha1_pb2),
)
"""Service versions to register with the kubelet, newest first, and their messages."""

RESEND_INTERVAL_SECONDS = 10.0
"""Between two reports without changes: the kubelet shows Unknown after HEALTH_TIMEOUT_SECONDS without one."""

HEALTH_TIMEOUT_SECONDS = 30

MAX_STREAMS = 2
"""Maximum open streams, each a thread of the server: the kubelet may leave an old one open next to a new one."""

MESSAGE_LIMIT = 1024
"""Maximum length of a message; the kubelet truncates longer ones."""


class Stream(threading.Event):
    """One open stream; the event is set after a change and at the end of the stream."""

    over = False

    def end(self) -> None:
        self.over = True
        self.set()


class HealthService:
    """Calls ``devices``, the published devices, and ``unhealthy_reason`` of each device for each message.

    At most MAX_STREAMS are open: a new stream ends the oldest. The server needs that many additional threads.
    """

    def __init__(
        self,
        pool: str,
        devices: Callable[[], Iterable[Device]],
        unhealthy_reason: Callable[[Device], str | None],
        resend_interval_seconds: float = RESEND_INTERVAL_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._pool, self._devices, self._unhealthy_reason = pool, devices, unhealthy_reason
        self._resend_interval_seconds, self._clock = resend_interval_seconds, clock
        self._lock = threading.Lock()
        self._streams: deque[Stream] = deque()
        self._closed = False

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        """One gRPC handler for each protocol version."""
        return [
            rpc_handler(messages, "DRAResourceHealth", {"NodeWatchResources": partial(self._watch, messages)})
            for _, messages in VERSIONS
        ]

    def notify(self) -> None:
        """Report on every stream now. Cheap, from any thread."""
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.set()

    def close(self) -> None:
        """End all streams; new ones end immediately."""
        with self._lock:
            self._closed = True
            streams = list(self._streams)
        for stream in streams:
            stream.end()

    def _watch(self, messages: ModuleType, _request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        stream = self._open()
        try:
            if not context.add_callback(stream.end):  # the kubelet has hung up already
                return
            while not stream.over:
                yield self._message(messages)
                stream.wait(self._resend_interval_seconds)
                stream.clear()
        finally:
            with self._lock:
                self._streams.remove(stream)

    def _open(self) -> Stream:
        stream = Stream()
        with self._lock:
            if self._closed:
                stream.end()
            self._streams.append(stream)
            for old in list(self._streams)[:-MAX_STREAMS]:
                old.end()
        return stream

    def _message(self, messages: ModuleType) -> Any:
        message, now = messages.NodeWatchResourcesResponse(), int(self._clock())
        for device in self._devices():
            reason = self._unhealthy_reason(device)
            message.devices.add(
                device=messages.DeviceIdentifier(pool_name=self._pool, device_name=device.name),
                health=messages.HEALTHY if reason is None else messages.UNHEALTHY,
                last_updated_time=now,
                health_check_timeout_seconds=HEALTH_TIMEOUT_SECONDS,
                message=(reason or "")[:MESSAGE_LIMIT],
            )
        return message
