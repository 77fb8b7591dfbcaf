"""The gRPC side of preparing: the kubelet's DRAPlugin service in both versions it may speak."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
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

PARALLEL_CLAIMS = 8
"""Claims of one call that are worked on at once: as many as a node usually has GPUs."""

NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
UID = re.compile(r"[A-Za-z0-9][-A-Za-z0-9]*")

T = TypeVar("T")


class ClaimWork(Protocol):
    """What the service needs of the Preparer; both methods raise TesseraError."""

    def prepare(self, reference: ClaimReference) -> Sequence[PreparedDevice]: ...

    def unprepare(self, reference: ClaimReference) -> None: ...


class DraService:
    """Answers for exactly the claims it was asked about: one that fails does not harm the others."""

    def __init__(self, work: ClaimWork) -> None:
        self._work = work
        self._pool = ThreadPoolExecutor(PARALLEL_CLAIMS, thread_name_prefix="claim")

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        """One gRPC handler a protocol version."""
        return [self._handler(messages) for _, messages in VERSIONS]

    def close(self) -> None:
        """Wait for the claims in work."""
        self._pool.shutdown(wait=True)

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
        """(uid, result, error text) for each claim, worked on at once where there are several."""
        todo = list({claim.uid: claim for claim in claims}.values())
        run = map if len(todo) == 1 else self._pool.map
        return list(run(lambda claim: _attempt(claim, verb, call), todo))


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
