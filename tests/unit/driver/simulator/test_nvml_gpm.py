"""GPM and utilization of simulated GPUs: what a client of pynvml measures of the loads that were set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pynvml
import pytest

from driver.simulator.description import load_description
from driver.simulator.machine import SimulatedGpuState
from driver.simulator.node import SimulatedNode
from driver.simulator.state.gpu_load import LOAD_PID, Phase, SimulatedActivity, constant, duty
from driver.simulator.state.latency import ZERO_LATENCY
from tests.support.nvml_client import G1, G3, cut, enable_mig, remove

GIB = 2**30
METRICS = {"busy": 1, "sm": 2, "occupancy": 3, "tensor": 5, "dram": 10, "pcie": 21, "nvlink": 60}
BUSY = SimulatedActivity.of(0.8, occupancy=0.5, tensor=0.4, dram=0.6, nvlink=20 * GIB, pcie=1 * GIB)


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1.75e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def opened(root: Path, clock: Clock, name: str = "hgx-h100") -> SimulatedNode:
    description = load_description(name)
    description = description.replaced(gpus=description.gpus[:2])
    node = SimulatedNode.open(description, root, latency=ZERO_LATENCY, clock=clock)
    node.nvml.nvmlInit()
    return node


@pytest.fixture
def node(tmp_path: Path, clock: Clock) -> SimulatedNode:
    return opened(tmp_path, clock)


def sample(node: SimulatedNode, gpu: Any, instance: int | None = None) -> Any:
    taken = node.nvml.nvmlGpmSampleAlloc()
    if instance is None:
        return node.nvml.nvmlGpmSampleGet(gpu, taken)
    return node.nvml.nvmlGpmMigSampleGet(gpu, instance, taken)


def request(first: Any, second: Any, *metrics: int) -> Any:
    wanted = pynvml.c_nvmlGpmMetricsGet_t()
    wanted.version, wanted.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(metrics)
    wanted.sample1, wanted.sample2 = first, second
    for place, metric in zip(wanted.metrics, metrics, strict=False):
        place.metricId = metric
    return wanted


def measure(node: SimulatedNode, first: Any, second: Any) -> dict[str, float]:
    found = node.nvml.nvmlGpmMetricsGet(request(first, second, *METRICS.values()))
    assert {metric.nvmlReturn for metric in found.metrics[: len(METRICS)]} == {pynvml.NVML_SUCCESS}
    return {name: found.metrics[at].value for at, name in enumerate(METRICS)}


def measured(node: SimulatedNode, gpu: Any, clock: Clock, instance: int | None = None) -> dict[str, float]:
    """What GPM says of the next ten seconds."""
    first = sample(node, gpu, instance)
    clock.now += 10
    return measure(node, first, sample(node, gpu, instance))


def failing(code: int) -> Any:
    return pytest.raises(pynvml.nvmlExceptionClass(code))


def test_gpm_measures_the_load_of_a_gpu_and_nothing_on_its_neighbour(node: SimulatedNode, clock: Clock) -> None:
    gpus = [node.nvml.nvmlDeviceGetHandleByIndex(index) for index in (0, 1)]
    node.put_load(node.description.gpu_uuid(0), constant(BUSY, 7 * GIB))
    assert measured(node, gpus[0], clock) == pytest.approx(
        {"busy": 100, "sm": 80, "occupancy": 50, "tensor": 40, "dram": 60, "pcie": 512, "nvlink": 10240}
    )
    assert measured(node, gpus[1], clock) == dict.fromkeys(METRICS, 0)


def test_a_gpu_in_mig_mode_is_measured_by_partition_and_as_their_weighted_sum(
    node: SimulatedNode, clock: Clock
) -> None:
    gpu = enable_mig(node.nvml)
    small, large = cut(node.nvml, gpu, G1, 0, 1), cut(node.nvml, gpu, G3, 4, 4)
    ids = [node.nvml.nvmlGpuInstanceGetInfo(part.gpu_instance).id for part in (small, large)]
    node.put_load(large.uuid, constant(BUSY))
    assert measured(node, gpu, clock, ids[0]) == dict.fromkeys(METRICS, 0)
    one = measured(node, gpu, clock, ids[1])
    assert (one["sm"], one["dram"], one["nvlink"]) == pytest.approx((80, 60, 10240))
    whole = measured(node, gpu, clock)
    assert (whole["sm"], whole["dram"], whole["pcie"]) == pytest.approx((80 * 3 / 7, 30, 512))


def test_a_load_that_changes_between_two_samples_counts_by_its_time(node: SimulatedNode, clock: Clock) -> None:
    gpu, uuid = node.nvml.nvmlDeviceGetHandleByIndex(0), node.description.gpu_uuid(0)
    first = sample(node, gpu)
    node.put_load(uuid, constant(SimulatedActivity.of(1.0)))
    clock.now += 4
    node.put_load(uuid, duty(SimulatedActivity.of(0.5), 0, 0.3, 2.0))
    clock.now += 4
    node.end_load(uuid)
    clock.now += 2
    assert measure(node, first, sample(node, gpu))["sm"] == pytest.approx(100 * (4 + 0.3 * 0.5 * 4) / 10)


def test_removing_a_partition_ends_its_load_and_leaves_the_counters_of_the_gpu(
    node: SimulatedNode, clock: Clock
) -> None:
    gpu = enable_mig(node.nvml)
    part = cut(node.nvml, gpu, G3, 0, 4)
    first = sample(node, gpu)
    node.put_load(part.uuid, constant(BUSY, GIB))
    clock.now += 5
    remove(node.nvml, part)
    clock.now += 5
    assert measure(node, first, sample(node, gpu))["dram"] == pytest.approx(15)
    assert node.gpu_state(0).loads.running == ()
    again = cut(node.nvml, gpu, G3, 0, 4)
    assert node.gpu_state(0).loads.counters(again.uuid, clock()) == SimulatedActivity()


@pytest.mark.parametrize("name", ["t4-4", "dgx-a100"])
def test_gpus_before_hopper_have_utilization_rates_and_no_gpm(name: str, tmp_path: Path, clock: Clock) -> None:
    node = opened(tmp_path, clock, name)
    gpu = node.nvml.nvmlDeviceGetHandleByIndex(0)
    assert node.nvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice == 0
    for instance in (None, 1):
        with failing(pynvml.NVML_ERROR_NOT_SUPPORTED):
            sample(node, gpu, instance)
    node.put_load(node.description.gpu_uuid(0), duty(SimulatedActivity.of(0.1, dram=0.6), GIB, 0.25, 0.1))
    clock.now += 5
    rates = node.nvml.nvmlDeviceGetUtilizationRates(gpu)
    assert (rates.gpu, rates.memory) == (25, 15)


def test_memory_and_processes_of_a_partition_are_its_own(node: SimulatedNode, clock: Clock) -> None:
    gpu = enable_mig(node.nvml)
    one, other = cut(node.nvml, gpu, G1, 0, 1), cut(node.nvml, gpu, G1, 1, 1)
    node.put_load(one.uuid, (Phase(5, SimulatedActivity(), GIB), Phase(5, SimulatedActivity(), 2 * GIB)))
    node.put_load(one.uuid, constant(SimulatedActivity(), GIB), pid=77)
    handles = [node.nvml.nvmlDeviceGetHandleByUUID(part.uuid) for part in (one, other)]
    clock.now += 7
    memory = node.nvml.nvmlDeviceGetMemoryInfo(handles[0])
    assert (memory.used, memory.total) == (3 * GIB, 9984 * 2**20)
    assert node.nvml.nvmlDeviceGetMemoryInfo(handles[1]).used == 0
    assert node.nvml.nvmlDeviceGetMemoryInfo(gpu, pynvml.nvmlMemory_v2).used == 3 * GIB
    pids = [
        [process.pid for process in node.nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        for handle in (*handles, gpu)
    ]
    assert pids == [[LOAD_PID, 77], [], [LOAD_PID, 77]]
    remove(node.nvml, one)
    for call in (node.nvml.nvmlDeviceGetMemoryInfo, node.nvml.nvmlDeviceGetComputeRunningProcesses):
        with failing(pynvml.NVML_ERROR_INVALID_ARGUMENT):
            call(handles[0])


def test_calls_that_cannot_be_answered_are_refused(node: SimulatedNode, tmp_path: Path, clock: Clock) -> None:
    nvml, invalid = node.nvml, pynvml.NVML_ERROR_INVALID_ARGUMENT
    gpu, plain = enable_mig(nvml), nvml.nvmlDeviceGetHandleByIndex(1)
    part = cut(nvml, gpu, G1, 0, 1)
    number = nvml.nvmlGpuInstanceGetInfo(part.gpu_instance).id
    empty, freed, foreign = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc(), opened(tmp_path / "b", clock)
    nvml.nvmlGpmSampleFree(freed)
    old, old_gpu, old_plain = sample(node, gpu, number), sample(node, gpu), sample(node, plain)
    clock.now += 0.05
    soon = sample(node, gpu)
    clock.now += 1
    remove(nvml, part)
    mig = nvml.nvmlDeviceGetHandleByUUID(cut(nvml, gpu, G1, 0, 1).uuid)
    new, new_gpu = sample(node, gpu, number), sample(node, gpu)

    def metrics(first: Any, second: Any) -> Any:
        return lambda: nvml.nvmlGpmMetricsGet(request(first, second, 2))

    wrong_version = request(old_gpu, new_gpu, 2)
    wrong_version.version = 2
    too_many = request(old_gpu, new_gpu)
    too_many.numMetrics = pynvml.NVML_GPM_METRIC_MAX + 1
    for call, code in [
        (lambda: nvml.nvmlGpmSampleGet(mig, empty), invalid),
        (lambda: nvml.nvmlGpmMigSampleGet(mig, number, empty), invalid),
        (lambda: nvml.nvmlGpmQueryDeviceSupport(mig), invalid),
        (lambda: nvml.nvmlGpmSampleGet(gpu, freed), invalid),
        (lambda: nvml.nvmlGpmSampleGet(gpu, foreign.nvml.nvmlGpmSampleAlloc()), invalid),
        (lambda: nvml.nvmlGpmSampleFree(freed), invalid),
        (lambda: nvml.nvmlGpmSampleFree(gpu), invalid),
        (lambda: nvml.nvmlGpmMigSampleGet(gpu, 99, empty), pynvml.NVML_ERROR_NOT_FOUND),
        (lambda: nvml.nvmlGpmMigSampleGet(plain, number, empty), pynvml.NVML_ERROR_NOT_SUPPORTED),
        (lambda: nvml.nvmlDeviceGetUtilizationRates(gpu), pynvml.NVML_ERROR_NOT_SUPPORTED),
        (lambda: nvml.nvmlDeviceGetUtilizationRates(mig), pynvml.NVML_ERROR_NOT_SUPPORTED),
        (metrics(empty, new_gpu), invalid),
        (metrics(freed, new_gpu), invalid),
        (metrics(old_gpu, soon), invalid),
        (metrics(new_gpu, old_gpu), invalid),
        (metrics(old_plain, new_gpu), invalid),
        (metrics(old_gpu, new), invalid),
        (metrics(old, new), invalid),  # the instance with that id is another one
        (lambda: nvml.nvmlGpmMetricsGet(request(old_gpu, new_gpu)), invalid),
        (lambda: nvml.nvmlGpmMetricsGet(too_many), invalid),
        (lambda: nvml.nvmlGpmMetricsGet(wrong_version), pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH),
    ]:
        with failing(code):
            call()
    metrics(old_gpu, new_gpu)()


def test_a_reset_between_two_samples_makes_them_useless(node: SimulatedNode, clock: Clock) -> None:
    gpu = node.nvml.nvmlDeviceGetHandleByIndex(0)
    node.put_load(node.description.gpu_uuid(0), constant(BUSY))
    clock.now += 1
    first = sample(node, gpu)
    node.reset_gpu(0)
    clock.now += 1
    with failing(pynvml.NVML_ERROR_INVALID_ARGUMENT):
        measure(node, first, sample(node, gpu))


def test_metrics_that_a_gpu_lacks_fail_one_by_one(tmp_path: Path, clock: Clock) -> None:
    node = opened(tmp_path, clock, "rtx-pro-6000-8")
    gpu = node.nvml.nvmlDeviceGetHandleByIndex(0)
    first = sample(node, gpu)
    clock.now += 1
    found = node.nvml.nvmlGpmMetricsGet(request(first, sample(node, gpu), 2, 60, 4, 0))
    refusal = pynvml.NVML_ERROR_NOT_SUPPORTED
    assert [metric.nvmlReturn for metric in found.metrics[:4]] == [pynvml.NVML_SUCCESS, refusal, refusal, refusal]


def test_faults_apply_to_gpm(node: SimulatedNode) -> None:
    gpu = node.nvml.nvmlDeviceGetHandleByIndex(0)
    node.faults.fail("nvmlGpmSampleGet", code=pynvml.NVML_ERROR_TIMEOUT, gpu=0, times=1)
    with failing(pynvml.NVML_ERROR_TIMEOUT):
        sample(node, gpu)
    node.faults.lose_gpu(0)
    with failing(pynvml.NVML_ERROR_GPU_IS_LOST):
        sample(node, gpu)
    sample(node, node.nvml.nvmlDeviceGetHandleByIndex(1))


def test_a_state_file_without_loads_is_read() -> None:
    old = {key: value for key, value in msgspec.to_builtins(SimulatedGpuState()).items() if key != "loads"}
    assert msgspec.convert(old, SimulatedGpuState) == SimulatedGpuState()
