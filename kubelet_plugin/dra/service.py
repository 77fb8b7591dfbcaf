"""The kubelet's DRAPlugin gRPC service: NodePrepareResources and NodeUnprepareResources."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from types import ModuleType
from typing import Any, TypeVar

import grpc

from driver.errors import ClaimError, TesseraError
from kubelet_plugin.claims.preparer import Preparer
from kubelet_plugin.dra.protocol.generated import dra_v1_pb2 as messages
from kubelet_plugin.inventory.inventory import ClaimReference

log = logging.getLogger(__name__)

VERSION = "v1.DRAPlugin"
"""Service version to register with the kubelet."""

SERVICE = messages.DESCRIPTOR.services_by_name["DRAPlugin"].full_name

PARALLEL_CLAIMS = 64
"""Maximum number of claims in progress. Threads start on demand; NVML may block some of them for a long time."""

ANSWER_TIMEOUT_SECONDS = 40.0
"""Longest time until a call is answered. The kubelet cancels a call after 45 s and would not see the error message."""

NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
UID = re.compile(r"[A-Za-z0-9][-A-Za-z0-9]*")

T = TypeVar("T")


ClaimObserver = Callable[[str, ClaimReference], AbstractContextManager[None]]
"""A block around the work on a claim. Arguments: ``prepare`` or ``unprepare``, the claim."""


class DraService:
    """Answers for each claim of a call separately: the failure of one claim does not affect the others."""

    def __init__(
        self,
        preparer: Preparer,
        *observers: ClaimObserver,
        waits: Callable[[], Sequence[str]] = list,
        answer_timeout_seconds: float = ANSWER_TIMEOUT_SECONDS,
    ) -> None:
        """``observers``: the outermost first. ``waits`` describes which claims wait for which locks, for the error
        message after a timeout."""
        self._preparer, self._observers, self._waits = preparer, observers, waits
        self._answer_timeout_seconds = answer_timeout_seconds
        self._pool = ThreadPoolExecutor(PARALLEL_CLAIMS, thread_name_prefix="claim")

    def handler(self) -> grpc.GenericRpcHandler:
        methods = {"NodePrepareResources": self._prepare_resources, "NodeUnprepareResources": self._unprepare_resources}
        return rpc_handler(messages, "DRAPlugin", methods)

    def close(self) -> None:
        """Start no more work. All calls have been answered by then; threads that hang are abandoned."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _prepare_resources(self, request: Any, _context: grpc.ServicerContext) -> Any:
        response = messages.NodePrepareResourcesResponse()
        for uid, devices, error in self._run(request.claims, "prepare", self._preparer.prepare):
            answer = response.claims[uid]
            answer.error = error
            for device in devices or ():
                answer.devices.add(
                    request_names=device.requests,
                    pool_name=device.pool,
                    device_name=device.device,
                    cdi_device_ids=device.cdi_device_ids,
                    share_id=device.share_id or None,
                )
        return response

    def _unprepare_resources(self, request: Any, _context: grpc.ServicerContext) -> Any:
        response = messages.NodeUnprepareResourcesResponse()
        for uid, _, error in self._run(request.claims, "unprepare", self._preparer.unprepare):
            response.claims[uid].error = error
        return response

    def _run(
        self, claims: Iterable[Any], verb: str, call: Callable[[ClaimReference], T]
    ) -> list[tuple[str, T | None, str]]:
        """Process the claims in parallel. Return (uid, result, error message) for each before the timeout."""
        todo = {claim.uid: claim for claim in claims}
        end = time.monotonic() + self._answer_timeout_seconds
        work = {uid: self._pool.submit(self._attempt, claim, verb, call) for uid, claim in todo.items()}
        results = []
        for uid, future in work.items():
            try:
                results.append((uid, *future.result(max(0.0, end - time.monotonic()))))
            except TimeoutError:
                results.append((uid, None, self._timed_out(todo[uid], verb)))
        return results

    def _attempt(self, claim: Any, verb: str, call: Callable[[ClaimReference], T]) -> tuple[T | None, str]:
        """Process one claim: its result, or None and an error message."""
        try:
            reference = _reference(claim)
            with ExitStack() as stack:
                for observe in self._observers:
                    stack.enter_context(observe(verb, reference))
                return call(reference), ""
        except TesseraError as error:
            log.warning("can't %s claim", verb, extra={"claim": f"{claim.namespace}/{claim.name}", "error": str(error)})
            return None, str(error)
        except Exception as error:
            # A defect affects only this claim: the kubelet gets an answer for it and for the others.
            log.exception("defect while trying to %s claim", verb, extra={"claim": f"{claim.namespace}/{claim.name}"})
            return None, f"internal error, please report it: {type(error).__name__}: {error}"

    def _timed_out(self, claim: Any, verb: str) -> str:
        where = f"{claim.namespace}/{claim.name}"
        error = f"claim {where}: can't {verb} it within {self._answer_timeout_seconds:.0f} s, still in progress; "
        error += "; ".join(self._waits()) or "a GPU or the API server does not answer"
        log.error("no answer in time", extra={"claim": where, "error": error})
        return error


def rpc_handler(
    messages: ModuleType, service: str, methods: Mapping[str, Callable[..., Any]]
) -> grpc.GenericRpcHandler:
    """The gRPC handler of a service that is defined in ``messages``."""
    defined = messages.DESCRIPTOR.services_by_name[service]
    handlers = {}
    for name, call in methods.items():
        method = defined.methods_by_name[name]
        make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        request, response = (getattr(messages, message.name) for message in (method.input_type, method.output_type))
        handlers[name] = make(call, request.FromString, response.SerializeToString)
    return grpc.method_handlers_generic_handler(defined.full_name, handlers)


def _reference(claim: Any) -> ClaimReference:
    """Validate the kubelet's claim reference: it becomes part of file names and request paths. Raises ClaimError."""
    for field, value, allowed in (
        ("namespace", claim.namespace, NAME),
        ("name", claim.name, NAME),
        ("uid", claim.uid, UID),
    ):
        if not allowed.fullmatch(value):
            raise ClaimError(f"the kubelet's claim reference has {field} {value!r}: not a Kubernetes {field}")
    return ClaimReference(claim.namespace, claim.name, claim.uid)
