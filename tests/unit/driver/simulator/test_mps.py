"""The simulated MPS control daemon: what was measured on an H200, and what NVIDIA's manual says of both protocols."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from driver.simulator.mps.control_program import connect_client
from driver.simulator.mps.limits import CudaError
from tests.harness.waiting import wait_for
from tests.support.mps import LEGACY, WITH_PROTOCOL_3, MpsNode, mps_node, running
from tests.support.nvml_client import set_compute_mode

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def mps() -> Iterator[MpsNode]:
    """A multi-user daemon of protocol 2."""
    with mps_node(LEGACY) as node:
        assert node.control("-d", "-M").returncode == 0
        yield node


@pytest.fixture
def modern() -> Iterator[MpsNode]:
    """A daemon of protocol 3 with server ``gpu``."""
    with mps_node(WITH_PROTOCOL_3) as node:
        assert node.control("-d", "-p", "3", "-m").returncode == 0
        node.module("server", "create", "gpu", f"--allowed-devices={node.gpu}")
        yield node


def gone(mps: MpsNode, *pids: int) -> None:
    """Wait until NVML lists none of these clients any more."""
    wait_for(lambda: not set(pids) & set(mps.clients()), 20, f"clients {pids} end")


def test_the_pipe_directory_has_what_a_real_one_has(mps: MpsNode) -> None:
    modes = {path.name: path.stat().st_mode for path in mps.pipe.iterdir()}
    assert stat.S_ISSOCK(modes["control"])
    assert modes["control"] & 0o006
    assert stat.S_ISSOCK(modes["control_privileged"])
    assert not modes["control_privileged"] & 0o077
    assert stat.S_ISFIFO(modes["log"])
    assert (mps.pipe / "nvidia-cuda-mps-control.pid").exists()
    assert "already running" in mps.control("-d").stdout


def test_a_daemon_that_has_only_its_lock_yet_keeps_others_out(mps: MpsNode) -> None:
    mps.commands("quit")
    wait_for(lambda: not running(mps.node.root), 20, "the daemon ends")
    with (mps.pipe / "control_lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "already running" in mps.control("-d").stdout
    assert mps.control("-d").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "stdin", "said"),
    [
        pytest.param((), "get_servers", "Unknown command: get_servers", id="unknown command"),
        pytest.param((), "get_server_status 1", "Server 1 not found", id="unknown server"),
        pytest.param((), "get_server_status", "wrong number of arguments", id="no server"),
        pytest.param((), "set_default_active_thread_percentage 101", "Invalid active thread", id="above 100 %"),
        pytest.param((), "set_default_device_pinned_mem_limit 0 6GiB", "Invalid memory limit: 6GiB", id="unit"),
        pytest.param(("-x",), "", "Unknown option: -x", id="unknown option"),
        pytest.param(("-d", "-p", "3"), "", "Unknown option: -p", id="a driver without protocol 3"),
        pytest.param(("server", "list"), "", "Unknown option: server", id="a driver without modules"),
    ],
)
def test_what_the_program_does_not_know_is_refused(
    mps: MpsNode, arguments: tuple[str, ...], stdin: str, said: str
) -> None:
    answer = mps.control(*arguments, stdin=stdin)
    assert (answer.returncode == 0) == bool(stdin), "a refused command is no failure of the program that sends it"
    assert said in answer.stdout


def test_without_a_daemon_commands_fail_and_programs_run_outside_of_mps_in_silence() -> None:
    with mps_node(LEGACY) as node:
        assert "Cannot find MPS control daemon" in node.control(stdin="get_server_list").stdout
        assert node.load("--memory", "60Gi").exit_code == 0
        assert node.clients() == []


def test_the_first_client_starts_a_server_and_nvml_lists_client_and_server_apart(mps: MpsNode) -> None:
    assert mps.servers() == []
    assert "client of MPS server" in mps.load("--memory", "1Gi", "--pid", "7").output
    [server] = mps.servers()
    assert mps.commands(f"get_client_list {server}").split() == ["7"]
    assert mps.clients() == [7]
    handle = mps.node.nvml.nvmlDeviceGetHandleByIndex(0)
    [process] = mps.node.nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    assert (process.pid, process.usedGpuMemory) == (server, 66 * MIB)


def test_the_environment_lowers_the_limit_of_the_server_and_does_not_raise_it(mps: MpsNode) -> None:
    mps.commands("set_default_device_pinned_mem_limit 0 2G")
    assert "OUT_OF_MEMORY: at most 1024Mi" in str(mps.load("--memory", "1100Mi", memory="0=1G").exception)
    assert mps.load("--memory", "1Gi", memory="0=1G").exit_code == 0
    assert "at most 2048Mi" in str(mps.load("--memory", "3Gi", memory="0=8G").exception)


def test_the_limit_is_by_process(mps: MpsNode) -> None:
    mps.commands("set_default_device_pinned_mem_limit 0 2G")
    for pid in ("7", "8"):
        assert mps.load("--memory", "2Gi", "--pid", pid).exit_code == 0


def test_a_default_counts_from_the_next_server_on_and_a_running_server_has_limits_of_its_own(mps: MpsNode) -> None:
    mps.load("--memory", "1Gi")
    mps.commands(f"set_default_device_pinned_mem_limit {mps.gpu} 2G")
    assert mps.load("--memory", "3Gi").exit_code == 0
    [server] = mps.servers()
    mps.commands(f"set_device_pinned_mem_limit {server} {mps.gpu} 1G")
    assert mps.commands(f"get_device_pinned_mem_limit {server} 0").strip() == "1G"
    assert "at most 1024Mi" in str(mps.load("--memory", "3Gi").exception)
    os.kill(server, signal.SIGKILL)
    gone(mps, *mps.clients())
    assert "at most 2048Mi" in str(mps.load("--memory", "3Gi").exception)


def test_the_percentage_of_threads_is_the_lower_of_servers_and_environments(mps: MpsNode) -> None:
    mps.load("--memory", "1Gi")
    [server] = mps.servers()
    mps.commands(f"set_active_thread_percentage {server} 50")
    assert "0 to 0.5" in str(mps.load("--sm", "0.6", threads="100").exception)
    assert "0 to 0.25" in str(mps.load("--sm", "0.3", threads="25").exception)


def test_other_users_share_a_multi_user_server_and_else_wait_for_its_clients(mps: MpsNode) -> None:
    for uid in (0, 1000):
        connect_client(mps.pipe, mps.gpu, GIB, {}, uid)
    assert len(mps.servers()) == 1
    with mps_node(LEGACY) as single:
        single.control("-d")
        assert single.load("--memory", "1Gi").exit_code == 0
        with pytest.raises(CudaError, match="wait until the clients of user 0 have ended"):
            connect_client(single.pipe, single.gpu, GIB, {}, 1000)
        before = single.servers()
        single.load("--clear")
        connect_client(single.pipe, single.gpu, GIB, {}, 1000)
        assert single.servers() != before


def test_an_illegal_address_ends_all_clients_and_the_next_gets_a_new_server(mps: MpsNode) -> None:
    for pid in ("7", "8"):
        mps.load("--memory", "1Gi", "--pid", pid)
    before = mps.servers()
    mps.node.faults.xid(0, 31)
    gone(mps, 7, 8)
    assert mps.load("--memory", "1Gi", "--pid", "9").exit_code == 0
    assert mps.clients() == [9]
    assert mps.servers() != before


def test_what_a_client_did_still_counts_when_its_server_dies(mps: MpsNode) -> None:
    mps.load("--sm", "0.5", "--pid", "7")
    [server] = mps.servers()
    os.kill(server, signal.SIGKILL)
    gone(mps, 7)
    loads = mps.node.gpu_state(0).loads
    [load] = loads.running
    assert load.until is not None
    at_end = loads.counters("", load.until).sm
    assert loads.counters("", load.until + 100).sm == at_end > 0


def test_a_daemon_that_dies_takes_its_server_along_and_another_starts_in_its_directory(mps: MpsNode) -> None:
    mps.load("--memory", "1Gi", "--pid", "7")
    os.kill(int((mps.pipe / "nvidia-cuda-mps-control.pid").read_text()), signal.SIGKILL)
    gone(mps, 7)
    assert mps.control("-d", "-M").returncode == 0
    assert mps.servers() == []
    assert mps.load("--memory", "1Gi", "--pid", "8").exit_code == 0


def test_quit_ends_servers_and_clients_and_leaves_no_socket(mps: MpsNode) -> None:
    mps.load("--memory", "1Gi", "--pid", "7")
    mps.commands("quit")
    gone(mps, 7)
    wait_for(lambda: not any(mps.pipe.iterdir()), 20, "the directory is empty")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_in_exclusive_mode_only_clients_of_the_server_get_the_gpu(mps: MpsNode, tmp_path: Path) -> None:
    set_compute_mode(mps.node, "EXCLUSIVE_PROCESS")
    for pid in ("7", "8"):
        assert mps.load("--memory", "1Gi", "--pid", pid).exit_code == 0
    assert "EXCLUSIVE_PROCESS; processes" in str(mps.load("--memory", "1Gi", "--pid", "9", pipe=tmp_path).exception)
    set_compute_mode(mps.node, "DEFAULT")
    assert mps.load("--memory", "1Gi", "--pid", "9", pipe=tmp_path).exit_code == 0


class TestProtocol3:
    def test_a_namespace_has_limits_of_its_own_and_none_without(self, modern: MpsNode) -> None:
        modern.module("server", "set", "gpu", "--pinned-memory-limit=1G")
        for name in ("small", "free"):
            modern.module("namespace", "create", name, "--server=gpu")
        modern.module("namespace", "set", "small", "--server=gpu", "--pinned-memory-limit=2G",
                      "--active-thread-percentage=30")  # fmt: skip
        assert "at most 1024Mi" in str(modern.load("--memory", "3Gi", pipe=modern.pipe / "gpu").exception)
        assert "at most 2048Mi" in str(modern.load("--memory", "3Gi", pipe=modern.pipe / "gpu/small").exception)
        assert "0 to 0.3" in str(modern.load("--sm", "0.5", pipe=modern.pipe / "gpu/small").exception)
        assert modern.load("--memory", "60Gi", pipe=modern.pipe / "gpu/free").exit_code == 0

    def test_an_entry_for_a_gpu_that_the_client_does_not_see_drops_its_memory_limit(self, modern: MpsNode) -> None:
        modern.module("server", "set", "gpu", "--pinned-memory-limit=1G")
        assert modern.load("--memory", "60Gi", pipe=modern.pipe / "gpu", memory="0=2G,1=4G").exit_code == 0

    def test_lists_are_tables_or_csv(self, modern: MpsNode) -> None:
        modern.module("namespace", "create", "a", "--server=gpu")
        modern.module("namespace", "set", "a", "--server=gpu", "--pinned-memory-limit=5000M")
        [server] = modern.module("server", "list", "--format=csv,noheader").splitlines()
        assert server.startswith("gpu,0,")
        assert server.endswith(f",Ready,{modern.pipe}/gpu,{modern.gpu},-")
        rows = modern.module("namespace", "list", "--server=gpu", "--format=csv,noheader").splitlines()
        assert rows[1] == f"a,gpu,Ready,5000M,100.00,0,{modern.pipe}/gpu/a"
        assert modern.module("namespace", "list").startswith("NAME  SERVER  SERVER STATUS")

    def test_what_is_deleted_has_no_directory_and_active_clients_need_force(self, modern: MpsNode) -> None:
        modern.module("namespace", "create", "a", "--server=gpu")
        modern.load("--memory", "1Gi", pipe=modern.pipe / "gpu/a")
        assert "has active clients" in modern.control("namespace", "delete", "a", "--server=gpu").stdout
        modern.module("namespace", "delete", "a", "--server=gpu", "--force")
        assert not (modern.pipe / "gpu/a").exists()
        assert "has active clients" in modern.control("server", "delete", "gpu").stdout
        modern.module("server", "delete", "gpu", "--force")
        assert not (modern.pipe / "gpu").exists()
        gone(modern, *modern.clients())

    def test_a_server_for_a_gpu_that_is_not_there_is_accepted_and_ends_at_once(self, modern: MpsNode) -> None:
        modern.module("server", "create", "other", "--allowed-devices=GPU-00000000")
        assert "other" not in modern.module("server", "list")
        assert "no CUDA-capable device" in (modern.logs / "other/server.log").read_text()

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("server", "create", "A"), "Invalid name: A"),
            (("server", "create", "gpu"), "server gpu already exists"),
            (("server", "create", "b", "--uid=7"), "only --uid=0"),
            (("server", "start", "b"), "Unknown command: server start"),
            (("namespace", "create", "a", "--server=b"), "server b not found"),
            (("namespace", "set", "a", "--server=gpu"), "namespace a not found"),
            (("namespace", "set", "default", "--server=gpu"), "At least one option"),
            (("namespace", "list", "--limit=1"), "Unknown option: --limit"),
            (("namespace", "create", "--server=gpu"), "wrong number of arguments"),
        ],
    )
    def test_what_a_command_may_not_say_is_refused(self, modern: MpsNode, words: tuple[str, ...], said: str) -> None:
        answer = modern.control(*words)
        assert answer.returncode == 1
        assert said in answer.stdout

    def test_the_daemon_keeps_its_protocol(self, modern: MpsNode) -> None:
        assert "protocol 3" in modern.control(stdin="get_server_list").stdout
        assert modern.control("-q").returncode == 0
        wait_for(lambda: not any(modern.pipe.iterdir()), 20, "the directory is empty")

    def test_a_configuration_file_starts_servers_with_their_namespaces(self, tmp_path: Path) -> None:
        with mps_node(WITH_PROTOCOL_3) as node:
            configuration = tmp_path / "mps.toml"
            configuration.write_text(
                f'[servers.gpu]\nallowed_devices = "{node.gpu}"\n'
                '[servers.gpu.namespaces.a]\npinned_memory_limit = "2G"\nactive_thread_percentage = "30"\n'
            )
            assert node.control("-d", "-p", "3", "-a", str(configuration)).returncode == 0
            assert "a,gpu,Ready,2G,30.00" in node.module("namespace", "list", "--format=csv")

    def test_a_configuration_file_with_an_unknown_key_starts_nothing(self, tmp_path: Path) -> None:
        with mps_node(WITH_PROTOCOL_3) as node:
            configuration = tmp_path / "mps.toml"
            configuration.write_text('[servers.gpu]\nmemory = "2G"\n')
            answer = node.control("-d", "-p", "3", "-a", str(configuration))
            assert (answer.returncode, answer.stdout) == (1, "servers.gpu.memory: unknown key\n")
            assert "Cannot find" in node.control("server", "list").stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_tenant_reads_on_the_plain_socket_and_changes_nothing(mps: MpsNode) -> None:
    (mps.pipe / "control_privileged").unlink()  # as in a container, which gets only the plain one
    assert mps.control(stdin="get_default_active_thread_percentage").stdout.strip() == "100.0"
    assert "Permission denied" in mps.control(stdin="set_default_active_thread_percentage 10").stdout
