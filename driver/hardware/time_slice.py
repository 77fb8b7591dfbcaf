"""A GPU's time-slice interval, by ``nvidia-smi compute-policy``: NVML has no function for it.

What the tool says where a GPU can't: exit status 3 and "Failed to set timeslice policy with value Default
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
from driver.hardware.calls import NAMES
from driver.hardware.driver_root import LIBRARY_DIRECTORIES, resolve_inside
from driver.model.sharing import TimeSlice

TOOL = "usr/bin/nvidia-smi"
LIBRARY = "libnvidia-ml.so.1"
DEADLINE_S = 15.0
"""Of one run: it takes well under a second, and the kubelet waits 45 s for everything a pod needs."""

OUTPUT_LIMIT = 500
"""Characters of what the tool printed that go into an error."""

LAST_NVML_STATUS = 15


class TimeSliceTool:
    """The nvidia-smi of the driver below ``root``, looked for when it is needed: most nodes never need it."""

    def __init__(self, root: Path, *, needs_library: bool = True) -> None:
        self._root = root
        # Below another root than "/" the dynamic linker doesn't find NVML's library by itself.
        self._needs_library = needs_library and root != Path("/")

    def set(self, gpu_uuid: str, interval: TimeSlice) -> None:
        """Returns once ``interval`` is in force on the GPU.

        Raises HardwareError, with NVML's code where it has one: NOT_SUPPORTED also where there is no tool.
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
        real = resolve_inside(self._root, TOOL)
        if real is None:
            raise HardwareError(
                f"{what}: {self._root / TOOL} does not exist, and only NVIDIA's tool can do it: install it below "
                "--driver-root, or leave the time-slice interval out of the claim's or class's configuration",
                pynvml.NVML_ERROR_NOT_SUPPORTED,
            )
        return str(self._root / real)

    def _run(self, command: list[str], what: str) -> tuple[int, str]:
        """Exit status and what was printed."""
        try:
            process = subprocess.Popen(
                command,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise HardwareError(f"{what}: {command[0]} can't be run: {error}") from error
        try:
            output, _ = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired as error:
            process.kill()
            # A process that is stuck in the kernel module ends when that lets go, and not before.
            threading.Thread(target=process.communicate, daemon=True, name="reap nvidia-smi").start()
            raise HardwareError(f"{what}: {command[0]} gave no answer in {DEADLINE_S:g} s") from error
        return process.returncode, output

    def _environment(self) -> dict[str, str]:
        """LD_PRELOAD names the one library: a library path would bring the driver root's libc with it, and a crash."""
        library = self._library() if self._needs_library else None
        return {**os.environ, **({"LD_PRELOAD": library} if library else {})}

    def _library(self) -> str | None:
        candidates = (resolve_inside(self._root, f"{directory}/{LIBRARY}") for directory in LIBRARY_DIRECTORIES)
        return next((str(self._root / real) for real in candidates if real is not None), None)
