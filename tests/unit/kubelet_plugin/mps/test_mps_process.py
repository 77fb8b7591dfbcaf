"""The process of the MPS daemons and the plugin's client: what claims get, what survives, what is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from driver.errors import MpsError
from kubelet_plugin.mps import client as client_module
from kubelet_plugin.mps.client import MpsAccess, MpsClient, MpsShare, largest, lost_gpus, namespace_of, protocol_for
from kubelet_plugin.mps.protocol import LEGACY, NAMESPACES, SERVER, VERSION, DaemonState, gpu_directory
from tests.harness.waiting import wait_for
from tests.support.mps import LEGACY as DRIVER_580
from tests.support.mps import WITH_PROTOCOL_3 as DRIVER_615
from tests.support.mps import MpsProcess, mps_node, mps_process, running

GIB = 1 << 30
CLAIM, OTHER = (namespace_of(f"0f3c9d1e-7a41-4b8e-9c60-1d2e3f4a5b{n:02x}") for n in (1, 2))


@pytest.fixture(params=[DRIVER_580, DRIVER_615], ids=["protocol 2", "protocol 3"])
def process(request: pytest.FixtureRequest) -> Iterator[MpsProcess]:
    with mps_process(request.param) as started:
        yield started


@pytest.fixture
def legacy() -> Iterator[MpsProcess]:
    with mps_process(DRIVER_580) as started:
        yield started


def ensure(process: MpsProcess) -> DaemonState:
    version = process.mps.node.description.driver_version
    return process.client.ensure_daemon(process.mps.gpu, protocol_for(version))


def admit(process: MpsProcess, name: str, share: MpsShare, *others: MpsShare) -> MpsAccess:
    return process.client.admit(ensure(process), name, share, others)


def complaint(process: MpsProcess, access: MpsAccess, *load: str) -> str:
    """Why a load fails; "": it does not."""
    return str(process.load(access, *load).exception or "")


def test_each_claim_is_held_to_its_memory_and_threads(process: MpsProcess) -> None:
    small, large = MpsShare(2 * GIB, 30), MpsShare(6 * GIB, 60)
    first = admit(process, CLAIM, small)
    second = admit(process, OTHER, large, small)
    assert "at most 2048Mi" in complaint(process, first, "--memory", "3Gi")
    assert "at most 6144Mi" in complaint(process, second, "--memory", "7Gi")
    assert "0 to 0.3:" in complaint(process, first, "--sm", "0.4")
    assert not complaint(process, first, "--memory", "2Gi", "--sm", "0.3", "--pid", "7")
    assert not complaint(process, second, "--memory", "6Gi", "--sm", "0.6", "--pid", "8")
    assert sorted(process.mps.clients()) == [7, 8]


def test_a_claim_without_a_percentage_has_all_threads(process: MpsProcess) -> None:
    admit(process, CLAIM, MpsShare(2 * GIB, 30))
    access = admit(process, OTHER, MpsShare(2 * GIB), MpsShare(2 * GIB, 30))
    assert not complaint(process, access, "--sm", "1.0")


def test_an_admission_that_is_repeated_is_the_same_and_a_changed_one_replaces_it(process: MpsProcess) -> None:
    assert admit(process, CLAIM, MpsShare(2 * GIB)) == admit(process, CLAIM, MpsShare(2 * GIB))
    access = admit(process, CLAIM, MpsShare(4 * GIB))
    assert "at most 4096Mi" in complaint(process, access, "--memory", "5Gi")
    [state] = process.client.daemons()
    assert state.namespaces in ((), (CLAIM,))


def test_containers_get_no_socket_that_takes_every_command(process: MpsProcess) -> None:
    access = admit(process, CLAIM, MpsShare(2 * GIB))
    names = {path.name for path in Path(access.host_path).iterdir()}
    assert "control" in names
    assert names <= {"control", "log"}


def test_the_socket_and_the_daemons_directories_are_roots_alone(process: MpsProcess) -> None:
    assert stat.S_IMODE((process.directory / "socket").stat().st_mode) == 0o600
    assert stat.S_IMODE(process.directory.stat().st_mode) == 0o700


def test_what_is_dismissed_holds_nobody_any_more(process: MpsProcess) -> None:
    small, large = MpsShare(2 * GIB), MpsShare(6 * GIB)
    admit(process, CLAIM, small)
    gone = admit(process, OTHER, large, small)
    daemon = ensure(process)
    for _ in range(2):
        process.client.dismiss(daemon, OTHER, [small])
    if daemon.protocol == NAMESPACES:
        assert not Path(gone.host_path).exists()
    else:
        assert "at most 2048Mi" in complaint(process, gone, "--memory", "3Gi")


def test_the_last_claims_end_leaves_no_process_no_directory_no_memory(process: MpsProcess) -> None:
    access = admit(process, CLAIM, MpsShare(2 * GIB))
    process.load(access, "--memory", "1Gi", "--pid", "7")
    daemon = ensure(process)
    for _ in range(2):
        process.client.dismiss(daemon, CLAIM, [])
        process.client.end_daemon(process.mps.gpu)
    assert process.client.daemons() == []
    assert {path.name for path in process.directory.iterdir()} == {"socket", "lock"}
    assert running(process.mps.node.root) == []
    assert process.mps.node.processes(0) == []


@pytest.mark.parametrize("victim", ["worker", "both"])
def test_a_kill_of_the_process_touches_no_client(process: MpsProcess, victim: str) -> None:
    access = admit(process, CLAIM, MpsShare(2 * GIB))
    process.load(access, "--memory", "1Gi", "--pid", "7")
    [before] = process.client.daemons()
    if victim == "worker":
        dead = process.worker
        os.kill(dead, signal.SIGKILL)
        wait_for(lambda: process.worker not in (0, dead) and process.answers(), 30, "another worker serves")
    else:
        process.kill()
        process.start()
    assert process.client.daemons() == [before]
    assert ensure(process) == before
    assert process.mps.clients() == [7]
    assert not complaint(process, access, "--memory", "1Gi", "--pid", "8")


def test_a_daemon_that_dies_is_reported_and_its_claims_get_another(process: MpsProcess) -> None:
    share = MpsShare(2 * GIB, 30)
    access = admit(process, CLAIM, share)
    process.load(access, "--memory", "1Gi")
    before = process.client.daemons()
    os.kill(before[0].pid, signal.SIGKILL)
    wait_for(lambda: process.client.daemons()[0].pid == 0, 20, "the daemon is seen to be dead")
    assert lost_gpus(before, process.client.daemons()) == {
        process.mps.gpu: f"MPS control daemon {before[0].pid} has ended"
    }
    process.client.dismiss(before[0], OTHER, [share])  # other claims can be released meanwhile
    assert admit(process, CLAIM, share) == access
    assert "at most 2048Mi" in complaint(process, access, "--memory", "3Gi")
    assert not complaint(process, access, "--memory", "1Gi", "--sm", "0.3")


def test_a_server_of_namespaces_that_dies_is_reported_and_its_claims_get_another() -> None:
    with mps_process(DRIVER_615) as process:
        share = MpsShare(2 * GIB, 30)
        access = admit(process, CLAIM, share)
        before = process.client.daemons()
        os.kill(before[0].servers[0], signal.SIGKILL)
        wait_for(lambda: process.client.daemons()[0].servers == (), 20, "the server is seen to be dead")
        assert lost_gpus(before, process.client.daemons())[process.mps.gpu].startswith("MPS server ")
        assert admit(process, CLAIM, share) == access
        assert "at most 2048Mi" in complaint(process, access, "--memory", "3Gi")


def test_a_daemon_that_gives_no_answer_has_lost_no_server() -> None:
    before = [DaemonState("GPU-1", LEGACY, 7, servers=(8,))]
    assert lost_gpus(before, [DaemonState("GPU-1", LEGACY, 7, answers=False)]) == {}
    assert lost_gpus(before, []) == {"GPU-1": "MPS control daemon 7 has ended"}


def test_a_server_for_one_user_that_gives_way_to_another_users_is_no_loss() -> None:
    states = [DaemonState("GPU-1", LEGACY, 7, multi_user=False, servers=(server,)) for server in (8, 9)]
    assert lost_gpus(states[:1], states[1:]) == {}


def test_a_server_that_dies_is_reported_and_the_next_one_has_the_limits(legacy: MpsProcess) -> None:
    access = admit(legacy, CLAIM, MpsShare(2 * GIB), MpsShare(4 * GIB))
    legacy.load(access, "--memory", "1Gi", "--pid", "7")
    before = legacy.client.daemons()
    [server] = before[0].servers
    os.kill(server, signal.SIGKILL)
    wait_for(lambda: not legacy.mps.clients(), 20, "its client fails")
    assert not complaint(legacy, access, "--memory", "1Gi", "--pid", "8")
    assert lost_gpus(before, legacy.client.daemons()) == {legacy.mps.gpu: f"MPS server {server} has ended"}
    bare = access._replace(environment={})
    assert "at most 4096Mi" in complaint(legacy, bare, "--memory", "5Gi")


def test_a_claim_that_sheds_its_environment_has_at_most_the_largest_claims_memory(legacy: MpsProcess) -> None:
    access = admit(legacy, CLAIM, MpsShare(2 * GIB))
    legacy.load(access, "--memory", "1Gi", "--pid", "7")
    admit(legacy, OTHER, MpsShare(6 * GIB), MpsShare(2 * GIB))
    bare = access._replace(environment={})
    assert not complaint(legacy, bare, "--memory", "6Gi", "--pid", "8")
    assert "at most 6144Mi" in complaint(legacy, bare, "--memory", "7Gi", "--pid", "9")


def test_a_second_process_waits_for_the_first(legacy: MpsProcess) -> None:
    second = MpsProcess(legacy.mps, legacy.directory)
    first = legacy.worker
    second.start()
    assert Path(f"/proc/{first}").exists()
    legacy.kill()
    wait_for(second.answers, 30, "the second serves")
    second.kill()


def test_the_process_ends_when_it_is_told_to_and_daemons_stay(legacy: MpsProcess) -> None:
    daemon = ensure(legacy)
    os.kill(legacy.pid, signal.SIGTERM)
    assert legacy.wait() == 0
    assert Path(f"/proc/{daemon.pid}").exists()


def test_the_serving_process_has_at_most_15_mib(legacy: MpsProcess) -> None:
    ensure(legacy)
    status = Path(f"/proc/{legacy.worker}/status").read_text()
    assert int(status.split("VmRSS:")[1].split()[0]) <= 15 * 1024


class TestWithoutMultiUserServers:
    """A driver whose daemon has no -M."""

    @pytest.fixture
    def single(self, legacy: MpsProcess) -> MpsProcess:
        program = legacy.mps.program
        refusal = 'if "-M" in sys.argv:\n    sys.exit("Unknown option: -M")\n'
        program.write_text(program.read_text().replace("import sys\n", f"import sys\n{refusal}"))
        return legacy

    def test_the_daemon_serves_the_user_that_the_administrator_set(self, single: MpsProcess) -> None:
        daemon = single.client.ensure_daemon(single.mps.gpu, LEGACY, uid=0)
        assert not daemon.multi_user
        assert len(daemon.servers) == 1

    def test_claims_are_limited_all_the_same(self, single: MpsProcess) -> None:
        access = admit(single, CLAIM, MpsShare(2 * GIB))
        assert "at most 2048Mi" in complaint(single, access, "--memory", "3Gi")


@pytest.mark.parametrize(
    ("request_fields", "said"),
    [
        ({"request": "reboot"}, "request 'reboot' is not known; accepted: status, start, limit, remove, end"),
        ({"request": "end"}, "the request is not valid: KeyError: 'gpu'"),
        ({"request": "end", "gpu": "../../etc"}, "gpu: '../../etc' is no UUID of a GPU"),
        ({"request": "end", "gpu": "GPU-/etc"}, "is no UUID"),
        ({"request": "limit", "gpu": "GPU-1", "memory": 1}, "the MPS control daemon of GPU-1 does not run"),
        ({"request": "limit", "gpu": "GPU-1", "memory": 1, "version": VERSION + 2}, "version: 3 is not understood"),
        ({"request": "status", "version": "1"}, "version: 1 is not understood"),
        (["status"], "the request is not valid: TypeError"),
    ],
)
def test_a_wrong_request_is_refused_with_its_reason(legacy: MpsProcess, request_fields: object, said: str) -> None:
    if isinstance(request_fields, dict):
        request_fields = {"version": VERSION, **request_fields}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(legacy.directory / "socket"))
        connection.sendall(json.dumps(request_fields).encode() + b"\n")
        answer = json.loads(connection.makefile().readline())
    assert said in answer["error"]


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_a_plugin_one_version_older_or_newer_is_served(
    legacy: MpsProcess, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "VERSION", version)
    assert ensure(legacy).pid


class TestWithoutTheProcess:
    def test_the_error_names_the_pods(self, tmp_path: Path) -> None:
        with mps_node(DRIVER_580) as node, pytest.raises(MpsError, match="no MPS daemon pod answers on this node: /"):
            MpsClient(tmp_path, node.node.root, needs_library=False).ensure_daemon(node.gpu, LEGACY)

    def test_a_driver_without_the_program_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(MpsError, match="usr/bin/nvidia-cuda-mps-control does not exist: install it"):
            MpsClient(tmp_path, tmp_path).ensure_daemon("GPU-1", LEGACY)

    @pytest.mark.parametrize(
        ("answer", "said"),
        [
            (b"", "gave no valid answer"),
            (b"[]\n", "gave no valid answer"),
            (b'{"version": 3, "daemons": []}\n', "speaks version 3 of the protocol, this plugin 1: delete the pod"),
            (b'{"version": 1}\n', "gave no valid answer: KeyError"),
            (b'{"version": 1, "error": "no space left"}\n', "status: no space left"),
        ],
    )
    def test_a_strange_answer_is_an_error_of_mps(self, answer: bytes, said: str) -> None:
        with mps_node(DRIVER_580) as node, socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(node.pipe / "socket"))
            listening.listen()
            client = MpsClient(node.pipe, node.node.root, needs_library=False)
            if (pid := os.fork()) == 0:
                connection, _ = listening.accept()
                connection.makefile().readline()
                connection.sendall(answer)
                os._exit(0)
            with pytest.raises(MpsError, match=said):
                client.daemons()
            os.waitpid(pid, 0)


def test_a_program_that_fails_is_quoted(legacy: MpsProcess) -> None:
    legacy.mps.program.write_text("#!/bin/sh\necho out of luck >&2\nexit 7\n")
    with pytest.raises(MpsError, match=r"nvidia-cuda-mps-control -d ended with status 7 and said: out of luck"):
        ensure(legacy)


def test_the_largest_claim_counts_and_one_without_a_percentage_is_without_limit() -> None:
    assert largest([MpsShare(2, 30), MpsShare(6, 20)]) == MpsShare(6, 30)
    assert largest([MpsShare(2, 30), MpsShare(1)]) == MpsShare(2, None)


@pytest.mark.parametrize(
    ("version", "protocol"), [("580.159.04", 2), ("614.1", 2), ("615.71.09", 3), ("700.0", 3), ("", 2)]
)
def test_namespaces_are_used_where_the_driver_has_them(version: str, protocol: int) -> None:
    assert protocol_for(version) == protocol


def test_paths_of_namespaces_fit_into_the_address_of_a_socket() -> None:
    name = namespace_of("0f3c9d1e-7a41-4b8e-9c60-1d2e3f4a5b6c")
    directory = gpu_directory("/run/tessera-mps", "GPU-c98f8865-9e72-5766-a9ac-aa6f830ee06f")
    assert len(f"{directory}/pipe/{SERVER}/{name}/control") <= 107
