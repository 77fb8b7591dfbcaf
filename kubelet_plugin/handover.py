"""One plugin asks another, over that one's socket, to hand the node over to it.

Only root can: the sockets are. A plugin of a version that knows nothing of this keeps the node until it ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import grpc
import msgspec

from kubelet_plugin.gate import connect

log = logging.getLogger(__name__)

METHOD = "/tessera.node.HandOver/Ask"

ANSWER_S = 40.0
"""How long claims in work, and then the writers, may take to end."""


class HandOver(StrEnum):
    """The steps of a hand-over, in order: the newcomer's and, between, those of the plugin that it replaces."""

    ASK = "ask"
    FINISH_CLAIMS = "finish-claims"
    STOP_WRITING = "stop-writing"
    RELEASE = "release"
    TAKE = "take"
    RECOVER = "recover"
    LEAVE = "leave"


class Said(StrEnum):
    """``HANDED_OVER``: the node is free. ``NOT_YET``: ask again. ``UNABLE``: not before it ends."""

    HANDED_OVER = "handed-over"
    NOT_YET = "not-yet"
    UNABLE = "unable"
    SILENT = "silent"


class Request(msgspec.Struct, frozen=True):
    """Who asks; a field that another version adds is skipped."""

    socket: str
    version: str = ""


class Answer(msgspec.Struct, frozen=True):
    """``why``: for people."""

    said: Said
    why: str = ""


REQUEST, ANSWER = msgspec.json.Decoder(Request), msgspec.json.Decoder(Answer)


def handler(hand_over: Callable[[Request], Answer]) -> grpc.GenericRpcHandler:
    """What answers ``ask``."""

    def answer(request: bytes, _context: grpc.ServicerContext) -> bytes:
        return msgspec.json.encode(hand_over(REQUEST.decode(request)))

    return _Handler(answer)


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, answer: Callable[[bytes, grpc.ServicerContext], bytes]) -> None:
        self._answer = answer

    def service(self, details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._answer) if details.method == METHOD else None


def ask(owner: Path, own: Path, version: str) -> Answer:
    """Ask the plugin at the socket ``owner`` to hand over to the one at ``own``."""
    try:
        with connect(owner) as channel:
            request = msgspec.json.encode(Request(str(own), version))
            return ANSWER.decode(channel.unary_unary(METHOD)(request, timeout=ANSWER_S))
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return Answer(Said.UNABLE, "it is of a version, or runs with settings, that can't")
        return Answer(Said.SILENT, f"{error.code().name}: {error.details()}")
    except msgspec.MsgspecError as error:
        return Answer(Said.UNABLE, f"it answers what this version can't read: {error}")
