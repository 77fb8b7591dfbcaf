"""State in files: several processes, killed processes, slow operations that don't hold others up."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pynvml
import pytest

from driver.errors import EnvironmentFault, StateError, UsageError
from driver.simulator import machine
from driver.simulator.description import load_description
from driver.simulator.node import SimulatedNode
from driver.simulator.nvml import is_simulated
from driver.simulator.state.latency import (
    DEFAULT_LATENCY,
    H200_CALLS,
    MEASURED_LATENCY,
    ZERO_LATENCY,
    Latency,
    parse_latency,
)
from tests.support.nvml_client import (
    G1,
    G3,
    create,
    cut,
    enable_mig,
    gpu_instances,
    mig_uuids,
    one_h100,
    remove,
)

SIMULATOR = str(Path(machine.__file__).parent)


def killed_at_line(number: int, work: Callable[[], object]) -> bool:
    """Do ``work`` in a child that is killed at the simulator's n-th executed line; False: it had no such line."""
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    executed = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal executed
        executed += event == "line"
        if executed == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace if frame.f_code.co_filename.startswith(SIMULATOR) else None

    sys.settrace(trace)
    work()
    os._exit(0)


def capability_folders(root: Path) -> set[str]:
    base = root / "proc/driver/nvidia/capabilities/gpu0/mig"
    return {str(path.parent.relative_to(base)) for path in base.rglob("access")}


def expected_folders(node: SimulatedNode) -> set[str]:
    instances = node.gpu_state(0).instances
    cis = {f"gi{gi.id}/ci{ci.id}" for gi in instances for ci in gi.compute}
    return cis | {f"gi{gi.id}" for gi in instances}


@pytest.mark.long
def test_a_process_killed_at_any_line_leaves_a_consistent_gpu(tmp_path: Path) -> None:
    node, seen = one_h100(tmp_path), set[int]()
    nvml, gpu, line = node.nvml, enable_mig(node.nvml), 0
    while killed_at_line(line := line + 11, lambda: remove(nvml, cut(nvml, gpu, G3, 4, 4))):
        left = node.gpu_state(0).instances
        assert [(gi.profile, gi.start, gi.size) for gi in left] in ([], [(G3, 4, 4)])
        assert expected_folders(node) <= capability_folders(tmp_path)
        one_h100(tmp_path)
        assert capability_folders(tmp_path) == expected_folders(node)
        seen.add(sum(1 + len(gi.compute) for gi in left))
        _clear(node)
        assert capability_folders(tmp_path) == set()
    assert seen == {0, 1, 2}


def _clear(node: SimulatedNode) -> None:
    gpu = enable_mig(node.nvml)
    for instance in node.gpu_state(0).instances:
        gi = node.nvml.nvmlDeviceGetGpuInstanceById(gpu, instance.id)
        for compute in instance.compute:
            ci = node.nvml.nvmlGpuInstanceGetComputeInstanceById(gi, compute.id)
            node.nvml.nvmlComputeInstanceDestroy(ci)
    for number in gpu_instances(node.nvml, gpu):
        node.nvml.nvmlGpuInstanceDestroy(node.nvml.nvmlDeviceGetGpuInstanceById(gpu, number))


@pytest.mark.long
def test_processes_that_cut_at_once_never_get_the_same_slice(tmp_path: Path) -> None:
    root = tmp_path / "node"
    enable_mig(one_h100(root).nvml)
    script = (
        "import sys; from pathlib import Path; from tests.support.nvml_client import *\n"
        "nvml = one_h100(Path(sys.argv[1])).nvml; gpu = nvml.nvmlDeviceGetHandleByIndex(0)\n"
        "for start in range(7):\n"
        "    try: create(nvml, gpu, G1, start, 1); print('cut')\n"
        "    except nvml.NVMLError_InsufficientResources: print('refused')\n"
    )
    command = [sys.executable, "-c", script, str(root)]
    crowd = [
        subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[4], text=True) for _ in range(3)
    ]
    answers = [line for process in crowd for line in process.communicate()[0].split()]
    assert sorted(answers) == ["cut"] * 7 + ["refused"] * 14
    starts = [gi.start for gi in SimulatedNode.attach(root).gpu_state(0).instances]
    assert sorted(starts) == list(range(7))


