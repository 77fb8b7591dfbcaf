"""The kubelet's view of claims: gRPC over real unix sockets."""

from __future__ import annotations

import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from driver.errors import ClaimError, EnvironmentFault
from kubelet_plugin.claims.preparer import PreparedDevice, Preparer
from kubelet_plugin.dra import kubelet_sockets
from kubelet_plugin.dra.kubelet_sockets import Registry, SocketServer
from kubelet_plugin.dra.protocol.generated import dra_v1_pb2
from kubelet_plugin.dra.protocol.generated import registration_v1_pb2 as registration_messages
from kubelet_plugin.dra.service import ClaimObserver, DraService
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.settings import node_settings
from tests.harness.waiting import wait_for
from tests.support.claims import result
from tests.support.kubelet import DraClient
from tests.support.node import NodeUnderTest
from tests.support.running import SOON_S, eventually


class Work(Preparer):
    """Prepares by name: what a claim is called decides how it goes."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.meet = threading.Barrier(1, timeout=60)

    def prepare(self, reference: ClaimReference) -> Sequence[PreparedDevice]:
        self._do(reference)
        return [PreparedDevice(("gpu",), "pool", f"device-of-{reference.name}", ("vendor/claim=x",))]

    def unprepare(self, reference: ClaimReference) -> None:
        self._do(reference)

    def _do(self, reference: ClaimReference) -> None:
        self.calls.append(reference.name)
        self.meet.wait()
        if reference.name.startswith("bad"):
            raise ClaimError("claim default/bad: can't be")
        if reference.name.startswith("defect"):
            raise KeyError("a defect")


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., DraClient]]:
    opened: list[Callable[[], object]] = []

    def start(work: Any, **settings: Any) -> DraClient:
        service = DraService(work, **settings)
        server = SocketServer(tmp_path / "dra.sock", [service.handler()])
        kubelet = DraClient(tmp_path / "dra.sock")
        opened.extend([service.close, server.stop, kubelet.channel.close])
        return kubelet

    yield start
    for close in reversed(opened):
        close()


def test_each_claim_of_a_call_gets_its_own_answer(serve: Callable[..., DraClient]) -> None:
    claims = [("default", name, f"uid-{name}") for name in ("good", "bad", "defect", "fine")]
    answers = serve(Work()).call(dra_v1_pb2, "Prepare", claims)
    assert set(answers) == {uid for _, _, uid in claims}
    assert answers["uid-bad"].error == "claim default/bad: can't be"
    assert "internal error, please report it: KeyError" in answers["uid-defect"].error
    for name in ("good", "fine"):
        [device] = answers[f"uid-{name}"].devices
        assert answers[f"uid-{name}"].error == ""
        assert (list(device.request_names), device.pool_name, device.device_name, list(device.cdi_device_ids)) == (
            ["gpu"],
            "pool",
            f"device-of-{name}",
            ["vendor/claim=x"],
        )


@pytest.mark.parametrize("name", ["good", "bad", "defect"])
@pytest.mark.parametrize("verb", ["prepare", "unprepare"])
def test_the_work_on_a_claim_is_observed_and_so_is_its_failure(tmp_path: Path, verb: str, name: str) -> None:
    seen: list[str] = []

    def observer(label: str) -> ClaimObserver:
        @contextmanager
        def observe(doing: str, claim: ClaimReference) -> Iterator[None]:
            seen.append(f"{label} {doing} {claim.uid}")
            try:
                yield
            except Exception as error:
                seen.append(f"{label} {type(error).__name__}")
                raise
            seen.append(f"{label} done")

        return observe

    service = DraService(Work(), observer("outer"), observer("inner"))
    server = SocketServer(tmp_path / "dra.sock", [service.handler()])
    kubelet = DraClient(tmp_path / "dra.sock")
    try:
        kubelet.call(dra_v1_pb2, verb.capitalize(), [("default", name, "u1")])
    finally:
        for close in (kubelet.channel.close, server.stop, service.close):
            close()
    end = {"good": "done", "bad": "ClaimError", "defect": "KeyError"}[name]
    assert seen == [f"outer {verb} u1", f"inner {verb} u1", f"inner {end}", f"outer {end}"]


def test_unprepare_answers_for_every_claim(serve: Callable[..., DraClient]) -> None:
    claims = [("default", name, f"uid-{name}") for name in ("good", "bad", "defect")]
    answers = serve(Work()).call(dra_v1_pb2, "Unprepare", claims)
    assert {uid: bool(answer.error) for uid, answer in answers.items()} == {
        "uid-good": False,
        "uid-bad": True,
        "uid-defect": True,
    }


@pytest.mark.parametrize("verb", ["Prepare", "Unprepare"])
def test_a_call_about_nothing_is_answered_with_nothing(serve: Callable[..., DraClient], verb: str) -> None:
    assert serve(Work()).call(dra_v1_pb2, verb, []) == {}


def test_a_claim_named_twice_is_prepared_once_and_answered_once(serve: Callable[..., DraClient]) -> None:
    work = Work()
    answers = serve(work).call(dra_v1_pb2, "Prepare", [("default", "good", "u1")] * 2)
    assert len(answers["u1"].devices) == 1
    assert work.calls == ["good"]


HOSTILE = {
    "parent directories in the uid": ("default", "good", "../../etc/passwd"),
    "parent directories in the name": ("default", "../../pods", "u1"),
    "parent directories in the namespace": ("..", "good", "u1"),
    "an empty uid": ("default", "good", ""),
    "an empty name": ("default", "", "u1"),
    "an empty namespace": ("", "good", "u1"),
    "a line break": ("default", "good\n", "u1"),
    "a null character": ("default", "good", "u\x00"),
    "a question mark": ("default", "good?watch=true", "u1"),
    "a slash": ("default", "good/status", "u1"),
    "capital letters in the name": ("default", "Good", "u1"),
    "letters of another alphabet": ("default", "gооd", "u1"),  # noqa: RUF001 - that is the point
}


@pytest.mark.parametrize("claim", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("verb", ["Prepare", "Unprepare"])
def test_a_reference_that_is_none_is_refused_before_anything_is_done(
    serve: Callable[..., DraClient], verb: str, claim: tuple[str, str, str]
) -> None:
    work = Work()
    answers = serve(work).call(dra_v1_pb2, verb, [claim, ("default", "good", "ok")])
    assert "the kubelet's claim reference has" in answers[claim[2]].error
    assert answers["ok"].error == ""
    assert work.calls == ["good"]


def test_very_long_references_are_answered(serve: Callable[..., DraClient], node: NodeUnderTest) -> None:
    long = "a" * 100_000
    kubelet = serve(node.preparer)
    assert kubelet.call(dra_v1_pb2, "Prepare", [("default", long, long)])[long].error
    assert not kubelet.call(dra_v1_pb2, "Unprepare", [("default", long, long)])[long].error
    assert node.nothing_left()


def test_eight_claims_of_one_call_are_worked_on_at_once(serve: Callable[..., DraClient]) -> None:
    work = Work()
    work.meet = threading.Barrier(8, timeout=60)
    claims = [("default", f"good-{i}", f"u{i}") for i in range(8)]
    assert not any(answer.error for answer in serve(work).call(dra_v1_pb2, "Prepare", claims).values())


def test_the_kubelet_hears_in_time_of_a_claim_that_takes_too_long_and_the_others_are_prepared(
    serve: Callable[..., DraClient], node: NodeUnderTest
) -> None:
    slow = node.api.allocate("slow", "gpu-0-mig-1g10gb-6")
    good = node.api.allocate("good", "gpu-1-mig-1g10gb-6")
    claims = [("default", claim.name, claim.uid) for claim in (slow, good)]
    kubelet = serve(node.preparer, waits=node.locks.waits, answer_timeout_seconds=1.0)
    gpu = node.node.inventory.gpus[0].uuid

    def prepared(wanted: Sequence[tuple[str, str, str]]) -> Any:
        """The answers to a call once the last claim of it was prepared in time, which takes a moment."""
        answers = kubelet.call(dra_v1_pb2, "Prepare", wanted)
        return None if answers[wanted[-1][2]].error else answers

    with node.locks.hold([gpu], "claim default/hung"):
        answers = wait_for(lambda: prepared(claims), SOON_S, "the other claim is prepared")
    assert answers[good.uid].devices[0].device_name == "gpu-1-mig-1g10gb-6"
    error = answers[slow.uid].error
    assert error.startswith("claim default/slow: can't prepare it within 1 s, still in progress; ")
    assert f"claim default/slow waits for {gpu}, which is in use by claim default/hung" in error
    answers = wait_for(lambda: prepared(claims[:1]), SOON_S, "the hung one has let go")
    assert answers[slow.uid].devices[0].device_name == "gpu-0-mig-1g10gb-6"


def test_a_pod_with_a_good_and_a_bad_claim_on_real_parts(serve: Callable[..., DraClient], node: NodeUnderTest) -> None:
    good = node.api.allocate("good", "gpu-0-mig-1g10gb-6")
    far = node.api.allocate("far", result("gpu-0", pool="elsewhere"))
    claims = [("default", claim.name, claim.uid) for claim in (good, far)]
    kubelet = serve(node.preparer)
    answers = kubelet.call(dra_v1_pb2, "Prepare", claims)
    assert answers[good.uid].devices[0].device_name == "gpu-0-mig-1g10gb-6"
    assert "allocated from pool elsewhere" in answers[far.uid].error
    assert not any(answer.error for answer in kubelet.call(dra_v1_pb2, "Unprepare", claims).values())
    assert node.nothing_left()


def test_a_running_call_ends_before_the_server_does(tmp_path: Path) -> None:
    work = Work()
    work.meet = threading.Barrier(2, timeout=60)
    service = DraService(work)
    server = SocketServer(tmp_path / "dra.sock", [service.handler()])
    kubelet = DraClient(tmp_path / "dra.sock")
    answers: list[dict[str, Any]] = []
    claim = [("default", "good", "u1")]
    caller = threading.Thread(target=lambda: answers.append(kubelet.call(dra_v1_pb2, "Prepare", claim)))
    caller.start()
    while not work.calls:
        pass
    stopper = threading.Thread(target=server.stop)
    stopper.start()
    work.meet.wait()
    for thread in (caller, stopper):
        thread.join(60)
    service.close()
    kubelet.channel.close()
    assert answers[0]["u1"].error == ""
    assert not (tmp_path / "dra.sock").exists()


class Registered:
    """What the kubelet said about the registration."""

    def __init__(self) -> None:
        self.heard: list[tuple[bool, str]] = []

    def __call__(self, accepted: bool, reason: str) -> None:
        self.heard.append((accepted, reason))


def test_registration_tells_who_where_and_which_versions_newest_first(kubelet_dir: Path) -> None:
    heard, settings = Registered(), node_settings(node_name="n1", kubelet_dir=kubelet_dir)
    server = Registry(settings, heard)
    with grpc.insecure_channel(f"unix://{settings.registration_socket}") as channel:
        info = channel.unary_unary(
            "/pluginregistration.Registration/GetInfo",
            request_serializer=registration_messages.InfoRequest.SerializeToString,
            response_deserializer=registration_messages.PluginInfo.FromString,
        )(registration_messages.InfoRequest(), timeout=60)
        notify = channel.unary_unary(
            "/pluginregistration.Registration/NotifyRegistrationStatus",
            request_serializer=registration_messages.RegistrationStatus.SerializeToString,
            response_deserializer=registration_messages.RegistrationStatusResponse.FromString,
        )
        notify(registration_messages.RegistrationStatus(plugin_registered=True), timeout=60)
        notify(registration_messages.RegistrationStatus(plugin_registered=False, error="no such version"), timeout=60)
    server.stop()
    assert (info.type, info.name, info.endpoint) == ("DRAPlugin", "gpu.tessera.dev", str(settings.plugin_socket))
    health = ["v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"]
    assert list(info.supported_versions) == ["v1.DRAPlugin", *health]
    assert heard.heard == [(True, ""), (False, "the kubelet refused the registration: no such version")]


UNHEARD = "the kubelet has not registered this plugin: is its --root-dir really"


def waiting_for_the_kubelet() -> bool:
    return any(thread.name == "registration" for thread in threading.enumerate())


@pytest.fixture
def kubelet_dir() -> Iterator[Path]:
    """Shorter than pytest's own: a socket's path has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="tessera-") as directory:
        yield Path(directory)


