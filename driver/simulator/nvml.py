"""``SimulatedNvml``, which replaces the module ``pynvml``, and the simulated event sets.

Constants, struct classes and exceptions are those of pynvml. A function that is not simulated returns
FUNCTION_NOT_FOUND, like a driver that is too old, and never reaches a real library. Events are stored in the state
files of the GPUs, so another process may raise them; an event set reports events after a GPU was registered with it.
"""

# ruff: noqa: N802, N803
from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NoReturn

import pynvml

from driver.simulator.faults import SimulatedEvent
from driver.simulator.machine import Machine
from driver.simulator.nvml_device import DeviceCalls
from driver.simulator.nvml_mig import MigCalls
from driver.simulator.nvml_session import EventSetKey, GpuKey, NvmlSession, error, integer, plain_name, simulated
from driver.simulator.smi_tool import CALL as SMI

_POLL_INTERVAL_SECONDS = 0.02

# Event types that Linux drivers report; an estimate.
_ALWAYS = (
    pynvml.nvmlEventTypeSingleBitEccError
    | pynvml.nvmlEventTypeDoubleBitEccError
    | pynvml.nvmlEventTypePState
    | pynvml.nvmlEventTypeXidCriticalError
)

_RECOVERY = pynvml.nvmlEventTypeGpuUnavailableError | pynvml.nvmlEventTypeGpuRecoveryAction


@dataclass
class _Watch:
    """One GPU in one event set: the requested event types and the number of the last event seen."""

    mask: int
    seen: int


class EventCalls(NvmlSession):
    """``nvmlEventSet*`` and ``nvmlDevice*SimulatedEvent*``. MIG devices are NOT_SUPPORTED."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._numbers = itertools.count()
        self._event_sets: dict[EventSetKey, dict[int, _Watch]] = {}

    @simulated()
    def nvmlEventSetCreate(self) -> Any:
        key = EventSetKey(next(self._numbers))
        self._event_sets[key] = {}
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
        recovery = _RECOVERY if self.machine.reports_recovery_action else 0
        supported: int = _ALWAYS | mig | recovery
        return supported

    @simulated()
    def nvmlDeviceRegisterEvents(self, handle: Any, eventTypes: int, eventSet: Any) -> None:
        minor, wanted = self.gpu(handle), integer(eventTypes)
        watches = self._event_sets[self._event_set_key(eventSet)]
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
            time.sleep(min(_POLL_INTERVAL_SECONDS, left))

    def _watches(self, key: EventSetKey) -> dict[int, _Watch]:
        """The GPUs of a set; another thread may have freed it or ended the session in the meantime."""
        self.require_session()
        if key not in self._event_sets:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return dict(self._event_sets[key])

    def _next(self, minor: int, watch: _Watch) -> SimulatedEvent | None:
        for event in self.machine.state(minor).events:
            if event.number <= watch.seen:
                continue
            watch.seen = event.number
            if event.kind & watch.mask:
                return event
        return None

    def _data(self, minor: int, event: SimulatedEvent) -> Any:
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


# Functions of pynvml that do not call the library.
_PURE = {"nvmlExceptionClass", "nvmlStructToFriendlyObject", "nvmlFriendlyObjectToStruct"}


class SimulatedNvml(DeviceCalls, MigCalls, EventCalls):
    """The pynvml functions of one simulated node: same names, arguments, structs, results and errors."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(pynvml, name):
            raise AttributeError(f"module 'pynvml' has no attribute {name!r}")
        value = getattr(pynvml, name)
        is_call = isinstance(value, FunctionType) and name.startswith(("nvml", "c_nvml"))
        return _refuse if is_call and name not in _PURE else value


_SIMULATED = frozenset(
    form for name in dir(SimulatedNvml) if name.startswith("nvml") for form in (name, plain_name(name))
)


def is_simulated(call: str) -> bool:
    """Whether the pynvml function of that name, with or without version, is simulated; "nvidia-smi" is, too."""
    return call == SMI or call in _SIMULATED


def _refuse(*_: object, **__: object) -> NoReturn:
    raise error(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
