"""A GPU's time-slice interval, by ``nvidia-smi compute-policy``: NVML has no function for it.

On a GPU without support the tool exits with status 3 and "Failed to set timeslice policy with value Default
for GPU 0 : Not Supported" (a public log of a Tesla P4). Exit statuses up to 15 are NVML's return codes
(nvidia-smi's manual, "Return Value").
"""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pynvml

from driver.errors import HardwareError
from driver.hardware.host_paths import PROGRAM_DIRECTORIES, find_nvml, find_program
from driver.hardware.nvml_errors import NAMES
from driver.model.gpu_settings import TimeSlice

TOOL = "nvidia-smi"
NVIDIA_SMI_TIMEOUT_SECONDS = 15.0
"""Timeout of one run, which normally takes less than a second; the kubelet waits 45 s for a whole pod."""

OUTPUT_LIMIT = 500
"""Most characters of the tool's output in an error message."""

LAST_NVML_STATUS = 15


class TimeSliceTool:
    """The nvidia-smi of the driver below ``root``, found on first use: most nodes never need it."""

    def __init__(self, root: Path, *, needs_library: bool = True) -> None:
        self._root = root
        # Below a root other than "/" the dynamic linker does not find NVML's library.
        self._needs_library = needs_library and root != Path("/")

    def set(self, gpu_uuid: str, interval: TimeSlice) -> None:
        """Set the interval of a GPU.

        Raises HardwareError, with NVML's code if there is one; NOT_SUPPORTED also if the tool is missing.
        """
        what = f"setting time-slice {interval} on {gpu_uuid}"
        tool = self._found(what)
        status, output = self._run(
            [tool, "compute-policy", "-i", gpu_uuid, "--set-timeslice", str(interval.number)], what
        )
        if status:
            said = " ".join(output.split())[:OUTPUT_LIMIT] or "nothing"
            code = status if status <= LAST_NVML_STATUS and status in NAMES else None
            raise HardwareError(f"{what}: {tool} ended with status {status} and said: {said}", code)

    def _found(self, what: str) -> str:
        real = find_program(self._root, TOOL)
        if real is None:
            raise HardwareError(
                f"{what}: {self._root / PROGRAM_DIRECTORIES[0] / TOOL} does not exist, and only NVIDIA's tool can do "
                "it: install it below --driver-root, or leave the time-slice interval out of the claim's or class's "
                "configuration",
                pynvml.NVML_ERROR_NOT_SUPPORTED,
            )
        return str(self._root / real)

    def _run(self, command: list[str], what: str) -> tuple[int, str]:
        """Run the tool; return exit status and output."""
        # LD_PRELOAD of NVML only: a library path would also load the driver root's libc.
        library = find_nvml(self._root) if self._needs_library else None
        try:
            process = subprocess.Popen(
                command,
                env={**os.environ, **({"LD_PRELOAD": str(library)} if library else {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except OSError as error:
            # Also what the system says of a script whose interpreter is missing.
            code = pynvml.NVML_ERROR_NOT_SUPPORTED if isinstance(error, FileNotFoundError) else None
            raise HardwareError(f"{what}: {command[0]} can't be run: {error}", code) from error
        try:
            output, _ = process.communicate(timeout=NVIDIA_SMI_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired as error:
            process.kill()
            # A process that is stuck in the kernel module cannot be killed; reap it when it ends.
            threading.Thread(target=process.communicate, daemon=True, name="reap nvidia-smi").start()
            raise HardwareError(f"{what}: {command[0]} gave no answer in {NVIDIA_SMI_TIMEOUT_SECONDS:g} s") from error
        return process.returncode, output
