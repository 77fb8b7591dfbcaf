"""Faults on demand: calls that fail or wait, GPUs that go and come, set from anywhere while a session runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pynvml
import pytest

from driver.errors import StateError, UsageError
from driver.simulator.description import load_description, parse_gpu
from driver.simulator.node import SimulatedNode, describe
from driver.simulator.state.latency import ZERO_LATENCY
from tests.support.nvml_client import G1, G3, create, cut, enable_mig, gpu_instances, one_h100, remove

UNKNOWN, IN_USE, LOST = pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_IN_USE, pynvml.NVML_ERROR_GPU_IS_LOST


@pytest.fixture
def node(tmp_path: Path) -> SimulatedNode:
    """An HGX H100, in session."""
    node = SimulatedNode.open(load_description("hgx-h100"), tmp_path / "node", latency=ZERO_LATENCY)
    node.nvml.nvmlInit()
    return node


def failing(code: int) -> Any:
    return pytest.raises(pynvml.nvmlExceptionClass(code))


def test_a_call_fails_once_and_then_works(node: SimulatedNode) -> None:
    node.faults.fail("nvmlDeviceGetCount", code=UNKNOWN, times=1)
    with failing(UNKNOWN):
        node.nvml.nvmlDeviceGetCount()
    assert node.nvml.nvmlDeviceGetCount() == 8
    assert not node.faults.current().faults


def test_a_call_fails_as_often_as_told(node: SimulatedNode) -> None:
    node.faults.fail("nvmlDeviceGetCount", code=UNKNOWN, times=3)
    for _ in range(3):
        with failing(UNKNOWN):
            node.nvml.nvmlDeviceGetCount()
    assert node.nvml.nvmlDeviceGetCount() == 8


def test_a_call_fails_until_told_otherwise_by_another_process(node: SimulatedNode) -> None:
    other = SimulatedNode.attach(node.root)
    number = other.faults.fail("nvmlDeviceGetCount", code=UNKNOWN)
    for _ in range(5):
        with failing(UNKNOWN):
            node.nvml.nvmlDeviceGetCount()
    other.faults.clear(number)
    assert node.nvml.nvmlDeviceGetCount() == 8
    assert not (node.root / "sim/faults.json").exists()


def test_a_fault_of_one_gpu_leaves_the_others_alone(node: SimulatedNode) -> None:
    first, second = (node.nvml.nvmlDeviceGetHandleByIndex(index) for index in (0, 1))
    node.faults.fail("nvmlDeviceGetName", code=UNKNOWN, gpu=1)
    assert node.nvml.nvmlDeviceGetName(first)
    with failing(UNKNOWN):
        node.nvml.nvmlDeviceGetName(second)


def test_every_version_of_a_function_fails_with_it(node: SimulatedNode) -> None:
    node.faults.fail("nvmlSystemGetCudaDriverVersion", code=UNKNOWN)
    with failing(UNKNOWN):
        node.nvml.nvmlSystemGetCudaDriverVersion_v2()


def test_even_init_can_fail(node: SimulatedNode) -> None:
    node.faults.fail("nvmlInit", code=pynvml.NVML_ERROR_DRIVER_NOT_LOADED, times=1)
    with failing(pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
        node.nvml.nvmlInit()
    node.nvml.nvmlInit()


def test_what_a_call_uses_inside_is_not_hit_again(node: SimulatedNode) -> None:
    gpu, listening = node.nvml.nvmlDeviceGetHandleByIndex(0), node.nvml.nvmlEventSetCreate()
    node.faults.slow(0.001, times=2)
    node.nvml.nvmlDeviceRegisterEvents(gpu, pynvml.nvmlEventTypeXidCriticalError, listening)
    [left] = node.faults.current().faults
    assert left.times == 1


def test_a_slow_call_is_slow_and_right(node: SimulatedNode) -> None:
    node.faults.slow(0.1, "nvmlDeviceGetCount", times=1)
    began = time.monotonic()
    assert node.nvml.nvmlDeviceGetCount() == 8
    assert time.monotonic() - began >= 0.1


def test_a_busy_partition_stays_in_use_until_cleared(tmp_path: Path) -> None:
    node = one_h100(tmp_path)
    gpu = enable_mig(node.nvml)
    held, free = cut(node.nvml, gpu, G3, 4, 4), cut(node.nvml, gpu, G1, 0, 1)
    node.faults.keep_busy(held.uuid)
    remove(node.nvml, free)
    for call, handle in (
        (node.nvml.nvmlComputeInstanceDestroy, held.compute_instance),
        (node.nvml.nvmlGpuInstanceDestroy, held.gpu_instance),
    ):
        with failing(IN_USE):
            call(handle)
    assert list(gpu_instances(node.nvml, gpu).values()) == [(G3, 4, 4)]
    node.faults.clear()
    remove(node.nvml, held)


def test_a_failed_cut_leaves_nothing_behind(tmp_path: Path) -> None:
    node = one_h100(tmp_path)
    gpu = enable_mig(node.nvml)
    node.faults.fail("nvmlDeviceCreateGpuInstanceWithPlacement", code=UNKNOWN, times=1)
    with failing(UNKNOWN):
        create(node.nvml, gpu, G3, 0, 4)
    assert gpu_instances(node.nvml, gpu) == {}
    create(node.nvml, gpu, G3, 0, 4)


def test_a_lost_gpu_answers_nothing_and_the_others_everything(node: SimulatedNode) -> None:
    nvml = node.nvml
    gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(8)]
    uuid = nvml.nvmlDeviceGetUUID(gpus[3])
    node.faults.lose_gpu(3)
    for call in (
        lambda: nvml.nvmlDeviceGetName(gpus[3]),
        lambda: nvml.nvmlDeviceGetMigMode(gpus[3]),
        lambda: nvml.nvmlDeviceGetHandleByIndex(3),
        lambda: nvml.nvmlDeviceGetHandleByUUID(uuid),
    ):
        with failing(LOST):
            call()
    assert nvml.nvmlDeviceGetCount() == 8
    assert nvml.nvmlDeviceGetName(gpus[4])
    node.faults.return_gpu(3)
    assert nvml.nvmlDeviceGetName(gpus[3])


def test_a_lost_gpus_partitions_are_lost_too(tmp_path: Path) -> None:
    node = one_h100(tmp_path)
    partition = cut(node.nvml, enable_mig(node.nvml), G3, 0, 4)
    device = node.nvml.nvmlDeviceGetHandleByUUID(partition.uuid)
    node.faults.lose_gpu(0)
    for call, handle in (
        (node.nvml.nvmlDeviceGetUUID, device),
        (node.nvml.nvmlGpuInstanceGetInfo, partition.gpu_instance),
        (node.nvml.nvmlComputeInstanceDestroy, partition.compute_instance),
        (node.nvml.nvmlDeviceGetHandleByUUID, partition.uuid),
    ):
        with failing(LOST):
            call(handle)


def test_a_removed_gpu_leaves_the_count_and_returns_with_its_partitions(node: SimulatedNode) -> None:
    nvml, gpu = node.nvml, enable_mig(node.nvml, 2)
    partition, uuid = cut(nvml, gpu, G3, 0, 4), nvml.nvmlDeviceGetUUID(gpu)
    link = node.root / "sys/bus/pci/devices" / node.gpus[2].pci_bus_id
    node.faults.remove_gpu(2)
    assert nvml.nvmlDeviceGetCount() == 7
    minors = [nvml.nvmlDeviceGetMinorNumber(nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(7)]
    assert minors == [0, 1, 3, 4, 5, 6, 7]
    assert not link.exists()
    assert [row["pciBusId"] for row in describe(node, {})] == [node.gpus[minor].pci_bus_id for minor in minors]
    with failing(LOST):
        nvml.nvmlDeviceGetName(gpu)
    with failing(pynvml.NVML_ERROR_NOT_FOUND):
        nvml.nvmlDeviceGetHandleByUUID(uuid)
    node.faults.clear()
    assert nvml.nvmlDeviceGetMinorNumber(nvml.nvmlDeviceGetHandleByUUID(uuid)) == 2
    assert nvml.nvmlDeviceGetHandleByUUID(partition.uuid)
    assert link.exists()


def test_a_gpu_can_be_added_while_others_look(node: SimulatedNode) -> None:
    other = SimulatedNode.attach(node.root)
    place = {"pciBusId": "0000:e5:00.0", "numaNode": 1}
    assert other.faults.add_gpu(parse_gpu(place)) == 8
    assert node.nvml.nvmlDeviceGetCount() == 9
    gpu = enable_mig(node.nvml, 8)
    assert node.nvml.nvmlDeviceGetPciInfo(gpu).busId == "00000000:E5:00.0"
    cut(node.nvml, gpu, G3, 0, 4)
    assert (node.root / "proc/driver/nvidia/capabilities/gpu8/mig/gi1/ci0/access").is_file()
    assert "pci0000:e4" in str((node.root / "sys/bus/pci/devices/0000:e5:00.0").resolve())
    other.faults.clear()
    again = SimulatedNode.open(load_description("hgx-h100"), node.root)
    assert len(again.present) == 9
    with pytest.raises(UsageError, match=r"pciBusId: 0000:e5:00\.0 is taken"):
        other.faults.add_gpu(parse_gpu(place))


def test_a_reboot_is_seen_by_a_session_that_runs(node: SimulatedNode) -> None:
    gpu = enable_mig(node.nvml)
    cut(node.nvml, gpu, G3, 0, 4)
    SimulatedNode.attach(node.root).reboot()
    assert node.nvml.nvmlDeviceGetMigMode(gpu) == [0, 0]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"call": "nvmlDeviceMakeCoffee", "code": UNKNOWN}, "call: 'nvmlDeviceMakeCoffee' is not simulated"),
        ({"code": 12345}, "code: 12345 is no NVML error; known: 1, 2"),
        ({"code": UNKNOWN, "gpu": 8}, "gpu: 8 is not on this node; accepted: 0 to 7"),
        ({"code": UNKNOWN, "times": 0}, "times: 0 is not accepted"),
        ({"code": UNKNOWN, "device": "GPU-1"}, "device: 'GPU-1' is not accepted"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(node: SimulatedNode, fault: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        node.faults.fail(**fault)
    with pytest.raises(UsageError, match="seconds: 0"):
        node.faults.slow(0)
    with pytest.raises(UsageError, match="fault: 7 is unknown; known: none"):
        node.faults.clear(7)


def test_a_damaged_fault_file_is_reported_with_its_path(node: SimulatedNode) -> None:
    (node.root / "sim/faults.json").write_text("{")
    with pytest.raises(StateError, match=r"faults\.json"):
        node.nvml.nvmlDeviceGetCount()
