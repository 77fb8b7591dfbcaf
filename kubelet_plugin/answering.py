"""Whether a call over the plugin's socket is answered, tried as a client would.

By hand: gRPC's client would cost the process 2.5 MiB for this one question. What is sent is one call of
``grpc.health.v1.Health/Check`` in HTTP/2 (RFC 9113) with headers that need no table of their own (HPACK, RFC 7541).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from kubelet_plugin.grpc_health import LIVENESS, SERVICE
from kubelet_plugin.protocol.generated import grpc_health_v1_pb2 as messages

PATIENCE_S = 60.0
"""The socket's threads may all be kept by GPUs that hang, each for the 40 s after which a call is answered anyhow."""

CALL_S = 3.0

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0x0, 0x1, 0x4
END_STREAM, END_HEADERS = 0x1, 0x4
STREAM = 1
FRAME_HEAD = 9

POST, HTTP = b"\x83", b"\x86"
"""``:method: POST`` and ``:scheme: http`` as entries of the static table."""

PATH, AUTHORITY, CONTENT_TYPE, NEW_NAME = b"\x04", b"\x01", b"\x0f\x10", b"\x00"
"""Names of headers, of which the value follows: by their places in the static table, and one that has none."""


class Answering:
    """Asks at each look; a socket that has not answered for PATIENCE_S is the reason."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._answered_at = clock()

    def look(self) -> str | None:
        try:
            ask(self._path)
        except OSError as error:
            silent = self._clock() - self._answered_at
            return None if silent <= PATIENCE_S else f"{self._path} has not answered for {silent:.0f} s: {error}"
        self._answered_at = self._clock()
        return None


def ask(path: Path) -> None:
    """Return when the call was answered, whatever the answer. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(CALL_S)
        connection.connect(str(path))
        connection.sendall(_call())
        with connection.makefile("rb") as answer:
            while _next_frame(answer) != (HEADERS, STREAM):
                pass


def _call() -> bytes:
    message = messages.HealthCheckRequest(service=LIVENESS).SerializeToString()
    headers = POST + HTTP + PATH + _text(f"/{SERVICE}/Check") + AUTHORITY + _text("localhost")
    headers += CONTENT_TYPE + _text("application/grpc") + NEW_NAME + _text("te") + _text("trailers")
    uncompressed = b"\x00" + len(message).to_bytes(4, "big")
    return b"".join(
        (
            PREFACE,
            _frame(SETTINGS, 0, 0, b""),
            _frame(HEADERS, END_HEADERS, STREAM, headers),
            _frame(DATA, END_STREAM, STREAM, uncompressed + message),
        )
    )


def _text(value: str) -> bytes:
    """As it is; shorter than 127 characters, so that one byte says how long."""
    return len(value).to_bytes(1, "big") + value.encode()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    head = (len(payload).to_bytes(3, "big"), bytes((kind, flags)), stream.to_bytes(4, "big"))
    return b"".join((*head, payload))


def _next_frame(answer: BinaryIO) -> tuple[int, int]:
    """Kind and stream of the next frame."""
    head = answer.read(FRAME_HEAD)
    if len(head) < FRAME_HEAD:
        raise ConnectionResetError("the connection was closed")
    answer.read(int.from_bytes(head[:3], "big"))
    return head[3], int.from_bytes(head[5:], "big")
