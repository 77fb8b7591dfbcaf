"""gRPC's own health protocol on the plugin's socket.

The package grpcio-health-checking would do the same with a registry of states that somebody has to set; here
each question looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from driver.checks import Check, look_at
from kubelet_plugin.protocol.generated import grpc_health_v1_pb2 as messages

SERVICE = "grpc.health.v1.Health"
OVERALL, LIVENESS, READINESS = "", "liveness", "readiness"


class GrpcHealth:
    """``Check``: the server as a whole and ``readiness`` are ready or not, ``liveness`` is alive or not."""

    def __init__(self, live: Sequence[Check], ready: Sequence[Check]) -> None:
        self._checks = {OVERALL: ready, READINESS: ready, LIVENESS: live}

    def handler(self) -> grpc.GenericRpcHandler:
        method = grpc.unary_unary_rpc_method_handler(
            self._check,
            request_deserializer=messages.HealthCheckRequest.FromString,
            response_serializer=messages.HealthCheckResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Check": method})

    def _check(self, request: Any, context: grpc.ServicerContext) -> Any:
        if request.service not in self._checks:
            known = ", ".join(sorted(filter(None, self._checks)))
            context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}; there are {known}")
        results = look_at(self._checks[request.service])
        well = all(result.reason is None for result in results)
        status = messages.HealthCheckResponse.SERVING if well else messages.HealthCheckResponse.NOT_SERVING
        return messages.HealthCheckResponse(status=status)
