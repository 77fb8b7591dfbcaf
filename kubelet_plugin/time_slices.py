"""The time-slice interval of GPUs: what the claims on a GPU ask for, and the default once nobody does.

What is set follows from the checkpoint alone, so a kill at any instruction leaves nothing to remember: the
record of whoever asked is there before the interval is set, and goes after it is restored.
Callers hold the lock of the GPU.
"""

from __future__ import annotations

import logging

from driver.errors import HardwareError
from driver.hardware.calls import ABSENT
from driver.hardware.host import Host
from driver.model.gpu import Gpu
from driver.model.sharing import TimeSlice, in_force
from kubelet_plugin.checkpoint import Checkpoint
from kubelet_plugin.records import ClaimRecord
from kubelet_plugin.steps import Step, Steps

log = logging.getLogger(__name__)


class TimeSlices:
    """Every method can be repeated."""

    def __init__(self, host: Host, checkpoint: Checkpoint, steps: Steps) -> None:
        self._host = host
        self._checkpoint = checkpoint
        self._step = steps

    def apply(self, gpu: Gpu, record: ClaimRecord) -> None:
        """Bring the interval of ``gpu`` in force that it has with ``record``. Raises HardwareError."""
        if (wish := _wish(gpu, record)) is not TimeSlice.DEFAULT:
            others = self._wish_of_others(gpu, record)
            # A repeat sets it again: a reset of the GPU may have undone it.
            if in_force([others, wish]) is not others or record.phase == "prepared":
                self._set(Step.SET_TIME_SLICE, gpu, in_force([others, wish]))

    def release(self, gpu: Gpu, record: ClaimRecord) -> None:
        """Bring the interval in force that ``gpu`` has without ``record``. Raises HardwareError."""
        if (wish := _wish(gpu, record)) is not TimeSlice.DEFAULT:
            others = self._wish_of_others(gpu, record)
            if in_force([others, wish]) is not others:
                self._restore(gpu, others)

    def _restore(self, gpu: Gpu, interval: TimeSlice) -> None:
        try:
            self._set(Step.RESTORE_TIME_SLICE, gpu, interval)
        except HardwareError as error:
            # Where none can be set none was: a claim that was refused for it must not be kept for it.
            if error.code not in ABSENT:
                raise

    def _set(self, step: Step, gpu: Gpu, interval: TimeSlice) -> None:
        with self._step(step, gpu=gpu.uuid, interval=interval.value):
            self._host.set_time_slice(gpu, interval)
        log.info("set the time-slice interval", extra={"gpu": gpu.uuid, "interval": interval.value})

    def _wish_of_others(self, gpu: Gpu, record: ClaimRecord) -> TimeSlice:
        others = (other for other in self._checkpoint.records() if other.uid != record.uid)
        return in_force(_wish(gpu, other) for other in others if other.phase == "prepared")


def _wish(gpu: Gpu, record: ClaimRecord) -> TimeSlice:
    return in_force(device.time_slice for device in record.devices if device.gpu_uuid == gpu.uuid)
