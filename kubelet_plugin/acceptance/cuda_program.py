"""A program that uses a GPU through CUDA as a container would: it attempts to get a context and memory.

``python -m kubelet_plugin.acceptance.cuda_program DRIVER GPU BYTES USER``: DRIVER is libcuda.so.1, or the root
directory of a simulated node; it allocates BYTES at once as the user with this id. It prints a ProgramReport, and holds
what it has until its standard input ends. CUDA reads its environment, such as CUDA_MPS_PIPE_DIRECTORY.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Protocol

import msgspec

from driver.errors import HardwareError

FUNCTIONS = (
    "cuInit",
    "cuGetErrorName",
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
)

PR_SET_DUMPABLE = 4
"""Of prctl(2): a process that has changed its user may then read /proc/self again."""


class ProgramReport(msgspec.Struct, frozen=True):
    """``no_user``: why the process can't be USER's; then it has attempted nothing. ``error``: why there is no context.

    ``free``, ``total``: bytes that CUDA shows next to the context. ``refusal``: the answer to the allocation; "": it
    was granted.
    """

    no_user: str = ""
    error: str = ""
    free: int = 0
    total: int = 0
    refusal: str = ""


class Cuda(Protocol):
    """One context on one GPU. All methods raise HardwareError."""

    def create_context(self) -> None: ...

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and all."""

    def allocate(self, size: int) -> None: ...

    def close(self) -> None: ...


class CudaLibrary:
    """Calls a driver's libcuda (CUDA Driver API); the process sees one GPU, by CUDA_VISIBLE_DEVICES."""

    def __init__(self, path: str) -> None:
        try:
            library = ctypes.CDLL(path)
            self._functions = {name: getattr(library, name) for name in FUNCTIONS}
        except (OSError, AttributeError) as error:
            raise HardwareError(f"{path}: {error}") from error

    def create_context(self) -> None:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def memory(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, size: int) -> None:
        self._call("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(size))

    def close(self) -> None:
        """The end of the process frees everything."""

    def _call(self, name: str, *arguments: object) -> None:
        result = self._functions[name](*arguments)
        if result:
            text = ctypes.c_char_p()
            self._functions["cuGetErrorName"](result, ctypes.byref(text))
            raise HardwareError(f"{name}: {(text.value or b'error %d' % result).decode()}")


def open_cuda(driver: str, gpu: str) -> Cuda:
    """Raises HardwareError."""
    if not Path(driver).is_dir():
        return CudaLibrary(driver)
    # Only a simulated node pays for loading the simulator.
    from driver.simulator.mps.cuda_client import SimulatedCuda

    return SimulatedCuda(Path(driver), gpu)


def become(user: int) -> None:
    """Let this process be another user's, without any privilege. Raises OSError."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)


def attempt(cuda: Cuda, size: int) -> ProgramReport:
    """Get a context, then ``size`` bytes at once."""
    try:
        cuda.create_context()
        free, total = cuda.memory()
    except HardwareError as error:
        return ProgramReport(error=str(error))
    try:
        cuda.allocate(size)
    except HardwareError as error:
        return ProgramReport(free=free, total=total, refusal=str(error))
    return ProgramReport(free=free, total=total)


def main(driver: str, gpu: str, size: str, user: str) -> None:
    try:
        cuda = open_cuda(driver, gpu)
    except HardwareError as error:
        sys.exit(f"{error}")
    try:
        if int(user) != os.getuid():
            become(int(user))
    except OSError as error:
        report = ProgramReport(no_user=f"{error.strerror}")
    else:
        report = attempt(cuda, int(size))
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.flush()
    sys.stdin.read()
    cuda.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
