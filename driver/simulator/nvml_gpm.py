"""Simulated NVML: GPM, whose samples hold the counters of a GPU or a GPU instance, and utilization rates.

NVML documents these functions without their error codes. Estimates: every code below except NOT_SUPPORTED of GPUs
before Hopper, and that samples which do not belong together are refused. A client must not rely on the latter.
"""

# ruff: noqa: N802, N803
from __future__ import annotations

from typing import Any

import pynvml

from driver.simulator import mig_rules
from driver.simulator.machine import GpuInstance, SimulatedGpuState
from driver.simulator.nvml_base import GpmSample, NvmlSession, error, integer, simulated
from driver.simulator.state.gpu_load import WHOLE_GPU, SimulatedActivity

MIB = 1 << 20

SHORTEST_INTERVAL_SECONDS = 0.1
"""NVML's manual: two samples should be more than 100 ms apart, the time in which the counters are refreshed."""

_HOPPER = (9, 0)

_RATIOS = {
    pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL: "busy",
    pynvml.NVML_GPM_METRIC_SM_UTIL: "sm",
    pynvml.NVML_GPM_METRIC_SM_OCCUPANCY: "occupancy",
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: "tensor",
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: "dram",
}
_NVLINK = (pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC, pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC)
_PCIE = (pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC, pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC)


class GpmCalls(NvmlSession):
    """``nvmlGpm*`` and utilization rates. Samples belong to the process that allocated them."""

    @simulated
    def nvmlGpmQueryDeviceSupport(self, device: Any) -> Any:
        self.gpu(device, pynvml.NVML_ERROR_INVALID_ARGUMENT)
        support = pynvml.c_nvmlGpmSupport_t()
        support.version = pynvml.NVML_GPM_SUPPORT_VERSION
        support.isSupportedDevice = int(self._has_gpm)
        return support

    @simulated
    def nvmlGpmSampleAlloc(self) -> Any:
        return self.handle(GpmSample())

    @simulated
    def nvmlGpmSampleFree(self, gpmSample: Any) -> None:
        self.forget(self.target(gpmSample, GpmSample))

    @simulated
    def nvmlGpmSampleGet(self, device: Any, gpmSample: Any) -> Any:
        minor, sample = self._gpm_gpu(device), self.target(gpmSample, GpmSample)
        now, state = self.machine.clock(), self.machine.gpu_state(minor)
        sample.minor, sample.serial, sample.time = minor, None, now
        sample.counters = state.loads.counters(WHOLE_GPU, now)
        return gpmSample

    @simulated
    def nvmlGpmMigSampleGet(self, device: Any, gpuInstanceId: int, gpmSample: Any) -> Any:
        minor, sample, instance_id = self._gpm_gpu(device), self.target(gpmSample, GpmSample), integer(gpuInstanceId)
        now, state = self.machine.clock(), self.machine.gpu_state(minor)
        mig_rules.require_mig(state)
        instance = next((gi for gi in state.instances if gi.id == instance_id), None)
        if instance is None:
            raise error(pynvml.NVML_ERROR_NOT_FOUND)
        sample.minor, sample.serial, sample.time = minor, instance.serial, now
        sample.counters = self._of_instance(state, instance, now)
        return gpmSample

    @simulated
    def nvmlGpmMetricsGet(self, metricsGet: Any) -> Any:
        if not isinstance(metricsGet, pynvml.c_nvmlGpmMetricsGet_t):
            raise TypeError(f"expected c_nvmlGpmMetricsGet_t, got {type(metricsGet).__name__}")
        if metricsGet.version != pynvml.NVML_GPM_METRICS_GET_VERSION:
            raise error(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        minor, average = self._average(metricsGet.sample1, metricsGet.sample2)
        if not 0 < metricsGet.numMetrics <= len(metricsGet.metrics):
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        values = self._values(minor, average)
        for metric in metricsGet.metrics[: metricsGet.numMetrics]:
            supported = metric.metricId in values
            metric.nvmlReturn = pynvml.NVML_SUCCESS if supported else pynvml.NVML_ERROR_NOT_SUPPORTED
            metric.value = values.get(metric.metricId, 0.0)
        return metricsGet

    @simulated
    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        state, now = self.machine.gpu_state(self.gpu(handle)), self.machine.clock()
        if state.mig_enabled:
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        before, after = (state.loads.counters(WHOLE_GPU, time) for time in (now - 1, now))
        rates = pynvml.c_nvmlUtilization_t()
        rates.gpu, rates.memory = (
            min(100, round(100 * seconds)) for seconds in (after.busy - before.busy, after.dram - before.dram)
        )
        return rates

    @property
    def _has_gpm(self) -> bool:
        return self.machine.product.compute_capability >= _HOPPER

    def _gpm_gpu(self, handle: Any) -> int:
        minor = self.gpu(handle, pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if not self._has_gpm:
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return minor

    def _of_instance(self, state: SimulatedGpuState, instance: GpuInstance, now: float) -> SimulatedActivity:
        """The counters of a GPU instance: those of its compute instances, by their parts of it."""
        slices, total = self.machine.product.by_id[instance.profile].slices, SimulatedActivity()
        for compute in instance.compute:
            part = compute.size / slices
            total = total.plus(state.loads.counters(compute.uuid, now).part(part, part))
        return total

    def _average(self, first: Any, second: Any) -> tuple[int, SimulatedActivity]:
        """The GPU and its average activity between two samples; INVALID_ARGUMENT if they do not belong together."""
        older, newer = self.target(first, GpmSample), self.target(second, GpmSample)
        belong_together = (older.minor, older.serial) == (newer.minor, newer.serial)
        if older.counters is None or newer.counters is None or not belong_together:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        seconds = newer.time - older.time
        # After a reset of the GPU its counters begin again at 0; the tolerance is for rounding.
        went_back = any(
            later < earlier * (1 - 1e-9) for earlier, later in zip(older.counters, newer.counters, strict=True)
        )
        if seconds < SHORTEST_INTERVAL_SECONDS or went_back:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        differences = newer.counters.plus(older.counters, -1)
        return older.minor, SimulatedActivity(*(max(0.0, difference) / seconds for difference in differences))

    def _values(self, minor: int, average: SimulatedActivity) -> dict[int, float]:
        """The values of the metrics that the GPU has: percentages, and MiB per second in each direction."""
        values = {metric: min(100.0, 100 * getattr(average, name)) for metric, name in _RATIOS.items()}
        values |= dict.fromkeys(_PCIE, average.pcie / 2 / MIB)
        return values | dict.fromkeys(_NVLINK if self.machine.has_nvlink(minor) else (), average.nvlink / 2 / MIB)
