"""Hearing from the hardware that something happened, through NVML's event sets.

NVML refuses to wait on a set as soon as one of its GPUs is lost, so then a new set is made of those that can still be
reached. What the old one had is heard first: an event may be told twice, and none is lost.

Only a GPU that answered when it was last looked at is asked for anything: one that hangs would keep us there, and the
events of all others with it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import pynvml

from driver.hardware.calls import ABSENT
from driver.model.health import EventKind, GpuEvent

KINDS = {
    pynvml.nvmlEventTypeXidCriticalError: EventKind.XID,
    pynvml.nvmlEventMigConfigChange: EventKind.MIG_CHANGED,
    pynvml.nvmlEventTypeGpuUnavailableError: EventKind.UNAVAILABLE,
    pynvml.nvmlEventTypeGpuRecoveryAction: EventKind.RECOVERY,
}
WANTED = sum(KINDS)

WHOLE_GPU = 0xFFFFFFFF
"""Stands for no instance id."""

RETRY_S = 1.0
"""Longest pause after an error before waiting again."""

MOST_LEFT = 1000
"""Events taken over from a set that is given up; a GPU that reports without end must not keep us there."""


class Events:
    """One event set for all GPUs that can be reached. ``wait`` is for one thread, ``register`` and ``keep`` for any."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._lock = threading.Lock()
        self._set: Any | None = None
        self._answering: set[str] = set()
        self._registered: set[str] = set()
        self._uuids: dict[int | None, str] = {}
        self._left: deque[GpuEvent] = deque()

    def register(self, uuid: str, handle: Any) -> None:
        """Hear of this GPU from now on; one that can't be reached just now is tried again at the next wait."""
        with self._lock, suppress(pynvml.NVMLError):
            self._uuids[_address(handle)] = uuid
            self._answering.add(uuid)
            if uuid in self._registered:
                return
            if self._set is None:
                self._set = self._nvml.nvmlEventSetCreate()
            self._subscribe(handle)
            self._registered.add(uuid)

    def keep(self, uuids: Collection[str]) -> None:
        """These GPUs answer; any other has to be registered anew when it is back."""
        with self._lock:
            self._answering = set(uuids)
            self._registered &= self._answering

    def wait(self, handles: Mapping[str, Any], timeout_s: float) -> GpuEvent | None:
        """The next event of one of the GPUs (by UUID), or None in time. Without events it is just a pause."""
        if self._left:
            return self._left.popleft()
        began = time.monotonic()
        self._register_all(handles)
        try:
            return self._event(self._nvml.nvmlEventSetWait_v2(self._set, round(timeout_s * 1000)))
        except pynvml.NVMLError as error:
            if error.value != pynvml.NVML_ERROR_TIMEOUT:
                self._renew(handles)
                time.sleep(max(0.0, min(RETRY_S, timeout_s - (time.monotonic() - began))))
        return self._left.popleft() if self._left else None

    def _subscribe(self, handle: Any) -> None:
        """Raises NVMLError, unless the GPU reports no events at all."""
        try:
            wanted = WANTED & self._nvml.nvmlDeviceGetSupportedEventTypes(handle)
            if wanted:
                self._nvml.nvmlDeviceRegisterEvents(handle, wanted, self._set)
        except pynvml.NVMLError as error:
            if error.value not in ABSENT:
                raise

    def _register_all(self, handles: Mapping[str, Any]) -> None:
        for uuid, handle in handles.items():
            if uuid in self._answering:
                self.register(uuid, handle)

    def _renew(self, handles: Mapping[str, Any]) -> None:
        with self._lock:
            given_up, self._set, self._registered = self._set, None, set()
        self._register_all(handles)
        if given_up is None:
            return
        with suppress(pynvml.NVMLError):  # TIMEOUT: nothing is left; GPU_IS_LOST comes after what is left
            for _ in range(MOST_LEFT):
                self._left.append(self._event(self._nvml.nvmlEventSetWait_v2(given_up, 0)))
        with suppress(pynvml.NVMLError):
            self._nvml.nvmlEventSetFree(given_up)

    def _event(self, data: Any) -> GpuEvent:
        kind = KINDS.get(data.eventType, EventKind.MIG_CHANGED)
        return GpuEvent(
            kind,
            self._uuids.get(_address(data.device)),  # a GPU that is lost can't be asked
            data.eventData if kind is EventKind.XID else None,
            _instance(data.gpuInstanceId),
            _instance(data.computeInstanceId),
        )


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _instance(number: int) -> int | None:
    return None if number == WHOLE_GPU else number
