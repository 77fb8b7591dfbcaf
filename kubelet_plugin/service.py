"""The gRPC side of preparing: the kubelet's DRAPlugin service in both versions it may speak."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import Any, Protocol, TypeVar

import grpc

from driver.errors import ClaimError, TesseraError
from kubelet_plugin.claims import ClaimReference
from kubelet_plugin.preparation import PreparedDevice
from kubelet_plugin.protocol.generated import dra_v1_pb2, dra_v1beta1_pb2

log = logging.getLogger(__name__)

VERSIONS: Sequence[tuple[str, ModuleType]] = (
    ("v1.DRAPlugin", dra_v1_pb2),
    ("v1beta1.DRAPlugin", dra_v1beta1_pb2),
)
"""What is registered with the kubelet, newest first, and the messages of each."""

PARALLEL_CLAIMS = 64
"""Claims that are worked on at once. Threads are made when needed; one that NVML keeps must not keep the others."""

ANSWER_S = 40.0
"""The kubelet gives up after 45 s and would not hear why; what goes on after the answer is found by its next try."""

NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
UID = re.compile(r"[A-Za-z0-9][-A-Za-z0-9]*")

T = TypeVar("T")


class ClaimWork(Protocol):
    """What the service needs of the Preparer; both methods raise TesseraError."""

    def prepare(self, reference: ClaimReference) -> Sequence[PreparedDevice]: ...

    def unprepare(self, reference: ClaimReference) -> None: ...


class DraService:
    """Answers for exactly the claims it was asked about: one that fails does not harm the others."""

    def __init__(self, work: ClaimWork, waits: Callable[[], Sequence[str]] = list, answer_s: float = ANSWER_S) -> None:
        """``waits`` says who waits for whom, for the answer about a claim that takes longer than ``answer_s``."""
        self._work = work
        self._waits = waits
        self._answer_s = answer_s
        self._pool = ThreadPoolExecutor(PARALLEL_CLAIMS, thread_name_prefix="claim")

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        """One gRPC handler a protocol version."""
        return [self._handler(messages) for _, messages in VERSIONS]

    def close(self) -> None:
        """Begin nothing new. Calls in progress have been waited for by then; what hangs is left behind."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _handler(self, messages: ModuleType) -> grpc.GenericRpcHandler:
        service = messages.DESCRIPTOR.services_by_name["DRAPlugin"]
        calls = {"NodePrepareResources": self._prepare_all, "NodeUnprepareResources": self._unprepare_all}
        methods = {
            name: grpc.unary_unary_rpc_method_handler(
                _bound(call, messages),
                request_deserializer=getattr(messages, f"{name}Request").FromString,
                response_serializer=getattr(messages, f"{name}Response").SerializeToString,
            )
            for name, call in calls.items()
        }
        return grpc.method_handlers_generic_handler(service.full_name, methods)

    def _prepare_all(self, messages: Any, request: Any) -> Any:
        response = messages.NodePrepareResourcesResponse()
        for uid, devices, error in self._each(request.claims, "prepare", self._work.prepare):
            answer = response.claims[uid]
            answer.error = error
            for device in devices or ():
                answer.devices.add(
                    request_names=device.requests,
                    pool_name=device.pool,
                    device_name=device.device,
                    cdi_device_ids=device.cdi_device_ids,
                )
        return response

    def _unprepare_all(self, messages: Any, request: Any) -> Any:
        response = messages.NodeUnprepareResourcesResponse()
        for uid, _, error in self._each(request.claims, "unprepare", self._work.unprepare):
            response.claims[uid].error = error
        return response

    def _each(
        self, claims: Iterable[Any], verb: str, call: Callable[[ClaimReference], T]
    ) -> list[tuple[str, T | None, str]]:
        """(uid, result, error text) for each claim, worked on at once; all within the time for an answer."""
        todo = {claim.uid: claim for claim in claims}
        end = time.monotonic() + self._answer_s
        work = {uid: self._pool.submit(_attempt, claim, verb, call) for uid, claim in todo.items()}
        return [self._result(todo[uid], verb, future, end) for uid, future in work.items()]

    def _result(self, claim: Any, verb: str, work: Future[tuple[str, T | None, str]], end: float) -> Any:
        try:
            return work.result(max(0.0, end - time.monotonic()))
        except TimeoutError:
            where = f"{claim.namespace}/{claim.name}"
            error = f"claim {where}: can't {verb} it within {self._answer_s:.0f} s, and still at it; "
            error += "; ".join(self._waits()) or "a GPU or the API server does not answer"
            log.error("no answer in time", extra={"claim": where, "error": error})
            return claim.uid, None, error


def _bound(call: Callable[[Any, Any], Any], messages: ModuleType) -> Callable[[Any, Any], Any]:
    return lambda request, _context: call(messages, request)


def _attempt(claim: Any, verb: str, call: Callable[[ClaimReference], T]) -> tuple[str, T | None, str]:
    try:
        return claim.uid, call(_reference(claim)), ""
    except TesseraError as error:
        log.warning("can't %s claim", verb, extra={"claim": f"{claim.namespace}/{claim.name}", "error": str(error)})
        return claim.uid, None, str(error)
    except Exception as error:
        # A defect of ours: the kubelet gets an answer for this claim, and the others get theirs.
        log.exception("defect while trying to %s claim", verb, extra={"claim": f"{claim.namespace}/{claim.name}"})
        return claim.uid, None, f"internal error, please report it: {type(error).__name__}: {error}"


def _reference(claim: Any) -> ClaimReference:
    """The kubelet's reference, checked: it becomes part of file names and request paths."""
    for field, value, allowed in (
        ("namespace", claim.namespace, NAME),
        ("name", claim.name, NAME),
        ("uid", claim.uid, UID),
    ):
        if not allowed.fullmatch(value):
            raise ClaimError(f"the kubelet's claim reference has {field} {value!r}: not a Kubernetes {field}")
    return ClaimReference(claim.namespace, claim.name, claim.uid)
