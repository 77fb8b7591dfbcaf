"""The acceptance test of a GPU that claims share by MPS: real processes, and simulated GPUs and daemons."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace

import pynvml
import pytest

from driver.model.gpu_settings import ComputeMode, GpuSharing, parse_shared
from kubelet_plugin.acceptance.protocol import AcceptanceStep, StepState
from tests.support.acceptance import AcceptanceNode
from tests.support.mps import LEGACY, WITH_PROTOCOL_3, MpsProcess, mps_process, running

BY_MPS = GpuSharing(lambda _: 0, strategy_of=parse_shared("all=mps").of)


@pytest.fixture(params=[LEGACY, WITH_PROTOCOL_3], ids=["driver 580", "driver 615"])
def process(request: pytest.FixtureRequest) -> Iterator[MpsProcess]:
    with mps_process(request.param) as started:
        yield started


def acceptance(process: MpsProcess) -> AcceptanceNode:
    return AcceptanceNode(process.directory.parent, process.mps.node.description, sharing=BY_MPS)


def mps_step(node: AcceptanceNode) -> AcceptanceStep:
    return node.steps("gpu-0")["mps"]


def nothing_left(process: MpsProcess, node: AcceptanceNode) -> bool:
    files = {path.name for path in process.directory.iterdir()} - {"socket", "lock"}
    gpu = node.node.simulated.gpu_state(0)
    is_idle = not gpu.processes and ComputeMode(gpu.compute_mode) is ComputeMode.DEFAULT
    return node.node.nothing_left() and is_idle and not running(node.node.simulated.root) and not files


def test_programs_get_the_memory_of_their_claim_and_nothing_beside_mps(process: MpsProcess) -> None:
    node = acceptance(process)
    step = mps_step(node)
    assert step.state is StepState.PASSED, step
    assert "a program has 1534 MiB free of 81559, more is refused (CUDA_ERROR_OUT_OF_MEMORY)" in step.detail
    assert "user 65534 has the same at the same time" in step.detail
    assert "one without MPS gets nothing (CUDA_ERROR_DEVICE_UNAVAILABLE" in step.detail
    assert nothing_left(process, node)


def test_what_a_containers_socket_answers_is_shown(process: MpsProcess) -> None:
    step = mps_step(acceptance(process))
    if "protocol 2" in step.detail:
        assert "'2G' to get_default_device_pinned_mem_limit" in step.detail
        assert "start_server, shutdown_server, quit" in step.detail.rpartition("'Permission denied' to ")[2]
    else:
        assert "a container's socket answers 'NAME UID" in step.detail
        assert "server delete, -q" in step.detail.rpartition("'Permission denied (status 1)' to ")[2]


OPEN_SOCKET = """
import io, os, re, sys
pipe = re.sub("/client$|/pipe/gpu/.*", "", os.environ["CUDA_MPS_PIPE_DIRECTORY"])
if pipe != os.environ["CUDA_MPS_PIPE_DIRECTORY"]:
    command = " ".join(sys.argv[1:]) or sys.stdin.read()
    sys.stdin = io.StringIO(command)
    if re.match("{refused}", command):
        sys.exit(1)
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = pipe + "/pipe"
"""
"""Leads commands to a container's socket to the privileged one, but for those that are refused."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("refused", "failure"),
    [
        pytest.param("shutdown|.* delete", r"afterwards MPS control daemon \d+ has ended", id="the end of the daemon"),
        pytest.param("quit|-q", r"afterwards MPS server \d+ has ended", id="the end of a server"),
        pytest.param(
            "quit|-q|shutdown|server d|namespace s",
            "afterwards (.*: No such file|new MPS servers)",
            id="the end of a limit",
        ),
        pytest.param("quit|-q|shutdown|.* delete|set_default", "afterwards a program of .* has 81", id="another limit"),
        pytest.param(
            "quit|-q|shutdown|.* delete|set_device|set_.*threads",
            "afterwards (new MPS servers have the limits 81559M 100.0, not 2G 50.0|a program of .* has 81)",
            id="another limit for later servers",
        ),
    ],
)
def test_a_socket_that_accepts_commands_which_harm_other_claims_fails(
    process: MpsProcess, refused: str, failure: str
) -> None:
    node, program = acceptance(process), process.mps.program
    interpreter, _, script = program.read_text().partition("\n")
    program.write_text(interpreter + OPEN_SOCKET.format(refused=refused) + script)
    step = mps_step(node)
    assert step.state is StepState.FAILED
    assert re.search(failure, step.detail), step.detail
    assert nothing_left(process, node)


def test_a_compute_mode_that_cannot_be_set_fails(process: MpsProcess) -> None:
    node = acceptance(process)
    node.node.simulated.faults.fail("nvmlDeviceSetComputeMode", code=pynvml.NVML_ERROR_UNKNOWN)
    step = mps_step(node)
    assert step.state is StepState.FAILED
    assert "to EXCLUSIVE_PROCESS: NVML says UNKNOWN" in step.detail
    node.node.simulated.faults.clear()
    assert nothing_left(process, node)


def test_without_an_mps_pod_the_step_fails_and_says_so(process: MpsProcess) -> None:
    node = acceptance(process)
    process.kill()
    step = mps_step(node)
    assert step.state is StepState.FAILED
    assert "no MPS daemon pod answers on this node" in step.detail


@pytest.mark.long
@pytest.mark.parametrize(
    ("executable", "reason"),
    [
        ("/usr/bin/false", "status 1"),
        ("/nonexistent", "[Errno 2] No such file or directory: '/nonexistent'"),
        ("/usr/bin/echo", "-m kubelet_plugin.acceptance.cuda_program "),
    ],
)
def test_a_program_that_cannot_run_fails(
    process: MpsProcess, monkeypatch: pytest.MonkeyPatch, executable: str, reason: str
) -> None:
    node = acceptance(process)
    python = SimpleNamespace(executable=executable)
    monkeypatch.setattr("kubelet_plugin.acceptance.mps_step.sys", python)
    step = mps_step(node)
    assert step.state is StepState.FAILED
    assert f"a program with CUDA can't be run: {reason}" in step.detail
    assert nothing_left(process, node)
