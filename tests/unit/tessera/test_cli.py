"""The command line: exit codes, and messages that say what to do."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import click
import grpc
import pytest
import yaml
from click.testing import CliRunner, Result

from kubelet_plugin.dra.protocol.generated import dra_v1_pb2
from tessera.cli import main, node
from tests.harness.waiting import wait_for

KUBECONFIG = {
    "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
    "users": [{"name": "u", "user": {"token": "t"}}],
    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
    "current-context": "x",
}

START_S = 60.0
"""A process that shares two cores with everything else may take its time."""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Shorter than pytest's own: a socket's path has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="tessera-") as directory:
        yield Path(directory)


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Flags with which ``tessera node`` would start."""
    (tmp_path / "config").write_text(yaml.safe_dump(KUBECONFIG))
    pairs = {
        "--node-name": "node-a",
        "--kubeconfig": tmp_path / "config",
        "--gpus": "sim:h100-1",
        "--sim-latency": "zero",
        "--kubelet-dir": tmp_path / "kubelet",
        "--cdi-dir": tmp_path / "cdi",
        "--host-root": tmp_path / "host",
    }
    return [str(part) for pair in pairs.items() for part in pair]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_help_of_every_command_has_examples() -> None:
    for command in (
        (),
        ("node",),
        ("cordon",),
        ("uncordon",),
        ("drain",),
        ("template",),
        ("kueue",),
        ("kueue", "config"),
        ("map",),
        ("sim",),
        ("sim", "list"),
        ("sim", "smi"),
    ):
        answer = run(*command, "--help")
        assert answer.exit_code == 0
        assert "Examples:" in answer.output
        assert "tessera " in answer.output


SIMULATOR_DOC = (Path(__file__).parents[3] / "docs" / "simulator.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", [run("--help").output, run("sim", "--help").output, SIMULATOR_DOC])
def test_every_example_of_a_simulated_node_says_which_cluster_it_needs(text: str) -> None:
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    examples = [line[2:] for line in lines if line[:2] == ["tessera", "node"]]
    assert examples
    # click keeps a command's help option from its first context: without the parent, -h would be unknown from then on.
    parent = click.Context(main, **main.context_settings)
    for example in examples:
        assert node.make_context("node", list(example), parent=parent).params["kubeconfig"] is not None


def test_the_version_is_told() -> None:
    assert run("--version").output.startswith("tessera, version ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(["--log-level", "loud"], "'loud' is not one of 'debug', 'info', 'warning'", id="log level"),
        pytest.param(["--gpus", "amd"], "--gpus amd: must be nvml, sim:NAME", id="GPUs"),
        pytest.param(["--gpus", "sim:cray-1"], "dgx-h100", id="unknown simulated node"),
        pytest.param(["--driver-name", "Bad"], "--driver-name Bad: must be a DNS subdomain", id="driver name"),
        pytest.param(["--sim-latency", "soon"], "soon", id="latency"),
        pytest.param(["--no-such-flag"], "No such option", id="unknown flag"),
    ],
)
def test_what_makes_no_sense_is_exit_code_2(flags: list[str], arguments: list[str], expected: str) -> None:
    answer = run("node", *flags, *arguments)
    assert answer.exit_code == 2
    assert expected in answer.output


def test_the_node_name_is_asked_for() -> None:
    answer = CliRunner(env={"NODE_NAME": ""}).invoke(main, ["node"])
    assert answer.exit_code == 2
    assert "--node-name" in answer.output


def test_a_missing_kubeconfig_is_exit_code_3(flags: list[str], tmp_path: Path) -> None:
    answer = run("node", *flags, "--kubeconfig", str(tmp_path / "nowhere"))
    assert answer.exit_code == 3
    assert f"--kubeconfig {tmp_path / 'nowhere'} can't be used" in answer.output


@pytest.mark.parametrize("flag", ["--cdi-dir", "--state-dir"])
def test_a_directory_that_cannot_be_made_is_exit_code_3(flags: list[str], tmp_path: Path, flag: str) -> None:
    (tmp_path / "file").write_text("")
    answer = run("node", *flags, flag, str(tmp_path / "file" / "below"))
    assert answer.exit_code == 3
    assert f"{flag} {tmp_path / 'file' / 'below'}" in answer.output


@pytest.mark.parametrize("arguments", [["sim", "list"], ["sim", "list", "-o", "json"], ["--help"], ["sim", "--help"]])
def test_output_that_cannot_be_written_is_one_line_and_exit_code_1(arguments: list[str]) -> None:
    command = [str(Path(sys.executable).with_name("tessera")), *arguments]
    with Path("/dev/full").open("w") as full:
        answer = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (answer.returncode, answer.stderr) == (
        1,
        "tessera: the output can't be written: No space left on device\n",
    )