def test_threads_that_cut_at_once_never_get_the_same_slice(tmp_path: Path) -> None:
    nvml = one_h100(tmp_path).nvml
    gpu = enable_mig(nvml)
    with ThreadPoolExecutor(7) as pool:
        list(pool.map(lambda start: cut(nvml, gpu, G1, start, 1), range(7)))
    assert len(gpu_instances(nvml, gpu)) == len(set(mig_uuids(nvml, gpu).values())) == 7


def test_a_partition_survives_the_process_that_cut_it_and_others_see_it(tmp_path: Path) -> None:
    first = one_h100(tmp_path)
    partition = cut(first.nvml, enable_mig(first.nvml), G3, 4, 4)
    other = SimulatedNode.attach(tmp_path, latency=ZERO_LATENCY)
    other.nvml.nvmlInit()
    gpu = other.nvml.nvmlDeviceGetHandleByIndex(0)
    assert list(mig_uuids(other.nvml, gpu).values()) == [partition.uuid]
    other.nvml.nvmlComputeInstanceDestroy(
        other.nvml.nvmlGpuInstanceGetComputeInstanceById(other.nvml.nvmlDeviceGetGpuInstanceById(gpu, 1), 0)
    )
    assert mig_uuids(first.nvml, first.nvml.nvmlDeviceGetHandleByIndex(0)) == {}
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        remove(first.nvml, partition)


def test_opening_again_keeps_what_is_there(tmp_path: Path) -> None:
    node = one_h100(tmp_path)
    partition = cut(node.nvml, enable_mig(node.nvml), G3, 0, 4)
    boot_id = (tmp_path / "proc/sys/kernel/random/boot_id").read_text()
    again = one_h100(tmp_path)
    assert mig_uuids(again.nvml, again.nvml.nvmlDeviceGetHandleByIndex(0)) == {0: partition.uuid}
    assert (tmp_path / "proc/sys/kernel/random/boot_id").read_text() == boot_id


def test_opening_tidies_up_what_a_killed_process_left(tmp_path: Path) -> None:
    node = one_h100(tmp_path)
    cut(node.nvml, enable_mig(node.nvml), G3, 0, 4)
    stale = tmp_path / "proc/driver/nvidia/capabilities/gpu0/mig/gi9/ci0"
    stale.mkdir(parents=True)
    (stale / "access").write_text("DeviceFileMinor: 1\n")
    (tmp_path / "sim/gpu-0.json.new").write_text("{")
    assert capability_folders(tmp_path) != expected_folders(node)
    one_h100(tmp_path)
    assert capability_folders(tmp_path) == expected_folders(node) == {"gi1", "gi1/ci0"}


def test_a_directory_with_another_node_is_refused(tmp_path: Path) -> None:
    one_h100(tmp_path)
    with pytest.raises(UsageError, match="holds the simulated node 'h100-1', not 'dgx-h100'"):
        SimulatedNode.open(load_description("dgx-h100"), tmp_path)
    other = load_description("h100-1").replaced(driver_version="570.86.15")
    with pytest.raises(UsageError, match="another version of it"):
        SimulatedNode.open(other, tmp_path)


def test_attaching_to_nothing_says_how_to_make_a_node(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"no simulated node in .* makes one"):
        SimulatedNode.attach(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_of_an_unknown_format_is_refused(tmp_path: Path) -> None:
    one_h100(tmp_path)
    path = tmp_path / "sim/node.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"format": 99}))
    with pytest.raises(EnvironmentFault, match="format 99"):
        SimulatedNode.attach(tmp_path)
    path.write_text("{")
    with pytest.raises(EnvironmentFault, match="can't be read"):
        SimulatedNode.attach(tmp_path)


def test_a_root_that_cannot_be_written_is_an_environment_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="simulated node in"):
        SimulatedNode.open(load_description("h100-1"), tmp_path / "file" / "node")


def test_a_damaged_state_file_is_reported_with_its_path(tmp_path: Path) -> None:
    node = one_h100(tmp_path)
    (tmp_path / "sim/gpu-0.json").write_text('{"migEnabled": 3}')
    with pytest.raises(StateError, match=r"gpu-0\.json"):
        node.nvml.nvmlDeviceGetMigMode(node.nvml.nvmlDeviceGetHandleByIndex(0))