def test_a_kubelet_that_never_comes_is_told_of_once(
    kubelet_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kubelet_sockets, "REGISTRATION_TIMEOUT_SECONDS", 0.05)
    heard = Registered()
    registry = Registry(node_settings(node_name="n1", kubelet_dir=kubelet_dir), heard)
    eventually(lambda: f"{UNHEARD} {kubelet_dir}? (--kubelet-dir)" in caplog.text, "it is told")
    eventually(lambda: not waiting_for_the_kubelet(), "nobody waits for more")
    registry.stop()
    assert caplog.text.count(UNHEARD) == 1
    assert heard.heard == [(False, f"{UNHEARD} {kubelet_dir}? (--kubelet-dir)")]


@pytest.mark.parametrize("accepted", [True, False])
def test_once_the_kubelet_has_come_or_the_plugin_ends_nobody_waits_for_it(
    kubelet_dir: Path, caplog: pytest.LogCaptureFixture, accepted: bool
) -> None:
    heard, settings = Registered(), node_settings(node_name="n1", kubelet_dir=kubelet_dir)
    registry = Registry(settings, heard)
    assert waiting_for_the_kubelet()
    with grpc.insecure_channel(f"unix://{settings.registration_socket}") as channel:
        channel.unary_unary(
            "/pluginregistration.Registration/NotifyRegistrationStatus",
            request_serializer=registration_messages.RegistrationStatus.SerializeToString,
            response_deserializer=registration_messages.RegistrationStatusResponse.FromString,
        )(registration_messages.RegistrationStatus(plugin_registered=accepted), timeout=60)
    eventually(lambda: not waiting_for_the_kubelet(), "the kubelet has come")
    registry.stop()
    Registry(settings, heard).stop()
    eventually(lambda: not waiting_for_the_kubelet(), "the plugin has ended")
    assert heard.heard == [(accepted, "" if accepted else "the kubelet refused the registration: ")]
    assert UNHEARD not in caplog.text


def test_the_socket_is_for_root_alone_and_replaces_a_stale_one(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "dra.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))  # left by a killed plugin: a file that nobody listens on
    server = SocketServer(path, [])
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    server.stop()
    assert not path.exists()


def test_a_socket_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken").mkdir()
    for path in (tmp_path / "file" / "dra.sock", tmp_path / "taken"):
        with pytest.raises(EnvironmentFault, match=rf"can't listen on {path}: .*is --kubelet-dir right\?"):
            SocketServer(path, [])
