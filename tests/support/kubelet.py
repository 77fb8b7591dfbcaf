"""A kubelet by script: real gRPC over the plugin's real sockets, and the memory of the real one.

It registers a plugin whose registration socket appears, repeats a call that was cut before its answer, and never
asks again for what was answered.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc

from kubelet_plugin.checkpoint.records import device_key
from kubelet_plugin.dra.protocol.generated import dra_v1_pb2, registration_v1_pb2
from tests.harness.waiting import wait_for

DRIVER = "gpu.tessera.dev"
PLUGIN = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
REGISTRATION = "pluginregistration.Registration"
DEADLINE_S = 45.0
STARTED_S = 60.0

CUT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class AnswerError(AssertionError):
    """The plugin answered with an error where it should have done what it was asked."""


@dataclass(frozen=True)
class KnownClaim:
    """A claim as a kubelet names it, and the devices that it is allocated: a part of a shared one by its key."""

    name: str
    uid: str
    devices: frozenset[str]

    @property
    def message(self) -> Any:
        return dra_v1_pb2.Claim(namespace="default", name=self.name, uid=self.uid)


@dataclass
class Kubelet:
    """``prepared``: claims whose devices were answered; ``owed``: the call that got no answer."""

    plugin_socket: Path
    registration_socket: Path
    prepared: dict[str, KnownClaim] = field(default_factory=dict)
    owed: tuple[str, tuple[KnownClaim, ...]] | None = None
    _channel: grpc.Channel | None = None

    @property
    def leaving(self) -> frozenset[str]:
        """Claims whose unprepare was begun and not answered."""
        method, claims = self.owed or ("", ())
        return frozenset(claim.uid for claim in claims if method == "NodeUnprepareResources")

    def meet(self) -> None:
        """Register a plugin that starts."""
        wait_for(self._offered, STARTED_S, "the plugin offers itself for registration", interval_s=0.005)
        channel = _connect(self.registration_socket)
        try:
            info = _call(channel, REGISTRATION, "GetInfo", registration_v1_pb2, "InfoRequest", "PluginInfo")
            found = info(registration_v1_pb2.InfoRequest(), timeout=DEADLINE_S, wait_for_ready=True)
            assert found.endpoint == str(self.plugin_socket)
            names = ("RegistrationStatus", "RegistrationStatusResponse")
            notify = _call(channel, REGISTRATION, "NotifyRegistrationStatus", registration_v1_pb2, *names)
            notify(registration_v1_pb2.RegistrationStatus(plugin_registered=True), timeout=DEADLINE_S)
        finally:
            channel.close()
        self.part()
        self._channel = _connect(self.plugin_socket)

    def part(self) -> None:
        """Close what is left of a connection to a plugin that is gone."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def prepare(self, claims: Iterable[KnownClaim]) -> None:
        """One call; cut, it is owed."""
        self._ask("NodePrepareResources", tuple(claims))

    def unprepare(self, claims: Iterable[KnownClaim]) -> None:
        """One call; cut, it is owed."""
        self._ask("NodeUnprepareResources", tuple(claims))

    def retry(self) -> None:
        """Repeat the call that is owed, if one is."""
        if self.owed is not None:
            self._ask(*self.owed)

    def give_up(self) -> None:
        """The pod was deleted before its claims were prepared: they are unprepared all the same."""
        if self.owed is not None:
            self.unprepare(self.owed[1])

    def _ask(self, method: str, claims: tuple[KnownClaim, ...]) -> None:
        assert self._channel is not None
        call = _call(self._channel, PLUGIN, method, dra_v1_pb2, f"{method}Request", f"{method}Response")
        request = getattr(dra_v1_pb2, f"{method}Request")(claims=[claim.message for claim in claims])
        self.owed = (method, claims)
        try:
            answer = call(request, timeout=DEADLINE_S)
        except grpc.RpcError as error:
            if error.code() not in CUT:
                raise
            return
        self.owed = None
        for claim in claims:
            self._hear(method, claim, answer.claims[claim.uid])

    def _hear(self, method: str, claim: KnownClaim, answer: Any) -> None:
        if answer.error:
            raise AnswerError(f"{method} of {claim.name}: {answer.error}")
        if method == "NodeUnprepareResources":
            self.prepared.pop(claim.uid, None)
            return
        self.prepared[claim.uid] = claim
        names = sorted(device_key(device.device_name, device.share_id) for device in answer.devices)
        ids = [name for device in answer.devices for name in device.cdi_device_ids]
        wanted = sorted(f"{DRIVER}/claim={claim.uid}-{device}" for device in claim.devices)
        if names != sorted(claim.devices) or sorted(ids) != wanted:
            raise AnswerError(f"{method} of {claim.name}: answered {names} with {ids}, allocated {claim.devices}")

    def _offered(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
            connection.connect(str(self.registration_socket))
            return True
        return False


def _connect(path: Path) -> grpc.Channel:
    # Else channels to one address share their trouble: a connection to the plugin before this one, and its back-off.
    return grpc.insecure_channel(f"unix://{path}", [("grpc.use_local_subchannel_pool", 1)])


def _call(channel: grpc.Channel, service: str, method: str, messages: Any, asked: str, answered: str) -> Any:
    return channel.unary_unary(
        f"/{service}/{method}",
        request_serializer=getattr(messages, asked).SerializeToString,
        response_deserializer=getattr(messages, answered).FromString,
    )


class DraClient:
    """Calls the plugin's socket as the kubelet does, with the claims of one call as they are given."""

    def __init__(self, path: Path) -> None:
        self.channel = grpc.insecure_channel(f"unix://{path}")

    def call(self, messages: ModuleType, verb: str, claims: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
        """``claims``: (namespace, name, uid). Returns the answer by uid."""
        request = getattr(messages, f"Node{verb}ResourcesRequest")()
        for namespace, name, uid in claims:
            request.claims.add(namespace=namespace, name=name, uid=uid)
        method = self.channel.unary_unary(
            f"/{messages.DESCRIPTOR.package}.DRAPlugin/Node{verb}Resources",
            request_serializer=type(request).SerializeToString,
            response_deserializer=getattr(messages, f"Node{verb}ResourcesResponse").FromString,
        )
        return dict(method(request, timeout=60, wait_for_ready=True).claims)