def test_operations_take_the_time_that_hardware_takes(tmp_path: Path) -> None:
    naps: list[float] = []
    node = SimulatedNode.open(load_description("h100-1"), tmp_path, sleep=naps.append)
    node.nvml.nvmlInit()
    gpu = enable_mig(node.nvml)
    remove(node.nvml, cut(node.nvml, gpu, G3, 0, 4))
    assert naps == [
        DEFAULT_LATENCY.mode_without_reset,
        DEFAULT_LATENCY.create_gpu_instance,
        DEFAULT_LATENCY.create_compute_instance,
        DEFAULT_LATENCY.destroy_compute_instance,
        DEFAULT_LATENCY.destroy_gpu_instance,
    ]
    assert DEFAULT_LATENCY.create_gpu_instance + DEFAULT_LATENCY.create_compute_instance == pytest.approx(
        2.5 / 7, abs=0.001
    )


def test_what_is_refused_takes_no_time(tmp_path: Path) -> None:
    naps: list[float] = []
    node = SimulatedNode.open(load_description("h100-1"), tmp_path, sleep=naps.append)
    node.nvml.nvmlInit()
    gpu = enable_mig(node.nvml)
    naps.clear()
    enable_mig(node.nvml)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        create(node.nvml, gpu, G3, 1, 4)
    assert naps == []


def test_a_slow_cut_holds_up_neither_other_gpus_nor_readers(tmp_path: Path) -> None:
    cutting, go_on = threading.Event(), threading.Event()

    def sleep(_: float) -> None:
        cutting.set()
        assert go_on.wait(60)

    slow = Latency(0, 0, create_gpu_instance=1, create_compute_instance=0)
    node = SimulatedNode.open(load_description("dgx-h100"), tmp_path, latency=slow, sleep=sleep)
    node.nvml.nvmlInit()
    gpu = enable_mig(node.nvml)
    cutter = threading.Thread(target=create, args=(node.nvml, gpu, G3, 0, 4))
    cutter.start()
    assert cutting.wait(60)

    assert gpu_instances(node.nvml, gpu) == {}
    other = SimulatedNode.attach(tmp_path, latency=ZERO_LATENCY)
    other.nvml.nvmlInit()
    cut(other.nvml, enable_mig(other.nvml, 1), G3, 0, 4)
    go_on.set()
    cutter.join()
    assert list(gpu_instances(node.nvml, gpu).values()) == [(G3, 0, 4)]


def test_latency_is_chosen_by_name() -> None:
    assert parse_latency("default") is DEFAULT_LATENCY
    assert parse_latency("zero") is ZERO_LATENCY
    assert parse_latency("measured") is MEASURED_LATENCY
    with pytest.raises(UsageError, match="known: default, zero, measured"):
        parse_latency("fast")


def test_measured_calls_take_as_long_as_on_an_h200(tmp_path: Path) -> None:
    nvml = SimulatedNode.open(load_description("h100-1"), tmp_path, latency=MEASURED_LATENCY).nvml
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    for call in ("nvmlDeviceGetMigMode", "nvmlDeviceGetEccMode"):
        before = time.perf_counter()
        getattr(nvml, call)(handle)
        assert time.perf_counter() - before >= H200_CALLS[call]


def test_every_measured_call_is_simulated() -> None:
    assert all(is_simulated(call) for call in H200_CALLS)


def test_nothing_but_device_nodes_is_writable_by_everybody_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        node = one_h100(tmp_path / "node")
        cut(node.nvml, enable_mig(node.nvml), G3, 0, 4)
    finally:
        os.umask(before)
    for path in (tmp_path / "node").rglob("*"):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            assert not mode & stat.S_IWOTH, path


def test_a_capability_folder_that_a_killed_process_left_unfinished_is_made_whole_when_it_comes_back(
    tmp_path: Path,
) -> None:
    node = one_h100(tmp_path)
    gpu = enable_mig(node.nvml)
    unfinished = tmp_path / "sim/capabilities/gpu0-gi1"
    unfinished.mkdir(parents=True)
    partition = cut(node.nvml, gpu, G3, 4, 4)
    assert capability_folders(tmp_path) == {"gi1", "gi1/ci0"}
    remove(node.nvml, partition)
    assert capability_folders(tmp_path) == set()
    cut(node.nvml, gpu, G3, 0, 4)
    assert capability_folders(tmp_path) == {"gi1", "gi1/ci0"}
