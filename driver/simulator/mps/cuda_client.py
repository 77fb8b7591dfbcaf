"""CUDA on a GPU of a simulated node, as far as the acceptance test uses it: a context, and its memory."""

from __future__ import annotations

import os
from pathlib import Path

from driver.errors import HardwareError, UsageError
from driver.simulator.mps.control_program import connect_client
from driver.simulator.mps.limits import CudaError, Refusal
from driver.simulator.node import SimulatedNode
from driver.simulator.state.gpu_load import SimulatedActivity, constant

CONTEXT_BYTES = 514 << 20
"""Memory of a context, as measured on an H200."""


class SimulatedCuda:
    """The process's use of a GPU (UUID) of the node in ``root``: as a client of the MPS daemon in the directory
    CUDA_MPS_PIPE_DIRECTORY of its environment, or without MPS if none answers there.

    A client of MPS is not listed by NVML here; without MPS the process is, until ``close``. All methods raise
    HardwareError.
    """

    def __init__(self, root: Path, gpu: str) -> None:
        self._node, self._gpu = SimulatedNode.attach(root), gpu
        self._used = CONTEXT_BYTES
        self._limit: int | None = None
        self._outside = False

    def create_context(self) -> None:
        try:
            self._limit = connect_client(self._pipe, self._gpu, self._used, os.environ, os.getuid()).memory
        except CudaError as error:
            raise HardwareError(str(error)) from error
        except Refusal:  # no daemon answers: CUDA runs without MPS, and says nothing
            try:
                self._node.put_load(self._gpu, constant(SimulatedActivity(), self._used), pid=os.getpid())
            except UsageError as error:
                raise HardwareError(f"CUDA_ERROR_DEVICE_UNAVAILABLE: {error}") from error
            self._outside = True

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and all, as cuMemGetInfo has them: MPS divides the free part only."""
        total = self._node.product.memory_mib << 20
        return (total if self._limit is None else self._limit) - self._used, total

    def allocate(self, size: int) -> None:
        if self.memory()[0] < size:
            raise HardwareError("CUDA_ERROR_OUT_OF_MEMORY")
        self._used += size

    def close(self) -> None:
        if self._outside:
            self._node.end_load(self._gpu, os.getpid())

    @property
    def _pipe(self) -> Path:
        return Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
