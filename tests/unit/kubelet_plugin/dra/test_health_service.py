"""The kubelet's view of health: DRAResourceHealth over a real unix socket, in both versions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest

from driver.model.device import Device
from kubelet_plugin.dra.health_service import MAX_STREAMS, MESSAGE_LIMIT, HealthService
from kubelet_plugin.dra.kubelet_sockets import PARALLEL_CALLS, STOP_TIMEOUT_SECONDS, SocketServer
from kubelet_plugin.dra.protocol.generated import dra_health_v1_pb2, dra_health_v1alpha1_pb2, dra_v1_pb2
from kubelet_plugin.dra.service import DraService
from tests.support.health import HealthUnderTest
from tests.support.kubelet import DraClient
from tests.support.node import NodeUnderTest
from tests.support.running import SOON_S, eventually
from tests.unit.kubelet_plugin.dra.test_service import Work

VERSIONS = [pytest.param(dra_health_v1_pb2, id="v1"), pytest.param(dra_health_v1alpha1_pb2, id="v1alpha1")]

QUICK_S = 0.05
POOL = "pool-a"


class Watch:
    """One stream, as the kubelet reads it; ``heard`` are its messages, as {device: (health, message)}."""

    def __init__(self, channel: grpc.Channel, messages: ModuleType) -> None:
        self.heard: list[dict[str, tuple[int, str]]] = []
        self.raw: list[Any] = []
        self.ended = threading.Event()
        self.call = channel.unary_stream(
            f"/{messages.DESCRIPTOR.package}.DRAResourceHealth/NodeWatchResources",
            request_serializer=messages.NodeWatchResourcesRequest.SerializeToString,
            response_deserializer=messages.NodeWatchResourcesResponse.FromString,
        )(messages.NodeWatchResourcesRequest(), wait_for_ready=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for message in self.call:
                self.raw.append(message)
                self.heard.append({each.device.device_name: (each.health, each.message) for each in message.devices})
        except grpc.RpcError:
            pass
        finally:
            self.ended.set()


@dataclass
class Served:
    """A server with both services on one socket."""

    service: HealthService
    server: SocketServer
    socket: Path
    channels: list[grpc.Channel] = field(default_factory=list)

    def watch(self, messages: ModuleType = dra_health_v1_pb2) -> Watch:
        channel = grpc.insecure_channel(f"unix://{self.socket}", [("grpc.use_local_subchannel_pool", 1)])
        self.channels.append(channel)
        return Watch(channel, messages)


Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    opened: list[Callable[[], object]] = []

    def start(
        devices: Callable[[], list[Device]] = list,
        trouble: Callable[[Device], str | None] = lambda _: None,
        resend_interval_seconds: float = 60.0,
        work: Any = None,
    ) -> Served:
        service = HealthService(POOL, devices, trouble, resend_interval_seconds, lambda: 1234.0)
        claims = DraService(work or Work())
        server = SocketServer(tmp_path / "dra.sock", [claims.handler(), *service.handlers()])
        served = Served(service, server, tmp_path / "dra.sock")
        opened.extend([claims.close, server.stop, service.close, lambda: [each.close() for each in served.channels]])
        return served

    yield start
    for close in reversed(opened):
        close()


@pytest.mark.parametrize("messages", VERSIONS)
def test_every_device_is_told_of_at_once_and_again_when_anything_changes(
    node: NodeUnderTest, serve: Serve, messages: ModuleType
) -> None:
    ill = HealthUnderTest(node)
    devices = [ill.device(f"gpu-{number}") for number in range(8)]
    served = serve(lambda: devices, ill.health.unhealthy_reason)
    watch = served.watch(messages)
    eventually(lambda: watch.heard, "the first message")
    assert watch.heard[0] == {device.name: (messages.HEALTHY, "") for device in devices}
    ill.xid(3, 48)
    served.service.notify()
    eventually(lambda: watch.heard[-1]["gpu-3"][0] == messages.UNHEALTHY, "the change is told")
    assert watch.heard[-1]["gpu-3"][1].startswith("xid-48: XID 48, uncorrectable memory error")
    assert watch.heard[-1]["gpu-2"] == (messages.HEALTHY, "")
    node.simulated.reset_gpu(3)
    ill.look()
    served.service.notify()
    eventually(lambda: watch.heard[-1]["gpu-3"] == (messages.HEALTHY, ""), "the recovery is told")
    told = watch.raw[0].devices[0]
    assert (told.device.pool_name, told.last_updated_time, told.health_check_timeout_seconds) == (POOL, 1234, 30)


def test_it_is_said_again_before_the_kubelet_takes_it_for_stale(serve: Serve) -> None:
    watch = serve(resend_interval_seconds=QUICK_S).watch()
    eventually(lambda: len(watch.heard) >= 3, "it is said again and again")


def test_a_long_reason_is_cut_to_what_the_kubelet_takes(node: NodeUnderTest, serve: Serve) -> None:
    device = node.node.inventory.devices_on(node.node.inventory.gpus[0])[0]
    watch = serve(lambda: [device], lambda _: "x" * 5000).watch()
    eventually(lambda: watch.heard, "the first message")
    assert len(watch.heard[0][device.name][1]) == MESSAGE_LIMIT


def test_streams_never_keep_a_claim_waiting(serve: Serve) -> None:
    served = serve()
    watches: list[Watch] = []
    for _ in range(PARALLEL_CALLS + 5):
        watches.append(served.watch())
        # One after the other: which is the newest is what the server meets last.
        eventually(lambda: watches[-1].heard, "the newest is served")
    eventually(lambda: sum(watch.ended.is_set() for watch in watches) >= len(watches) - MAX_STREAMS, "older ones end")
    kubelet = DraClient(served.socket)
    answer = kubelet.call(dra_v1_pb2, "Prepare", [("default", "good", "uid-1")])
    assert answer["uid-1"].error == ""
    kubelet.channel.close()


def test_a_stream_ends_with_the_plugin_without_keeping_it(serve: Serve) -> None:
    served = serve()
    watch = served.watch()
    eventually(lambda: watch.heard, "the first message")
    began = time.monotonic()
    served.service.close()
    served.server.stop()
    assert watch.ended.wait(SOON_S)
    assert time.monotonic() - began < STOP_TIMEOUT_SECONDS


def test_a_stream_ends_when_the_kubelet_hangs_up(serve: Serve) -> None:
    served = serve()
    before = threading.active_count()
    watch = served.watch()
    eventually(lambda: watch.heard, "the first message")
    watch.call.cancel()
    eventually(lambda: not served.service._streams, "the plugin forgets it")
    eventually(lambda: threading.active_count() <= before + 3, "no thread is left for it")
