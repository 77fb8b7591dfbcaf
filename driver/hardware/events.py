"""Hearing from the hardware that something changed, through NVML's event set.

What exactly happened is found by looking again; here it only matters that something did.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pynvml

WANTED = (
    pynvml.nvmlEventTypeXidCriticalError
    | pynvml.nvmlEventMigConfigChange
    | pynvml.nvmlEventTypeGpuUnavailableError
    | pynvml.nvmlEventTypeGpuRecoveryAction
)


class Events:
    """One event set for all GPUs that are known; for the thread that rescans alone."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._set: Any | None = None
        self._registered: set[str] = set()

    def wait(self, handles: Iterable[tuple[str, Any]], timeout_s: float) -> bool:
        """Wait for an event of one of the GPUs (UUID, handle). Without events it is just a pause.

        While a GPU is lost, NVML refuses to wait at all: then it is just a pause, too.
        """
        began = time.monotonic()
        try:
            if self._set is None:
                self._set = self._nvml.nvmlEventSetCreate()
            for uuid, handle in handles:
                self._register(uuid, handle)
            self._nvml.nvmlEventSetWait_v2(self._set, round(timeout_s * 1000))
        except pynvml.NVMLError as error:
            if error.value != pynvml.NVML_ERROR_TIMEOUT:
                time.sleep(max(0.0, timeout_s - (time.monotonic() - began)))
            return False
        return True

    def _register(self, uuid: str, handle: Any) -> None:
        if uuid in self._registered:
            return
        self._registered.add(uuid)
        try:
            supported = self._nvml.nvmlDeviceGetSupportedEventTypes(handle)
            self._nvml.nvmlDeviceRegisterEvents(handle, WANTED & supported, self._set)
        except pynvml.NVMLError:
            # A GPU that reports no events, or is in trouble just now: the timer looks at it anyway.
            return
