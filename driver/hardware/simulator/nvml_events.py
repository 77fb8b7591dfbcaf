"""Simulated NVML: event sets, through which a GPU's XIDs and MIG changes are heard.

Events are in the GPUs' state files, so that whoever raises one may be another process. A set hears what happens
after a GPU was registered with it.
"""

# ruff: noqa: N802, N803
from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import Any

import pynvml

from .machine import Machine
from .nvml_arguments import error, integer
from .nvml_keys import EventSetKey, GpuKey
from .nvml_session import NvmlSession, simulated
from .state import Event

# How often a waiting call looks, in seconds.
_POLL_S = 0.02

# What Linux drivers report. Clock and power-source changes are for other platforms; the choice is an estimate.
_ALWAYS = (
    pynvml.nvmlEventTypeSingleBitEccError
    | pynvml.nvmlEventTypeDoubleBitEccError
    | pynvml.nvmlEventTypePState
    | pynvml.nvmlEventTypeXidCriticalError
)

_RECOVERY = pynvml.nvmlEventTypeGpuUnavailableError | pynvml.nvmlEventTypeGpuRecoveryAction


@dataclass
class _Watch:
    """One GPU in one event set: wanted events, and the number of the last one seen."""

    mask: int
    seen: int


@dataclass
class _EventSet:
    watches: dict[int, _Watch] = field(default_factory=dict)


class EventCalls(NvmlSession):
    """``nvmlEventSet*`` and ``nvmlDevice*Event*``. MIG devices can't be registered: NOT_SUPPORTED."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._numbers = itertools.count()
        self._event_sets: dict[EventSetKey, _EventSet] = {}

    @simulated()
    def nvmlEventSetCreate(self) -> Any:
        key = EventSetKey(next(self._numbers))
        self._event_sets[key] = _EventSet()
        return self.handle(key)

    @simulated()
    def nvmlEventSetFree(self, eventSet: Any) -> None:
        key = self._event_set_key(eventSet)
        del self._event_sets[key]
        self.forget(key)

    @simulated()
    def nvmlDeviceGetSupportedEventTypes(self, handle: Any) -> int:
        self.gpu(handle)
        mig = pynvml.nvmlEventMigConfigChange if self.machine.product.mig_capable else 0
        recovery = _RECOVERY if self.machine.tells_recovery else 0
        supported: int = _ALWAYS | mig | recovery
        return supported

    @simulated()
    def nvmlDeviceRegisterEvents(self, handle: Any, eventTypes: int, eventSet: Any) -> None:
        minor, wanted = self.gpu(handle), integer(eventTypes)
        watches = self._event_sets[self._event_set_key(eventSet)].watches
        if wanted & ~self.nvmlDeviceGetSupportedEventTypes(handle):
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if minor in watches:
            watches[minor].mask |= wanted
        else:
            watches[minor] = _Watch(wanted, self.machine.state(minor).next_event - 1)

    @simulated()
    def nvmlEventSetWait_v2(self, eventSet: Any, timeoutms: int) -> Any:
        key = self._event_set_key(eventSet)
        end = time.monotonic() + integer(timeoutms) / 1000
        while True:
            watches = self._watches(key)
            for minor, watch in watches.items():
                event = self._next(minor, watch)
                if event is not None:
                    return self._data(minor, event)
            if not self.machine.faults.read().lost.isdisjoint(watches):
                raise error(pynvml.NVML_ERROR_GPU_IS_LOST)
            left = end - time.monotonic()
            if left <= 0:
                raise error(pynvml.NVML_ERROR_TIMEOUT)
            time.sleep(min(_POLL_S, left))

    @simulated()
    def nvmlEventSetWait(self, eventSet: Any, timeoutms: int) -> Any:
        return self.nvmlEventSetWait_v2(eventSet, timeoutms)

    def _watches(self, key: EventSetKey) -> dict[int, _Watch]:
        """What a set listens to now; another thread may have freed it or ended the session meanwhile."""
        self.require_session()
        if key not in self._event_sets:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return dict(self._event_sets[key].watches)

    def _next(self, minor: int, watch: _Watch) -> Event | None:
        for event in self.machine.state(minor).events:
            if event.number <= watch.seen:
                continue
            watch.seen = event.number
            if event.kind & watch.mask:
                return event
        return None

    def _data(self, minor: int, event: Event) -> Any:
        data = pynvml.c_nvmlEventData_t()
        data.device = self.handle(GpuKey(minor))
        data.eventType, data.eventData = event.kind, event.data
        data.gpuInstanceId, data.computeInstanceId = event.gpu_instance, event.compute_instance
        return data

    def _event_set_key(self, handle: Any) -> EventSetKey:
        key = self.find(handle)
        if not isinstance(key, EventSetKey):
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return key
