"""A whole node plugin tells over HTTP whether it is alive and ready, and why it is not."""

from __future__ import annotations

import logging
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import grpc
import pynvml
import pytest

from driver.config.flag_values import ListenAddress
from driver.errors import StateError
from driver.hardware import host as hardware_host
from driver.kube.events import Recorder
from driver.model.plan import PATH
from driver.simulator.node import SimulatedNode
from kubelet_plugin.dra.protocol.generated import registration_v1_pb2
from kubelet_plugin.inventory import scan
from kubelet_plugin.metrics import probes
from kubelet_plugin.metrics.probes import CDI_REASONS, DirectoryProbe, SocketCheck
from kubelet_plugin.status.events import PluginEvents
from tests.harness.waiting import wait_for
from tests.support.api_server import SLICES, ObjectApi
from tests.support.claims import NODE
from tests.support.clock import FakeClock
from tests.support.disks import fill, remount, small_disk
from tests.support.faulty_api import STALE, FaultyApi, PluginOnApi
from tests.support.kubelet import REGISTRATION
from tests.support.metrics import fetch
from tests.support.plugin import is_of_monitors
from tests.support.ports import kept_port
from tests.support.running import eventually, in_thread

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

    def conditions(self) -> list[tuple[str, str]]:
        """What the plan's status says is wrong with the node."""
        status = self.api.folder(PATH)[NODE].get("status", {})
        return [(condition["type"], condition["message"]) for condition in status.get("conditions", ())]

    def unable(self, why: str) -> None:
        """Wait until the node says that no pod can start, offers nothing, and is ready all the same."""

        def said() -> bool:
            return any(kind == "Unable" and why in message for kind, message in self.conditions())

        wait_for(said, 60, f"the node is unable: {why}")
        slices = (item for item in self.api.folder(SLICES).values() if not is_of_monitors(item))
        devices = [device for item in slices for device in item["spec"].get("devices") or ()]
        assert all(any(taint["value"] == "unable" for taint in device["taints"]) for device in devices)
        assert self.ready()

    def fault(self, code: int) -> None:
        SimulatedNode.attach(self.root / "host").faults.fail("*", code=code)

    def event(self, reason: str) -> str:
        """What the Event of that reason on the Node says; nothing where there is none."""
        events = list(self.api.folder("/api/v1/namespaces/default/events").values())
        said = [e for e in events if (e["reason"], e["involvedObject"]["kind"]) == (reason, "Node")]
        return str(said[0]["message"]) if said else ""

    def slow(self, seconds: float) -> None:
        SimulatedNode.attach(self.root / "host").faults.slow(seconds)

    def well(self) -> None:
        SimulatedNode.attach(self.root / "host").faults.clear()


