"""The RPC by which a new plugin asks the active one, over its socket, to hand over the node.

Only root can open the socket. A plugin whose version lacks the RPC keeps the node until it ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import grpc
import msgspec

from kubelet_plugin.dra.call_proxy import connect

log = logging.getLogger(__name__)

SERVICE, METHOD = "tessera.node.HandOver", "Ask"

ANSWER_TIMEOUT_SECONDS = 40.0
"""Covers the end of the claims in progress and then of the writers."""


class HandOver(StrEnum):
    """The steps of a hand-over in order: those of the new plugin and, in between, those of the active one."""

    ASK = "ask"
    FINISH_CLAIMS = "finish-claims"
    STOP_WRITING = "stop-writing"
    RELEASE = "release"
    TAKE = "take"
    RECOVER = "recover"
    LEAVE = "leave"


class HandOverResult(StrEnum):
    """``HANDED_OVER``: the node is free. ``NOT_YET``: ask again. ``UNABLE``: only once the active plugin ends.

    ``SILENT``: no answer.
    """

    HANDED_OVER = "handed-over"
    NOT_YET = "not-yet"
    UNABLE = "unable"
    SILENT = "silent"


class HandOverRequest(msgspec.Struct, frozen=True):
    """Socket and version of the new plugin. Unknown fields of other versions are ignored."""

    socket: str
    version: str = ""


class HandOverAnswer(msgspec.Struct, frozen=True):
    """``why`` is a reason for people."""

    result: HandOverResult = msgspec.field(name="said")
    why: str = ""


REQUEST, ANSWER = msgspec.json.Decoder(HandOverRequest), msgspec.json.Decoder(HandOverAnswer)


def handler(hand_over: Callable[[HandOverRequest], HandOverAnswer]) -> grpc.GenericRpcHandler:
    """The server side of ``ask``."""

    def answer(request: bytes, _context: grpc.ServicerContext) -> bytes:
        return msgspec.json.encode(hand_over(REQUEST.decode(request)))

    return grpc.method_handlers_generic_handler(SERVICE, {METHOD: grpc.unary_unary_rpc_method_handler(answer)})


def ask(owner: Path, own: Path, version: str) -> HandOverAnswer:
    """Ask the plugin at the socket ``owner`` to hand over to the plugin at the socket ``own``."""
    try:
        with connect(owner) as channel:
            request = msgspec.json.encode(HandOverRequest(str(own), version))
            return ANSWER.decode(channel.unary_unary(f"/{SERVICE}/{METHOD}")(request, timeout=ANSWER_TIMEOUT_SECONDS))
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return HandOverAnswer(HandOverResult.UNABLE, "its version or its settings do not support it")
        return HandOverAnswer(HandOverResult.SILENT, f"{error.code().name}: {error.details()}")
    except msgspec.MsgspecError as error:
        return HandOverAnswer(HandOverResult.UNABLE, f"this version can't read its answer: {error}")
