"""Memory, processes and activity of GPUs and partitions through NVML.

Activity comes from GPM (GPU performance monitoring, NVML manual, "GPM functions"): averages between two samples,
on Hopper and newer, also for a single GPU instance. NVML has nothing of the kind for older GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import pynvml

from driver.errors import HardwareError
from driver.hardware.nvml_errors import fact, nvml_call
from driver.model.usage import Activity, GpuProcess, UsageReading, UsageTarget

PERCENT = 0.01
MIB = 1 << 20

RATIOS = {
    "sm": pynvml.NVML_GPM_METRIC_SM_UTIL,
    "occupancy": pynvml.NVML_GPM_METRIC_SM_OCCUPANCY,
    "tensor": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "dram": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
}
RATES = {
    "nvlink": (pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC, pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC),
    "pcie": (pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC, pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC),
}
"""Metrics of both directions, in MiB per second."""

METRICS = (*RATIOS.values(), *(metric for pair in RATES.values() for metric in pair))

SHORTEST_WINDOW_SECONDS = 0.2
"""NVML refuses two samples of less than 100 ms apart."""


class _Window:
    """The two samples of one target, of which the older is overwritten by the next."""

    def __init__(self, nvml: Any) -> None:
        self.older, self.newer = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        self.sampled_at: float | None = None


class UsageReader:
    """Reads one target of a GPU at a time. ``clock`` is in seconds and never goes back."""

    def __init__(self, nvml: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml = nvml
        self._clock = clock
        self._handles: dict[str, Any] = {}
        self._has_gpm: dict[str, bool] = {}
        self._windows: dict[UsageTarget, _Window] = {}
        self._reading: set[UsageTarget] = set()

    def has_activity(self, gpu_uuid: str) -> bool | None:
        """Whether the GPU has activity counters; None before the first reading of it."""
        return self._has_gpm.get(gpu_uuid)

    def keep(self, targets: Collection[UsageTarget]) -> None:
        """Free the samples and handles of all other targets, except samples that a call which hangs may still write."""
        for target in self._windows.keys() - set(targets) - self._reading:
            window = self._windows.pop(target)
            for sample in (window.older, window.newer):
                with suppress(pynvml.NVMLError):
                    self._nvml.nvmlGpmSampleFree(sample)
        uuids = {uuid for target in targets for uuid in (target.gpu_uuid, target.mig_uuid)}
        self._handles = {uuid: handle for uuid, handle in self._handles.items() if uuid in uuids}

    def read(self, target: UsageTarget) -> UsageReading:
        """Read ``target``. Activity is the average since the last reading, None in the first. Raises HardwareError."""
        self._reading.add(target)
        try:
            with nvml_call(f"reading the usage of {target.mig_uuid or target.gpu_uuid}"):
                return self._read(target)
        except HardwareError:
            # The handle may belong to a device that is gone, and the next sample must not be compared with an old one.
            self._handles.pop(target.mig_uuid or target.gpu_uuid, None)
            if (window := self._windows.get(target)) is not None:
                window.sampled_at = None
            raise
        finally:
            self._reading.discard(target)

    def _read(self, target: UsageTarget) -> UsageReading:
        nvml, gpu = self._nvml, self._handle(target.gpu_uuid)
        device = gpu if target.mig_uuid is None else self._handle(target.mig_uuid)
        if target.gpu_uuid not in self._has_gpm:
            support = fact(nvml.nvmlGpmQueryDeviceSupport, gpu)
            self._has_gpm[target.gpu_uuid] = bool(support is not None and support.isSupportedDevice)
        activity = utilization = None
        if self._has_gpm[target.gpu_uuid]:
            activity = self._activity(gpu, target)
        elif target.mig_uuid is None:
            rates = fact(nvml.nvmlDeviceGetUtilizationRates, gpu)
            utilization = None if rates is None else rates.gpu * PERCENT
        # After the sample: this fails if the GPU instance with that id is another one by now.
        memory = _memory(nvml, device)
        running = fact(nvml.nvmlDeviceGetComputeRunningProcesses, device)
        processes = None
        if running is not None:
            processes = [GpuProcess(process.pid, process.usedGpuMemory) for process in running]
        return UsageReading(
            memory_used=None if memory is None else int(memory.used),
            memory_total=None if memory is None else int(memory.total),
            processes=processes,
            activity=activity,
            utilization=utilization,
        )

    def _activity(self, gpu: Any, target: UsageTarget) -> Activity | None:
        window = self._windows.get(target)
        if window is None:
            window = self._windows[target] = _Window(self._nvml)
        before, now = window.sampled_at, self._clock()
        if before is not None and now - before < SHORTEST_WINDOW_SECONDS:
            return None
        if target.gpu_instance_id is None:
            self._nvml.nvmlGpmSampleGet(gpu, window.older)
        else:
            self._nvml.nvmlGpmMigSampleGet(gpu, target.gpu_instance_id, window.older)
        window.older, window.newer, window.sampled_at = window.newer, window.older, now
        return None if before is None else self._between(window, now - before)

    def _between(self, window: _Window, seconds: float) -> Activity:
        request = pynvml.c_nvmlGpmMetricsGet_t()
        request.version, request.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(METRICS)
        request.sample1, request.sample2 = window.older, window.newer
        for index, metric in enumerate(METRICS):
            request.metrics[index].metricId = metric
        answer = self._nvml.nvmlGpmMetricsGet(request)
        reported = {
            metric_value.metricId: metric_value.value
            for metric_value in answer.metrics[: len(METRICS)]
            if metric_value.nvmlReturn == pynvml.NVML_SUCCESS and metric_value.value >= 0  # NaN is not
        }
        ratios = {name: min(1.0, reported[metric] * PERCENT) for name, metric in RATIOS.items() if metric in reported}
        rates = {
            name: MIB * sum(reported[metric] for metric in pair)
            for name, pair in RATES.items()
            if reported.keys() >= set(pair)
        }
        return Activity(seconds, **ratios, **rates)

    def _handle(self, uuid: str) -> Any:
        if uuid not in self._handles:
            self._handles[uuid] = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        return self._handles[uuid]


def _memory(nvml: Any, device: Any) -> Any | None:
    """Memory of a device. The first version of the struct counts 615 MiB that an H200 reserves as used."""
    with suppress(pynvml.NVMLError_ArgumentVersionMismatch):
        if (memory := fact(nvml.nvmlDeviceGetMemoryInfo, device, pynvml.nvmlMemory_v2)) is not None:
            return memory
    return fact(nvml.nvmlDeviceGetMemoryInfo, device)
