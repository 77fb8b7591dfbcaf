"""The acceptance test of a GPU that claims share by MPS: real processes, and simulated GPUs and daemons."""

from __future__ import annotations

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


def test_the_commands_that_a_containers_socket_accepts_are_named(process: MpsProcess) -> None:
    step = mps_step(acceptance(process))
    listing = "get_server_list (" if "protocol 2" in step.detail else "server list (NAME"
    assert f"a container's socket accepts {listing}" in step.detail
    assert "quit" not in step.detail


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


@pytest.mark.parametrize(
    ("refused", "failure"),
    [
        ("nothing", "it ended the MPS control daemon of the GPU"),
        ("quit|-q|.* delete", "afterwards a program of a claim of 2 GiB has 81"),
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
    assert failure in step.detail
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


def test_a_program_that_cannot_run_fails(process: MpsProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    node = acceptance(process)
    python = SimpleNamespace(executable="/usr/bin/false")
    monkeypatch.setattr("kubelet_plugin.acceptance.mps_step.sys", python)
    step = mps_step(node)
    assert step.state is StepState.FAILED
    assert "a program with CUDA can't be run: status 1" in step.detail
    assert nothing_left(process, node)
