"""A GPU's time-slice interval and compute mode, through the Host, on the simulated node and with tools that fail."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from driver.errors import HardwareError
from driver.hardware import time_slice as module
from driver.hardware.host import Host
from driver.hardware.host_paths import HostPaths
from driver.hardware.time_slice import TimeSliceTool
from driver.model.gpu import Gpu
from driver.model.gpu_settings import ComputeMode, TimeSlice
from driver.simulator.description import load_description
from driver.simulator.node import SimulatedNode
from driver.simulator.state.latency import ZERO_LATENCY
from tests.support.nvml_client import enable_mig, one_h100, set_compute_mode

UUID = "GPU-0a0a0a0a-0000-0000-0000-000000000000"


@pytest.fixture
def node(tmp_path: Path) -> SimulatedNode:
    return one_h100(tmp_path / "node")


def host_of(node: SimulatedNode) -> tuple[Host, Gpu]:
    host = Host(node.nvml, HostPaths(node.root, node.root), simulated=True)
    return host, host.discover().gpus[0]


def driver_root(tmp_path: Path, script: str) -> Path:
    """A driver root whose nvidia-smi is a shell script."""
    tool = tmp_path / "driver/usr/bin/nvidia-smi"
    tool.parent.mkdir(parents=True)
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return tmp_path / "driver"


@pytest.mark.parametrize("interval", list(TimeSlice))
def test_an_interval_that_was_set_is_in_force(node: SimulatedNode, interval: TimeSlice) -> None:
    host, gpu = host_of(node)
    host.set_time_slice(gpu, TimeSlice.MEDIUM)
    host.set_time_slice(gpu, interval)
    assert node.gpu_state(0).time_slice == interval.number


def test_only_the_named_gpu_changes(tmp_path: Path) -> None:
    node = SimulatedNode.open(load_description("dgx-h100"), tmp_path, latency=ZERO_LATENCY)
    host = Host(node.nvml, HostPaths(node.root, node.root), simulated=True)
    host.set_time_slice(host.discover().gpus[5], TimeSlice.LONG)
    assert [node.gpu_state(minor).time_slice for minor in range(8)] == [0, 0, 0, 0, 0, 3, 0, 0]


@pytest.mark.parametrize(
    ("disturb", "code", "said"),
    [
        (lambda node: enable_mig(node.nvml), pynvml.NVML_ERROR_NOT_SUPPORTED, "Not Supported"),
        (lambda node: node.faults.lose_gpu(0), pynvml.NVML_ERROR_GPU_IS_LOST, "GPU is lost"),
        (lambda node: node.faults.remove_gpu(0), pynvml.NVML_ERROR_NOT_FOUND, "No devices were found"),
        (
            lambda node: node.faults.fail("nvidia-smi", code=pynvml.NVML_ERROR_NOT_SUPPORTED, gpu=0),
            pynvml.NVML_ERROR_NOT_SUPPORTED,
            "Failed to set timeslice policy with value Short for GPU 0 : Not Supported",
        ),
        (lambda node: node.faults.fail("nvidia-smi", code=pynvml.NVML_ERROR_UNKNOWN), None, "status 255"),
    ],
)
def test_what_the_tool_refuses_is_an_error_with_its_words_and_code(
    node: SimulatedNode, disturb: Callable[[SimulatedNode], object], code: int | None, said: str
) -> None:
    host, gpu = host_of(node)
    disturb(node)
    with pytest.raises(HardwareError, match=rf"setting time-slice Short on {gpu.uuid}: .*{re.escape(said)}") as refused:
        host.set_time_slice(gpu, TimeSlice.SHORT)
    assert refused.value.code == code
    assert node.gpu_state(0).time_slice == 0


def test_a_fault_that_happens_twice_is_over_at_the_third_try(node: SimulatedNode) -> None:
    host, gpu = host_of(node)
    other = node.faults.fail("nvmlDeviceSetMigMode", code=pynvml.NVML_ERROR_UNKNOWN)
    node.faults.fail("nvidia-smi", code=pynvml.NVML_ERROR_UNKNOWN, times=2)
    for _ in range(2):
        with pytest.raises(HardwareError, match="Unknown Error"):
            host.set_time_slice(gpu, TimeSlice.SHORT)
    host.set_time_slice(gpu, TimeSlice.SHORT)
    assert [fault.id for fault in node.faults.current().faults] == [other]


def test_what_is_wrong_with_a_partition_or_another_gpu_is_not_the_tools_business(node: SimulatedNode) -> None:
    host, gpu = host_of(node)
    node.faults.fail("nvidia-smi", code=pynvml.NVML_ERROR_UNKNOWN, device="MIG-00000000-0000-0000-0000-000000000000")
    node.faults.fail("nvmlDeviceGetUUID", code=pynvml.NVML_ERROR_UNKNOWN)
    host.set_time_slice(gpu, TimeSlice.SHORT)
    assert node.gpu_state(0).time_slice == 1


def test_a_missing_tool_says_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(HardwareError) as refused:
        TimeSliceTool(tmp_path).set(UUID, TimeSlice.LONG)
    for text in (f"setting time-slice Long on {UUID}", f"{tmp_path}/usr/bin/nvidia-smi", "--driver-root", "leave the"):
        assert text in str(refused.value)
    assert refused.value.code == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_a_tool_that_cant_be_run_says_which_and_why(tmp_path: Path) -> None:
    root = driver_root(tmp_path, "exit 0")
    (root / "usr/bin/nvidia-smi").chmod(0o644)
    with pytest.raises(HardwareError, match=f"{root}/usr/bin/nvidia-smi can't be run: .*Permission denied"):
        TimeSliceTool(root).set(UUID, TimeSlice.LONG)


def test_a_tool_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NVIDIA_SMI_TIMEOUT_SECONDS", 0.2)
    root, began = driver_root(tmp_path, "exec sleep 30"), time.monotonic()
    with pytest.raises(HardwareError, match=r"gave no answer in 0\.2 s"):
        TimeSliceTool(root).set(UUID, TimeSlice.LONG)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("programs", ["usr/bin", "bin", "usr/local/nvidia/bin"])
def test_a_driver_root_of_its_own_brings_its_library_and_follows_its_own_links(tmp_path: Path, programs: str) -> None:
    root = driver_root(tmp_path, 'echo "$LD_PRELOAD|$*"; exit 99')
    (root / "usr/bin/nvidia-smi").rename(root / "usr/bin/nvidia-smi.real")
    (root / programs).mkdir(parents=True, exist_ok=True)
    (root / programs / "nvidia-smi").symlink_to("/usr/bin/nvidia-smi.real")
    library = root / "usr/lib64/libnvidia-ml.so.580.1"
    library.parent.mkdir()
    library.touch()
    (root / "usr/lib64/libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.580.1")
    with pytest.raises(HardwareError) as refused:
        TimeSliceTool(root).set(UUID, TimeSlice.MEDIUM)
    assert f"{library}|compute-policy -i {UUID} --set-timeslice 2" in str(refused.value)


def test_a_long_story_of_the_tool_is_cut_short(tmp_path: Path) -> None:
    root = driver_root(tmp_path, "head -c 100000 /dev/zero | tr '\\0' x; exit 1")
    with pytest.raises(HardwareError, match="status 1 and said: xxx") as refused:
        TimeSliceTool(root).set(UUID, TimeSlice.MEDIUM)
    assert len(str(refused.value)) < 1000


def test_the_compute_mode_an_administrator_set_is_seen(node: SimulatedNode) -> None:
    host, gpu = host_of(node)
    assert host.compute_mode(gpu) is ComputeMode.DEFAULT
    set_compute_mode(node, "EXCLUSIVE_PROCESS")
    assert host.compute_mode(gpu) is ComputeMode.EXCLUSIVE_PROCESS


def test_the_compute_mode_of_a_lost_gpu_is_an_error(node: SimulatedNode) -> None:
    host, gpu = host_of(node)
    node.faults.lose_gpu(0)
    with pytest.raises(HardwareError, match=f"reading the compute mode of {gpu.uuid}: NVML says GPU_IS_LOST"):
        host.compute_mode(gpu)


def test_a_tool_whose_interpreter_is_missing_is_a_missing_tool(tmp_path: Path) -> None:
    """So that the release of a refused claim does not wait for it: the image of a simulated node has no shell."""
    root = driver_root(tmp_path, "exit 0")
    (root / "usr/bin/nvidia-smi").write_text("#!/nowhere/sh\nexit 0\n")
    with pytest.raises(HardwareError, match=r"can't be run: .*No such file") as refused:
        TimeSliceTool(root).set(UUID, TimeSlice.LONG)
    assert refused.value.code == pynvml.NVML_ERROR_NOT_SUPPORTED