@contextmanager
def plugin(root: Path, caplog: pytest.LogCaptureFixture, *, new: bool = False, **flags: object) -> Iterator[Asked]:
    """``new``: the node has no slices yet."""
    with FaultyApi() as api, caplog.at_level(logging.INFO):
        whole = PluginOnApi(root, api, health_address="127.0.0.1:0", **flags)
        if new:
            api.drop(f"{SLICES}/{STALE}")
        with whole.running():

            def port() -> int:
                said = [r for r in caplog.records if r.getMessage() == "serving over HTTP"]
                return int(vars(said[0])["address"].rpartition(":")[2]) if said else 0

            yield Asked(root, api, wait_for(port, 60, "the health endpoint listens"))


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds takes tenths."""
    monkeypatch.setattr(scan, "SCAN_INTERVAL_SECONDS", 0.2)
    monkeypatch.setattr(scan, "MIN_SCAN_INTERVAL_SECONDS", 0.1)
    monkeypatch.setattr(scan, "EVENT_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(hardware_host, "GPU_ANSWER_TIMEOUT_SECONDS", 1.0)
    monkeypatch.setattr(probes, "SCAN_TIMEOUT_SECONDS", 3.0)
    monkeypatch.setattr(probes, "DIRECTORY_PROBE_INTERVAL_SECONDS", 0.2)


@pytest.fixture
def asked(root: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Asked]:
    with plugin(root, caplog) as found:
        yield found


def test_it_is_ready_only_once_the_kubelet_has_accepted_it(asked: Asked) -> None:
    asked.fails("registered", "the kubelet has not called")
    asked.register(accepted=False, error="another plugin has that name")
    asked.fails("registered", "failed: the kubelet refused the registration: another plugin has that name")
    asked.register()
    wait_for(asked.ready, 60, "it is ready")
    assert asked.alive()


def test_nothing_is_published_before_the_kubelet_has_registered_the_plugin(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with plugin(root, caplog, new=True) as asked:
        asked.fails("registered", "the kubelet has not called")
        asked.fails("slices", "they have not been published yet")
        assert not asked.api.folder(SLICES)
        asked.register()
        wait_for(asked.ready, 60, "it is ready")
        assert asked.api.folder(SLICES)


def test_a_node_object_that_no_kubelet_has_written_to_waits_for_none(root: Path) -> None:
    with FaultyApi() as api:
        whole = PluginOnApi(root, api)
        api.store(f"/api/v1/nodes/{NODE}", status={})
        api.drop(f"{SLICES}/{STALE}")
        with whole.running():
            wait_for(whole.published, 60, "the slices are published")


def test_it_lives_without_an_api_server_and_is_ready_again_with_it(asked: Asked) -> None:
    asked.register()
    wait_for(asked.ready, 60, "it is ready")
    asked.api.down()
    asked.fails("api", "no answer")
    assert asked.alive()
    asked.api.up()
    wait_for(asked.ready, 60, "it is ready again")


@pytest.mark.long
def test_hardware_that_fails_or_hangs_is_no_reason_to_be_killed_but_to_be_unready(asked: Asked) -> None:
    asked.register()
    wait_for(asked.ready, 60, "it is ready")
    asked.fault(pynvml.NVML_ERROR_GPU_IS_LOST)
    asked.fails("hardware", "no GPU responds")
    asked.well()
    wait_for(asked.ready, 60, "it is ready again")
    asked.slow(5.0)
    asked.fails("hardware", "")
    assert asked.alive()
    asked.well()
    wait_for(asked.ready, 60, "it is ready once more")


def test_a_socket_that_nobody_listens_on_ends_the_life_of_the_process_after_a_minute(root: Path) -> None:
    now = [0.0]
    path = root / "silent.sock"
    check = SocketCheck(path, lambda: now[0])
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        now[0] = 100.0
        assert check.failure() is None
    assert check.failure() is None
    now[0] = 161.0
    assert f"no process has listened on {path} for 61 s" in str(check.failure())


def test_a_plugin_whose_socket_was_deleted_is_not_alive_after_a_minute(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked.register()
    wait_for(asked.ready, 60, "it is ready")
    assert asked.alive()
    monkeypatch.setattr(probes, "SOCKET_TIMEOUT_SECONDS", 0.0)
    (asked.root / "k/plugins/gpu.tessera.dev/dra.sock").unlink()
    wait_for(lambda: not asked.alive(), 60, "it asks to be restarted")


@pytest.mark.long
def test_a_node_without_nvidia_uvm_offers_nothing_until_it_can_be_made(asked: Asked) -> None:
    """Hosts make it when the first program uses CUDA; its number is in /proc/devices, if the module is loaded."""
    asked.register()
    wait_for(asked.ready, 60, "it is ready")
    uvm, numbers = asked.root / "host/dev/nvidia-uvm", asked.root / "host/proc/devices"
    before = numbers.read_text()
    uvm.unlink()
    wait_for(uvm.exists, 60, "it is made again")
    assert not asked.conditions()
    numbers.chmod(0o644)
    numbers.write_text(before.replace("nvidia-uvm", "other"))
    uvm.unlink()
    asked.unable(f"{uvm} is missing: {numbers} has no line for nvidia-uvm")
    assert "nvidia-uvm" in asked.event("NodeUnable")
    numbers.write_text(before)
    wait_for(lambda: not asked.conditions(), 60, "it is made")
    wait_for(lambda: "no longer" in asked.event("NodeAble"), 60, "the Event")


@pytest.mark.long
def test_nvidia_modprobe_of_the_driver_makes_nvidia_uvm(asked: Asked) -> None:
    asked.register()
    wait_for(asked.ready, 60, "it is ready")
    host = asked.root / "host"
    tool, uvm = host / "usr/bin/nvidia-modprobe", host / "dev/nvidia-uvm"
    tool.write_text("#!/bin/sh\necho no such module; exit 1\n")
    tool.chmod(0o755)
    uvm.unlink()
    asked.unable("nvidia-modprobe -u does not make it: no such module")
    tool.write_text(f'#!/bin/sh\n[ "$1" = -u ] && : > {uvm}\n')
    wait_for(lambda: not asked.conditions(), 60, "it is made")


@pytest.mark.long
def test_a_node_without_libcuda_offers_nothing(asked: Asked) -> None:
    asked.register()
    wait_for(asked.ready, 60, "it is ready")
    [library] = (asked.root / "host").rglob("libcuda.so.1")
    library.rename(library.with_name("away"))
    asked.unable(f"no libcuda.so.1 below {asked.root}/host")
    library.with_name("away").rename(library)
    wait_for(lambda: not asked.conditions(), 60, "it is found again")


def test_a_state_directory_that_takes_no_file_is_named(asked: Asked) -> None:
    asked.register()
    wait_for(asked.ready, 60, "it is ready")
    state, elsewhere = asked.root / "state", asked.root / "elsewhere"
    state.rename(elsewhere)
    asked.fails("checkpoint", f"can't write {state}")
    elsewhere.rename(state)
    wait_for(asked.ready, 60, "it is ready again")


@pytest.mark.long
@pytest.mark.parametrize(
    ("folder", "reasons"),
    [
        ("state", ("StateDirectoryUnwritable", "StateDirectoryWritable")),
        ("cdi", ("CdiDirectoryUnwritable", "CdiDirectoryWritable")),
    ],
)
def test_a_full_or_read_only_disk_is_reported_until_it_takes_files_again(
    root: Path, caplog: pytest.LogCaptureFixture, folder: str, reasons: tuple[str, str]
) -> None:
    """By an Event; of the state directory also by /readyz, of the CDI directory by the plan's status."""
    disk = root / folder
    with small_disk(disk, "1m"), plugin(root, caplog) as asked:
        asked.register()
        wait_for(asked.ready, 60, "it is ready")

        def full() -> bool:
            fill(disk)  # again and again: a probe that just ended gave back what it had
            return "No space left on device" in asked.event(reasons[0])

        wait_for(full, 60, "the Event says why, without a request to /readyz")
        failed = asked.unable if folder == "cdi" else partial(asked.fails, "checkpoint")
        failed(f"can't write {disk}: No space left on device")
        fill(disk).unlink()
        wait_for(asked.ready, 60, "it is ready again")
        wait_for(lambda: not asked.conditions(), 60, "the node is able again")
        wait_for(lambda: "is writable" in asked.event(reasons[1]), 60, "the Event says so")
        remount(disk, "ro")
        failed(f"can't write {disk}: Read-only file system")
        wait_for(lambda: "Read-only file system" in asked.event(reasons[0]), 60, "the Event says why")
        remount(disk, "rw")
        wait_for(asked.ready, 60, "it is ready once more")
        wait_for(lambda: not asked.conditions(), 60, "the node is able")
        assert not list(disk.glob("*.tmp"))


