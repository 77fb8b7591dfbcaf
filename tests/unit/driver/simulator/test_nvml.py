"""Event sets: XIDs, changes of MIG configuration, timeouts and lost GPUs, as NVML tells them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pynvml
import pytest

from driver.errors import UsageError
from driver.simulator.node import SimulatedNode
from tests.support.nvml_client import G3, cut, enable_mig, one_h100

XID, MIG_CHANGE = pynvml.nvmlEventTypeXidCriticalError, pynvml.nvmlEventMigConfigChange
WHOLE_GPU = 0xFFFFFFFF


@pytest.fixture
def node(tmp_path: Path) -> SimulatedNode:
    return one_h100(tmp_path)


@pytest.fixture
def listening(node: SimulatedNode) -> Any:
    """An event set that hears everything of the GPU."""
    gpu, events = node.nvml.nvmlDeviceGetHandleByIndex(0), node.nvml.nvmlEventSetCreate()
    node.nvml.nvmlDeviceRegisterEvents(gpu, node.nvml.nvmlDeviceGetSupportedEventTypes(gpu), events)
    return events


def failing(code: int) -> Any:
    return pytest.raises(pynvml.nvmlExceptionClass(code))


def test_an_xid_is_heard_once_with_its_number(node: SimulatedNode, listening: Any) -> None:
    node.faults.xid(0, 48)
    data = node.nvml.nvmlEventSetWait_v2(listening, 0)
    assert (data.eventType, data.eventData) == (XID, 48)
    assert (data.gpuInstanceId, data.computeInstanceId) == (WHOLE_GPU, WHOLE_GPU)
    assert node.nvml.nvmlDeviceGetUUID(data.device) == node.description.gpu_uuid(0)
    # What it makes the GPU need is an event of its own.
    assert node.nvml.nvmlEventSetWait_v2(listening, 0).eventType == pynvml.nvmlEventTypeGpuRecoveryAction
    with failing(pynvml.NVML_ERROR_TIMEOUT):
        node.nvml.nvmlEventSetWait_v2(listening, 0)


def test_an_xid_of_a_partition_names_its_instances(node: SimulatedNode) -> None:
    gpu = enable_mig(node.nvml)
    partition = cut(node.nvml, gpu, G3, 4, 4)
    events = node.nvml.nvmlEventSetCreate()
    node.nvml.nvmlDeviceRegisterEvents(gpu, XID, events)
    node.faults.xid(0, 13, partition.uuid)
    data = node.nvml.nvmlEventSetWait_v2(events, 0)
    assert (data.gpuInstanceId, data.computeInstanceId) == (1, 0)
    with pytest.raises(UsageError, match="device: 'MIG-1' is not on this GPU"):
        node.faults.xid(0, 13, "MIG-1")


def test_events_of_another_process_wake_a_waiting_one(node: SimulatedNode, listening: Any) -> None:
    timer = threading.Timer(0.1, lambda: SimulatedNode.attach(node.root).faults.xid(0, 63))
    timer.start()
    assert node.nvml.nvmlEventSetWait_v2(listening, 10_000).eventData == 63
    timer.join()


def test_waiting_ends_with_its_timeout(node: SimulatedNode, listening: Any) -> None:
    began = time.monotonic()
    with failing(pynvml.NVML_ERROR_TIMEOUT):
        node.nvml.nvmlEventSetWait_v2(listening, 100)
    assert time.monotonic() - began >= 0.1


def test_each_change_of_the_mig_configuration_is_an_event(node: SimulatedNode, listening: Any) -> None:
    cut(node.nvml, enable_mig(node.nvml), G3, 0, 4)
    heard = [node.nvml.nvmlEventSetWait_v2(listening, 0).eventType for _ in range(3)]
    assert heard == [MIG_CHANGE] * 3
    node.faults.event(0, MIG_CHANGE)
    assert node.nvml.nvmlEventSetWait_v2(listening, 0).eventType == MIG_CHANGE


def test_only_what_was_asked_for_after_asking_is_heard(node: SimulatedNode) -> None:
    node.faults.xid(0, 1)
    gpu, events = node.nvml.nvmlDeviceGetHandleByIndex(0), node.nvml.nvmlEventSetCreate()
    node.nvml.nvmlDeviceRegisterEvents(gpu, XID, events)
    enable_mig(node.nvml)
    node.faults.xid(0, 2)
    assert node.nvml.nvmlEventSetWait_v2(events, 0).eventData == 2
    with failing(pynvml.NVML_ERROR_TIMEOUT):
        node.nvml.nvmlEventSetWait_v2(events, 0)


def test_losing_a_gpu_is_an_xid_and_then_an_error(node: SimulatedNode, listening: Any) -> None:
    node.faults.lose_gpu(0)
    assert node.nvml.nvmlEventSetWait_v2(listening, 0).eventData == 79
    with failing(pynvml.NVML_ERROR_GPU_IS_LOST):
        node.nvml.nvmlEventSetWait_v2(listening, 1000)


def test_wrong_registrations_are_refused(node: SimulatedNode, listening: Any) -> None:
    nvml, gpu = node.nvml, enable_mig(node.nvml)
    device = nvml.nvmlDeviceGetHandleByUUID(cut(nvml, gpu, G3, 0, 4).uuid)
    with failing(pynvml.NVML_ERROR_NOT_SUPPORTED):
        nvml.nvmlDeviceRegisterEvents(gpu, pynvml.nvmlEventTypePowerSourceChange, listening)
    with failing(pynvml.NVML_ERROR_NOT_SUPPORTED):
        nvml.nvmlDeviceRegisterEvents(device, XID, listening)
    with failing(pynvml.NVML_ERROR_INVALID_ARGUMENT):
        nvml.nvmlDeviceRegisterEvents(gpu, XID, gpu)
    nvml.nvmlEventSetFree(listening)
    with failing(pynvml.NVML_ERROR_INVALID_ARGUMENT):
        nvml.nvmlEventSetWait_v2(listening, 0)
    with pytest.raises(UsageError, match="event: 0x3 is unknown"):
        node.faults.event(0, 3)


def test_a_gpu_without_mig_reports_no_mig_changes(tmp_path: Path) -> None:
    from driver.simulator.description import load_description

    node = SimulatedNode.open(load_description("t4-4"), tmp_path / "t4")
    node.nvml.nvmlInit()
    supported = node.nvml.nvmlDeviceGetSupportedEventTypes(node.nvml.nvmlDeviceGetHandleByIndex(0))
    assert supported & XID
    assert not supported & MIG_CHANGE
