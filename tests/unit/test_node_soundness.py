"""A whole node plugin tells over HTTP and gRPC whether it is alive and ready, and why it is not."""

from __future__ import annotations

import logging
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pynvml
import pytest

from driver.config.listen import ListenAddress
from driver.hardware import nvml_host
from driver.hardware.simulator import SimulatedNode
from kubelet_plugin import listening, scan, soundness
from kubelet_plugin.answering import Answering, ask
from kubelet_plugin.grpc_health import SERVICE
from kubelet_plugin.protocol.generated import grpc_health_v1_pb2, registration_v1_pb2
from tests.harness.waiting import wait_for
from tests.support.faulty_api import FaultyApi, PluginOnApi
from tests.support.kubelet import REGISTRATION
from tests.support.metrics import fetch
from tests.support.ports import kept_port

READY = "readyz check passed"


class Asked:
    """A plugin in this process, asked as a kubelet and its probes ask."""

    def __init__(self, root: Path, api: FaultyApi, port: int) -> None:
        self.root, self.api, self.port = root, api, port

    def alive(self) -> bool:
        return fetch(self.port, "/livez")[0] == 200

    def readiness(self) -> str:
        return fetch(self.port, "/readyz?verbose")[1]

    def ready(self) -> bool:
        return READY in self.readiness()

    def fails(self, check: str, why: str) -> None:
        """Wait until the check fails with these words in its line."""
        start = f"[-]{check} failed: "

        def said() -> bool:
            return any(line.startswith(start) and why in line for line in self.readiness().splitlines())

        wait_for(said, 60, f"{check} fails: {why}")

    def register(self, accepted: bool = True, error: str = "") -> None:
        """What the kubelet says when it has looked at the plugin."""
        with grpc.insecure_channel(f"unix://{self.root}/k/plugins_registry/gpu.tessera.dev-reg.sock") as channel:
            call = channel.unary_unary(
                f"/{REGISTRATION}/NotifyRegistrationStatus",
                request_serializer=registration_v1_pb2.RegistrationStatus.SerializeToString,
                response_deserializer=registration_v1_pb2.RegistrationStatusResponse.FromString,
            )
            status = registration_v1_pb2.RegistrationStatus(plugin_registered=accepted, error=error)
            call(status, timeout=60, wait_for_ready=True)

    def over_grpc(self, service: str) -> str:
        """The status that the plugin's socket answers, or the error's."""
        with grpc.insecure_channel(f"unix://{self.root}/k/plugins/gpu.tessera.dev/dra.sock") as channel:
            call = channel.unary_unary(
                f"/{SERVICE}/Check",
                request_serializer=grpc_health_v1_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=grpc_health_v1_pb2.HealthCheckResponse.FromString,
            )
            try:
                answer = call(grpc_health_v1_pb2.HealthCheckRequest(service=service), timeout=60, wait_for_ready=True)
            except grpc.RpcError as error:
                return str(error.code().name)
            return str(grpc_health_v1_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    def fault(self, code: int) -> None:
        SimulatedNode.attach(self.root / "host").faults.fail("*", code=code)

    def slow(self, seconds: float) -> None:
        SimulatedNode.attach(self.root / "host").faults.slow(seconds)

    def well(self) -> None:
        SimulatedNode.attach(self.root / "host").faults.clear()


@contextmanager
def plugin(root: Path, caplog: pytest.LogCaptureFixture, **flags: object) -> Iterator[Asked]:
    with FaultyApi() as api, caplog.at_level(logging.INFO):
        whole = PluginOnApi(root, api, health_address="127.0.0.1:0", **flags)
        with whole.running():

            def port() -> int:
                said = [r for r in caplog.records if r.message == "serving over HTTP"]
                return int(vars(said[0])["address"].rpartition(":")[2]) if said else 0

            yield Asked(root, api, wait_for(port, 60, "the health endpoint listens"))


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds takes tenths."""
    monkeypatch.setattr(scan, "RESCAN_S", 0.2)
    monkeypatch.setattr(scan, "PAUSE_S", 0.1)
    monkeypatch.setattr(listening, "WAIT_S", 0.3)
    monkeypatch.setattr(nvml_host, "ANSWER_S", 1.0)
    monkeypatch.setattr(soundness, "LATE_S", 3.0)


@pytest.fixture
def root() -> Iterator[Path]:
    """Short: below it are unix sockets."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        yield Path(folder)


@pytest.fixture
def asked(root: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Asked]:
    with plugin(root, caplog) as found:
        yield found


def test_it_is_ready_only_once_the_kubelet_has_accepted_it(asked: Asked) -> None:
    asked.fails("registered", "the kubelet has not called")
    assert asked.over_grpc("readiness") == "NOT_SERVING"
    asked.register(accepted=False, error="another plugin has that name")
    asked.fails("registered", "failed: the kubelet refused the registration: another plugin has that name")
    asked.register()
    wait_for(asked.ready, 60, "it is ready")
    assert asked.alive()
    for service in ("", "readiness"):
        wait_for(lambda service=service: asked.over_grpc(service) == "SERVING", 60, "it is so over gRPC")  # type: ignore[misc]
    assert [asked.over_grpc(name) for name in ("liveness", "x")] == ["SERVING", "NOT_FOUND"]


def test_it_lives_without_an_api_server_and_is_ready_again_with_it(asked: Asked) -> None:
    asked.register()
    wait_for(asked.ready, 60, "it is ready")
    asked.api.down()
    asked.fails("api", "no answer")
    assert asked.alive()
    assert asked.over_grpc("liveness") == "SERVING"
    asked.api.up()
    wait_for(asked.ready, 60, "it is ready again")


@pytest.mark.long
def test_hardware_that_fails_or_hangs_is_no_reason_to_be_killed_but_to_be_unready(asked: Asked) -> None:
    asked.register()
    wait_for(asked.ready, 60, "it is ready")
    asked.fault(pynvml.NVML_ERROR_GPU_IS_LOST)
    asked.fails("hardware", "no GPU answers")
    asked.well()
    wait_for(asked.ready, 60, "it is ready again")
    asked.slow(5.0)
    asked.fails("hardware", "")
    assert asked.alive()
    asked.well()
    wait_for(asked.ready, 60, "it is ready once more")


def test_a_socket_that_does_not_answer_ends_the_life_of_the_process_after_a_minute(root: Path) -> None:
    now = [0.0]
    path = root / "silent.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        answering = Answering(path, lambda: now[0])
        assert answering.look() is None
        now[0] = 61.0
        assert f"{path} has not answered for 61 s" in str(answering.look())


def test_a_socket_that_answers_is_heard(asked: Asked) -> None:
    asked.over_grpc("liveness")
    ask(asked.root / "k/plugins/gpu.tessera.dev/dra.sock")


def test_a_state_directory_that_takes_no_file_is_named(asked: Asked) -> None:
    asked.register()
    wait_for(asked.ready, 60, "it is ready")
    state, elsewhere = asked.root / "state", asked.root / "elsewhere"
    state.rename(elsewhere)
    asked.fails("checkpoint", f"can't write {state}")
    elsewhere.rename(state)
    wait_for(asked.ready, 60, "it is ready again")


def test_one_address_for_metrics_and_health_is_one_server(
    root: Path, caplog: pytest.LogCaptureFixture, port: int
) -> None:
    address = str(ListenAddress("127.0.0.1", port))
    with FaultyApi() as api, PluginOnApi(root, api, health_address=address, metrics_address=address).running():

        def answers() -> bool:
            try:
                return fetch(port, "/livez")[0] == 200
            except OSError:
                return False

        wait_for(answers, 60, "it listens")
        assert "tessera_gpus 1.0" in fetch(port, "/metrics")[1]


@pytest.fixture
def port() -> Iterator[int]:
    with kept_port() as kept:
        yield kept