def test_the_newer_event_of_the_two_is_the_state_of_a_directory_while_it_lasts_and_after_a_restart(
    tmp_path: Path,
) -> None:
    clock, failure = FakeClock(), [""]

    def write() -> None:
        if failure[0]:
            raise StateError(failure[0])

    with ObjectApi() as api:
        recorder = Recorder(api.server.client(), "tessera-node", "node-a", clock)
        teller = PluginEvents(recorder.event, "node-a")

        def started() -> DirectoryProbe:
            return DirectoryProbe(tmp_path, write, CDI_REASONS, teller, clock)

        def probed(probe: DirectoryProbe, why: str, times: int) -> None:
            """Every 10 s; each time the newer of the two Events says what is the case, and is recent if it is bad."""
            failure[0] = why
            for _ in range(times):
                probe.probe()
                eventually(lambda: clock.waiters == 1, "the Events are written")
                events = list(api.folder("/api/v1/namespaces/default/events").values())
                newest = max(events, key=lambda event: str(event["lastTimestamp"]))
                assert newest["reason"] == ("CdiDirectoryUnwritable" if why else "CdiDirectoryWritable")
                assert why in newest["message"]
                age = clock.now() - datetime.fromisoformat(str(newest["lastTimestamp"]))
                assert not why or age < timedelta(seconds=90)
                assert probe.failure() == (why or None)
                clock.advance(10)

        with in_thread(recorder.run, recorder.wake):
            first = started()
            assert "no file has been written" in str(first.failure())
            probed(first, "", 3)
            probed(first, "full", 3)
            probed(first, "", 20)
            probed(first, "full", 20)
            probed(first, "read-only", 2)
            probed(started(), "read-only", 2)
            probed(started(), "", 20)


def test_a_cdi_directory_that_is_deleted_is_created_again_and_the_node_says_so(asked: Asked) -> None:
    asked.register()
    wait_for(asked.ready, 60, "it is ready")
    shutil.rmtree(asked.root / "cdi")
    wait_for((asked.root / "cdi").is_dir, 60, "the directory is there again")
    wait_for(lambda: f"{asked.root}/cdi was missing" in asked.event("CdiDirectoryRestored"), 60, "the Event")
    wait_for(asked.ready, 60, "it is ready again")


@pytest.mark.long
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