@pytest.mark.long
@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False), ("0", False)])
def test_who_wants_no_colours_gets_none_on_a_terminal_either(no_color: str, coloured: bool) -> None:
    shown = on_a_terminal({"NO_COLOR": no_color}, "sim", "list")
    assert "NAME" in shown
    assert ("\x1b" in shown) == coloured
    error = on_a_terminal({"NO_COLOR": no_color}, "topology", "--gpus", "sim:none")
    assert "tessera: " in error
    assert ("\x1b" in error) == coloured


def on_a_terminal(environment: dict[str, str], *arguments: str) -> str:
    """What the command shows there, errors too."""
    command = [str(Path(sys.executable).with_name("tessera")), *arguments]
    ours, its = pty.openpty()
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env={**os.environ, **environment}) as process:
        os.close(its)
        shown = b""
        with suppress(OSError):  # EIO: nobody writes any more
            while chunk := os.read(ours, 4096):
                shown += chunk
        process.wait(60)
    os.close(ours)
    return shown.decode()


def tessera(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: what it leaves running would keep it from ending."""
    command = [str(Path(sys.executable).with_name("tessera")), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.long
def test_without_nvidias_library_the_remedy_is_told_and_the_exit_code_is_3(flags: list[str]) -> None:
    answer = tessera("node", *flags, "--gpus", "nvml", "--nvml-library", "/nowhere/libnvidia-ml.so.1")
    assert answer.returncode == 3
    *_, line = answer.stderr.splitlines()  # before it: that the API server can't be reached for its configuration
    assert "--nvml-library /nowhere/libnvidia-ml.so.1: can't be loaded" in line


@pytest.mark.long
def test_sockets_that_cannot_be_made_end_the_process_and_leave_nothing(flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "kubelet").mkdir()
    (tmp_path / "kubelet" / "plugins_registry").write_text("in the way")
    answer = tessera("node", *flags)
    assert answer.returncode == 3
    assert f"can't listen on {tmp_path}/kubelet/plugins_registry/gpu.tessera.dev-reg.sock" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert not (tmp_path / "kubelet" / "plugins" / "gpu.tessera.dev" / "dra.sock").exists()


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """``tessera node`` as a process, ended by SIGTERM."""
    command = [str(Path(sys.executable).with_name("tessera")), "node", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=60)


def prepare(socket: Path) -> str:
    """The error in the plugin's answer to a kubelet that asks for some claim."""
    request = dra_v1_pb2.NodePrepareResourcesRequest(
        claims=[dra_v1_pb2.Claim(namespace="default", name="some", uid="1234")]
    )
    with grpc.insecure_channel(f"unix://{socket}") as channel:
        call = channel.unary_unary(
            "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources",
            request_serializer=dra_v1_pb2.NodePrepareResourcesRequest.SerializeToString,
            response_deserializer=dra_v1_pb2.NodePrepareResourcesResponse.FromString,
        )
        return str(call(request, timeout=60, wait_for_ready=True).claims["1234"].error)


@pytest.mark.long
def test_without_an_api_server_it_serves_and_says_what_is_missing(flags: list[str], tmp_path: Path) -> None:
    socket = tmp_path / "kubelet" / "plugins" / "gpu.tessera.dev" / "dra.sock"
    with running(*flags) as process:
        wait_for(socket.exists, START_S, "the plugin's socket")
        error = prepare(socket)
    assert "/resourceclaims/some: no answer from https://" in error
    assert process.returncode == 0
    assert not socket.exists()
    assert not list((tmp_path / "kubelet" / "plugins_registry").iterdir())


@pytest.mark.long
def test_a_signal_that_arrives_while_the_process_starts_again_ends_it(flags: list[str]) -> None:
    restart = (
        "import os, signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-c", restart, str(Path(sys.executable).with_name("tessera")), "node", *flags]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_without_leaving_anything_behind(flags: list[str], tmp_path: Path, number: int) -> None:
    socket = tmp_path / "kubelet" / "plugins" / "gpu.tessera.dev" / "dra.sock"
    with running(*flags, "--log-level", "info") as process:
        wait_for(socket.exists, START_S, "the plugin's socket")
        process.send_signal(number)
        told = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == 0
    assert any(line.endswith("stopping") for line in told)
    assert not [line for line in told if "left behind" in line]


@pytest.mark.long
def test_a_second_plugin_on_the_same_node_waits_until_the_first_has_ended(flags: list[str], tmp_path: Path) -> None:
    socket = tmp_path / "kubelet" / "plugins" / "gpu.tessera.dev" / "dra.sock"
    with ExitStack() as both:
        first = both.enter_context(running(*flags))
        wait_for(socket.exists, START_S, "the plugin's socket")
        with running(*flags) as second:
            assert second.stderr is not None
            line = second.stderr.readline()
            assert "waits for another node plugin" in line
            assert f"pid={first.pid}" in line
            both.close()
            wait_for(socket.exists, START_S, "the second plugin's socket")
        assert second.returncode == 0
