"""The simulated host's nvidia-smi: a program that changes what the simulated NVML and ``sim smi`` show."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import msgspec
import pynvml
import pytest
from click.testing import CliRunner

from driver.simulator.machine import Process, SimulatedGpuState
from driver.simulator.node import SimulatedNode, describe
from tessera.sim.node_commands import sim
from tests.support.nvml_client import G3, cut, enable_mig, one_h100, set_compute_mode, start_process


@pytest.fixture
def node(tmp_path: Path) -> SimulatedNode:
    return one_h100(tmp_path / "a node")


def smi(node: SimulatedNode, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(node.root / "usr/bin/nvidia-smi"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def set_time_slice(node: SimulatedNode, value: str, gpu: str = "0") -> subprocess.CompletedProcess[str]:
    return smi(node, "compute-policy", "-i", gpu, "--set-timeslice", value)


def test_a_gpu_is_named_by_index_or_uuid_and_without_one_all_change(node: SimulatedNode) -> None:
    for number, arguments in enumerate((["-i", "0"], [f"--id={node.description.gpu_uuid(0)}"], []), 1):
        assert smi(node, "compute-policy", *arguments, f"--set-timeslice={number}").returncode == 0
        assert node.gpu_state(0).time_slice == number


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("compute-policy", "-i", "0", "--set-timeslice", "4"), 2, "Invalid Argument"),
        (("compute-policy", "-i", "0", "--set-timeslice", "-1"), 2, "Invalid Argument"),
        (("compute-policy", "-i", "0", "--set-timeslice"), 2, "Invalid Argument"),
        (("compute-policy", "-i", "0,7", "--set-timeslice", "1"), 6, "No devices were found"),
        (("compute-policy", "-i", "GPU-1", "--set-timeslice", "1"), 6, "No devices were found"),
        (("compute-policy",), 2, "Invalid combination"),
        (("-i", "0", "-c", "EXCLUSIVE_THREAD"), 2, "Invalid Argument"),
        (("-i", "0", "-c", "1"), 2, "Invalid Argument"),
    ],
)
def test_wrong_arguments_end_with_nvmls_code_and_change_nothing(
    node: SimulatedNode, arguments: tuple[str, ...], status: int, said: str
) -> None:
    before = node.gpu_state(0)
    answer = smi(node, *arguments)
    assert (answer.returncode, node.gpu_state(0)) == (status, before)
    assert said in answer.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_somebody_who_is_not_root_is_refused(node: SimulatedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (node.root, *node.root.parents):
        if folder != Path("/") and not folder.stat().st_mode & 0o001:
            folder.chmod(0o755)
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if python is None:
        pytest.skip("no Python that everybody may run")
    tool = Path(str(describe.__code__.co_filename)).with_name("smi_tool.py")
    command = [python, "-I", "-S", "-", str(node.root), "compute-policy", "--set-timeslice", "1"]
    answer = subprocess.run(
        command, input=tool.read_text(), capture_output=True, text=True, check=False, user=65534, group=65534, cwd="/"
    )
    assert (answer.returncode, node.gpu_state(0).time_slice) == (4, 0)
    assert "Insufficient Permissions" in answer.stdout


@pytest.mark.parametrize(
    ("mode", "number"), [("EXCLUSIVE_PROCESS", 3), ("prohibited", 2), ("3", 3), ("DEFAULT", 0), ("0", 0)]
)
def test_the_compute_mode_that_the_tool_sets_is_nvmls(node: SimulatedNode, mode: str, number: int) -> None:
    gpu = node.nvml.nvmlDeviceGetHandleByIndex(0)
    set_compute_mode(node, "PROHIBITED")
    assert smi(node, "-i", "0", "-c", mode).returncode == 0
    assert node.nvml.nvmlDeviceGetComputeMode(gpu) == number


def test_with_mig_on_the_gpu_keeps_its_compute_mode(node: SimulatedNode) -> None:
    gpu = enable_mig(node.nvml)
    assert smi(node, "-i", "0", "-c", "EXCLUSIVE_PROCESS").returncode == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert node.nvml.nvmlDeviceGetComputeMode(gpu) == 0


@pytest.mark.parametrize("end", [SimulatedNode.reboot, lambda node: node.reset_gpu(0)])
def test_reset_and_reboot_bring_the_defaults_back(node: SimulatedNode, end: object) -> None:
    set_time_slice(node, "2")
    smi(node, "-i", "0", "-c", "EXCLUSIVE_PROCESS")
    assert callable(end)
    end(node)
    assert (node.gpu_state(0).time_slice, node.gpu_state(0).compute_mode) == (0, 0)


def test_the_tool_keeps_everything_else_of_the_gpus_state(node: SimulatedNode) -> None:
    partition = cut(node.nvml, enable_mig(node.nvml), G3, 4, 4)
    start_process(node, partition.uuid, pid=7, memory=12)
    full = msgspec.structs.replace(node.gpu_state(0), mig_enabled=False, processes=(Process(8, 9),))
    node.change(0, lambda _: (full, None))
    set_time_slice(node, "1")
    assert node.gpu_state(0) == msgspec.structs.replace(full, time_slice=1)
    assert {"timeSlice", "computeMode", "migEnabled"} <= set(SimulatedGpuState.__struct_encode_fields__)


def test_tools_that_run_at_once_lose_no_change(node: SimulatedNode) -> None:
    command = [str(node.root / "usr/bin/nvidia-smi"), "-i", "0", "-c", "PROHIBITED"]
    crowd = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(4)]
    for pid in range(50):
        start_process(node, node.description.gpu_uuid(0), pid=pid)
    assert [process.wait(60) for process in crowd] == [0] * 4
    assert node.gpu_state(0).compute_mode == pynvml.NVML_COMPUTEMODE_PROHIBITED
    assert len(node.gpu_state(0).processes) == 50


def test_in_a_container_without_python_it_still_introduces_itself(node: SimulatedNode) -> None:
    answer = subprocess.run(
        ["/bin/sh", str(node.root / "usr/bin/nvidia-smi"), "-L"], capture_output=True, text=True, check=True, env={}
    )
    assert answer.stdout == "nvidia-smi: simulated by Tessera, driver 580.95.05, node h100-1\n"


def test_sim_smi_shows_what_is_not_the_default(node: SimulatedNode) -> None:
    command = ["smi", "--host-root", str(node.root)]
    before = CliRunner().invoke(sim, command).output
    assert "Time-slice" not in before
    assert "Compute mode" not in before
    set_time_slice(node, "1")
    smi(node, "-c", "EXCLUSIVE_PROCESS")
    after = CliRunner().invoke(sim, command).output
    assert "Time-slice: GPU 0 Short" in after
    assert "Compute mode: GPU 0 EXCLUSIVE_PROCESS" in after
    (shown,) = describe(node, {})
    assert (shown["timeSlice"], shown["computeMode"]) == ("Short", "EXCLUSIVE_PROCESS")
