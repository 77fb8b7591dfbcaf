"""NVML events, received through an event set.

NVML refuses to wait on a set as soon as one of its GPUs is lost; then a new set of the reachable GPUs replaces it.
Events of the old set are read first: an event may be returned twice, and none is lost.

Only GPUs that answered in the most recent scan are registered: a GPU that hangs would block the events of all others.
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

from driver.hardware.nvml_errors import ABSENT
from driver.model.gpu_events_and_conditions import EventKind, GpuEvent

EVENT_KINDS = {
    pynvml.nvmlEventTypeXidCriticalError: EventKind.XID,
    pynvml.nvmlEventMigConfigChange: EventKind.MIG_CHANGED,
    pynvml.nvmlEventTypeGpuUnavailableError: EventKind.UNAVAILABLE,
    pynvml.nvmlEventTypeGpuRecoveryAction: EventKind.RECOVERY,
}
WANTED = sum(EVENT_KINDS)

WHOLE_GPU_ID = 0xFFFFFFFF
"""The instance id of an event that concerns the whole GPU."""

EVENT_RETRY_INTERVAL_SECONDS = 1.0
"""Longest pause after an error before the next wait."""

MAX_PENDING_EVENTS = 1000
"""Most events that are read from a set that is replaced; a GPU may report events endlessly."""


class Events:
    """One event set for all reachable GPUs. ``wait`` is for one thread, ``register`` and ``keep`` are thread-safe."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._lock = threading.Lock()
        self._set: Any | None = None
        self._reachable: set[str] = set()
        self._registered: set[str] = set()
        self._uuids: dict[int | None, str] = {}
        self._left: deque[GpuEvent] = deque()

    def register(self, uuid: str, handle: Any) -> None:
        """Receive events of this GPU; an unreachable one is retried at the next wait."""
        with self._lock, suppress(pynvml.NVMLError):
            self._uuids[_address(handle)] = uuid
            self._reachable.add(uuid)
            if uuid in self._registered:
                return
            if self._set is None:
                self._set = self._nvml.nvmlEventSetCreate()
            self._subscribe(handle)
            self._registered.add(uuid)

    def keep(self, uuids: Collection[str]) -> None:
        """Keep only these GPUs registered; others must be registered again when they return."""
        with self._lock:
            self._reachable = set(uuids)
            self._registered &= self._reachable

    def registered_for_test(self, handle: Any) -> int:
        """Register the GPU with a set of its own, which is freed again; return the registered types (bits).

        Raises NVMLError.
        """
        event_set = self._nvml.nvmlEventSetCreate()
        try:
            return self._register_supported(handle, event_set)
        finally:
            self._nvml.nvmlEventSetFree(event_set)

    def wait(self, handles: Mapping[str, Any], timeout_s: float) -> GpuEvent | None:
        """Return the next event of one of the GPUs (by UUID), or None after the timeout."""
        if self._left:
            return self._left.popleft()
        began = time.monotonic()
        self._register_all(handles)
        try:
            return self._event(self._nvml.nvmlEventSetWait_v2(self._set, round(timeout_s * 1000)))
        except pynvml.NVMLError as error:
            if error.value != pynvml.NVML_ERROR_TIMEOUT:
                self._renew(handles)
                time.sleep(max(0.0, min(EVENT_RETRY_INTERVAL_SECONDS, timeout_s - (time.monotonic() - began))))
        return self._left.popleft() if self._left else None

    def _subscribe(self, handle: Any) -> None:
        """Raises NVMLError, unless the GPU reports no events at all."""
        try:
            self._register_supported(handle, self._set)
        except pynvml.NVMLError as error:
            if error.value not in ABSENT:
                raise

    def _register_supported(self, handle: Any, event_set: Any) -> int:
        """Register those of WANTED that the GPU supports, and return them. Raises NVMLError."""
        event_types: int = WANTED & self._nvml.nvmlDeviceGetSupportedEventTypes(handle)
        if event_types:
            self._nvml.nvmlDeviceRegisterEvents(handle, event_types, event_set)
        return event_types

    def _register_all(self, handles: Mapping[str, Any]) -> None:
        for uuid, handle in handles.items():
            if uuid in self._reachable:
                self.register(uuid, handle)

    def _renew(self, handles: Mapping[str, Any]) -> None:
        with self._lock:
            given_up, self._set, self._registered = self._set, None, set()
        self._register_all(handles)
        if given_up is None:
            return
        with suppress(pynvml.NVMLError):  # TIMEOUT: no more events; GPU_IS_LOST is returned after the last event
            for _ in range(MAX_PENDING_EVENTS):
                self._left.append(self._event(self._nvml.nvmlEventSetWait_v2(given_up, 0)))
        with suppress(pynvml.NVMLError):
            self._nvml.nvmlEventSetFree(given_up)

    def _event(self, data: Any) -> GpuEvent:
        kind = EVENT_KINDS.get(data.eventType, EventKind.MIG_CHANGED)
        return GpuEvent(
            kind,
            self._uuids.get(_address(data.device)),  # a lost GPU cannot be queried
            data.eventData if kind is EventKind.XID else None,
            _instance(data.gpuInstanceId),
            _instance(data.computeInstanceId),
        )


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _instance(number: int) -> int | None:
    return None if number == WHOLE_GPU_ID else number
