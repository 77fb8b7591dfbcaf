"""Time-slice intervals of GPUs. Every method can be repeated; the caller holds the GPU's lock."""

from __future__ import annotations

import logging

from driver.errors import HardwareError
from driver.hardware.host import Host
from driver.hardware.nvml_errors import ABSENT
from driver.model.gpu import Gpu
from driver.model.gpu_settings import TimeSlice, time_slice_in_force
from kubelet_plugin.checkpoint.records import Checkpoint, ClaimRecord
from kubelet_plugin.step_names import NodeStep, StepRunner

log = logging.getLogger(__name__)


class TimeSlices:
    """The time-slice interval of GPUs: the one that the claims on a GPU request, otherwise the default.

    The interval follows from the checkpoint alone, so a kill at any instruction leaves nothing to remember: the record
    of a claim is written before its interval is set, and removed after the interval is restored.
    """

    def __init__(self, host: Host, checkpoint: Checkpoint, steps: StepRunner) -> None:
        self._host, self._checkpoint, self._step = host, checkpoint, steps

    def apply(self, gpu: Gpu, record: ClaimRecord) -> None:
        """Set the interval that ``gpu`` has with ``record``. Raises HardwareError."""
        requested = record.requested_time_slice(gpu.uuid)
        if requested is TimeSlice.DEFAULT:
            return
        others = self._requested_by_others(gpu, record)
        interval = time_slice_in_force([others, requested])
        # Set again at a repeat: a reset of the GPU may have undone it.
        if interval is not others or record.phase == "prepared":
            self._set(NodeStep.SET_TIME_SLICE, gpu, interval)

    def release(self, gpu: Gpu, record: ClaimRecord) -> None:
        """Set the interval that ``gpu`` has without ``record``. Raises HardwareError."""
        requested = record.requested_time_slice(gpu.uuid)
        if requested is TimeSlice.DEFAULT:
            return
        others = self._requested_by_others(gpu, record)
        if time_slice_in_force([others, requested]) is not others:
            try:
                self._set(NodeStep.RESTORE_TIME_SLICE, gpu, others)
            except HardwareError as error:
                # A GPU that accepts no interval never had one: it must not block the release of a refused claim.
                if error.code not in ABSENT:
                    raise

    def _set(self, step: NodeStep, gpu: Gpu, interval: TimeSlice) -> None:
        with self._step(step, gpu=gpu.uuid, interval=interval.value):
            self._host.set_time_slice(gpu, interval)
        log.info("set the time-slice interval", extra={"gpu": gpu.uuid, "interval": interval.value})

    def _requested_by_others(self, gpu: Gpu, record: ClaimRecord) -> TimeSlice:
        others = (other for other in self._checkpoint.records() if other.uid != record.uid)
        return time_slice_in_force(
            other.requested_time_slice(gpu.uuid) for other in others if other.phase == "prepared"
        )
