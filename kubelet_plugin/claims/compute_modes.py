"""The compute mode of GPUs that claims share by MPS. Every method can be repeated; the caller holds the GPU's lock."""

from __future__ import annotations

import logging

from driver.errors import HardwareError
from driver.hardware.host import Host
from driver.hardware.nvml_errors import ABSENT
from driver.model.gpu import Gpu
from driver.model.gpu_settings import ComputeMode

log = logging.getLogger(__name__)

USABLE = (ComputeMode.DEFAULT, ComputeMode.EXCLUSIVE_PROCESS)
"""The modes in which a GPU can be shared by MPS; in the others its administrator keeps programs out."""


class ComputeModes:
    """While claims share a GPU by MPS its mode is EXCLUSIVE_PROCESS: a program that drops its pipe directory gets no
    part of the GPU, instead of one beside MPS without limits.

    The order that makes a kill at any instruction harmless: record the result of ``to_restore`` before the first
    ``hold``; forget it after ``restore``, once the last claim's daemon has ended.
    """

    def __init__(self, host: Host) -> None:
        self._host = host

    def to_restore(self, gpu: Gpu) -> ComputeMode:
        """The mode of ``gpu`` before its first claim, to be recorded. Raises HardwareError: MPS can't share the GPU."""
        mode = self._host.compute_mode(gpu)
        if mode not in USABLE:
            raise HardwareError(
                f"the compute mode of {gpu.uuid} is {mode.name}, in which it can't be shared by MPS: set it back "
                f"(nvidia-smi -i {gpu.uuid} -c DEFAULT) or do not share this GPU"
            )
        return mode

    def hold(self, gpu: Gpu) -> None:
        """Let only clients of MPS use ``gpu``: at each prepare, for a reboot or an administrator may have changed it.

        Raises HardwareError.
        """
        if self.to_restore(gpu) is not ComputeMode.EXCLUSIVE_PROCESS:
            self._set(gpu, ComputeMode.EXCLUSIVE_PROCESS)

    def restore(self, gpu: Gpu, mode: ComputeMode) -> None:
        """Set back the recorded ``mode``, unless somebody else has changed the mode since. Raises HardwareError."""
        try:
            if mode is not ComputeMode.EXCLUSIVE_PROCESS and self._host.compute_mode(gpu) is (
                ComputeMode.EXCLUSIVE_PROCESS
            ):
                self._set(gpu, mode)
        except HardwareError as error:
            # A GPU that has no modes, such as one in MIG mode, never had another.
            if error.code not in ABSENT:
                raise

    def _set(self, gpu: Gpu, mode: ComputeMode) -> None:
        self._host.set_compute_mode(gpu, mode)
        log.info("set the compute mode", extra={"gpu": gpu.uuid, "mode": mode.name})
