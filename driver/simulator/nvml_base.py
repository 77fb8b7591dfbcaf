"""The base of all simulated NVML functions: C arguments, handles, sessions, injected faults, and event sets.

Handles are the ctypes pointers of pynvml, so that they fit into its structs and arrays. They point to a number that
only this module understands; dereferencing one crashes, as with the real library.
"""

# ruff: noqa: N802, N803
from __future__ import annotations

import ctypes
import functools
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Concatenate, ParamSpec, TypeVar

import pynvml

from driver.simulator.machine import EVERY_CALL, NO_FAULTS, InjectedFaults, Machine, SimulatedEvent
from driver.simulator.state.gpu_load import SimulatedActivity
from driver.simulator.state.latency import take


def error(code: int) -> Exception:
    """Return the exception that pynvml raises for a return code."""
    failure: Exception = pynvml.NVMLError(code)
    return failure


def integer(value: Any) -> int:
    """Return the number that C would receive. Raises ctypes.ArgumentError: the value is not a number."""
    number = value.value if isinstance(value, ctypes._SimpleCData) else value  # noqa: SLF001 - no public name
    if not isinstance(number, int):
        raise ctypes.ArgumentError(f"expected an integer, got {type(value).__name__}")
    return number


def text(value: Any) -> str:
    """Return the string that C would receive; None is a null pointer: INVALID_ARGUMENT."""
    if value is None:
        raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    if not isinstance(value, str | bytes):
        raise TypeError(f"bytes or string expected, got {type(value).__name__}")
    return value.decode() if isinstance(value, bytes) else value


def pointer_to(kind: Any, reference: Any) -> Any:
    """Cast ``reference`` (byref, pointer or array) to a pointer to ``kind``; a null pointer is INVALID_ARGUMENT."""
    pointer = ctypes.cast(reference, ctypes.POINTER(kind))
    if not pointer:
        raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return pointer


def fill_unsized(kind: Any, reference: Any, capacity: int, values: list[Any]) -> None:
    """Write values into an array that NVML documents to have at least ``capacity`` elements.

    :raises ctypes.ArgumentError: a shorter array, which the real library would overrun
    """
    pointer = pointer_to(kind, reference)
    if isinstance(reference, ctypes.Array) and len(reference) < capacity:
        raise ctypes.ArgumentError(f"array of {len(reference)}: NVML may write {capacity} elements")
    for index, value in enumerate(values):
        pointer[index] = value


# Unique across all sessions of the process: a handle of one simulated node is invalid in another.
_cookies = itertools.count(0x7E55_0000_1000, 0x10)


@dataclass(frozen=True, slots=True)
class GpuKey:
    minor: int


@dataclass(frozen=True, slots=True)
class MigKey:
    minor: int
    uuid: str


@dataclass(frozen=True, slots=True)
class GpuInstanceKey:
    """The GPU instance behind a handle. The serial invalidates it once the instance is destroyed."""

    minor: int
    serial: int


@dataclass(frozen=True, slots=True)
class ComputeInstanceKey:
    minor: int
    uuid: str


@dataclass(slots=True)
class Watch:
    """One GPU in one event set: the requested event types and the number of the last event seen."""

    mask: int
    seen: int


@dataclass(eq=False, slots=True)
class EventSet:
    """The watched GPUs by minor."""

    watches: dict[int, Watch] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class GpmSample:
    """Counters at a time, of a GPU or of the GPU instance with this serial; None before they are first read."""

    minor: int = 0
    serial: int | None = None
    time: float = 0.0
    counters: SimulatedActivity | None = None


HandleTarget = GpuKey | MigKey | GpuInstanceKey | ComputeInstanceKey | EventSet | GpmSample

_HANDLE_OF: dict[type[HandleTarget], Any] = {
    GpuKey: pynvml.c_nvmlDevice_t,
    MigKey: pynvml.c_nvmlDevice_t,
    GpuInstanceKey: pynvml.c_nvmlGpuInstance_t,
    ComputeInstanceKey: pynvml.c_nvmlComputeInstance_t,
    EventSet: pynvml.c_nvmlEventSet_t,
    GpmSample: pynvml.c_nvmlGpmSample_t,
}
_HANDLE_TYPES = tuple(set(_HANDLE_OF.values()))


K = TypeVar("K", bound=HandleTarget)
R = TypeVar("R")

# Functions whose result, not their arguments, identifies the GPU.
_LOOKUPS = re.compile(r"^nvmlDeviceGet(Mig)?(Device)?HandleBy")


def delay(seconds: float) -> None:
    """Let the time of an injected fault pass."""
    time.sleep(seconds)


@cache
def plain_name(call: str) -> str:
    """Return the function's name without version: a fault of one version applies to all."""
    return re.sub(r"(WithFlags|_v\d+)$", "", call)


P = ParamSpec("P")
S = TypeVar("S", bound="NvmlSession")


def simulated(function: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Mark a method as the simulation of the pynvml function of its name.

    Outside a session it raises UNINITIALIZED (but for nvmlInit). Latency and injected faults apply to it.
    """
    name = function.__name__

    @functools.wraps(function)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if name != "nvmlInit":
            self.require_session()
        if name in self.machine.latency.calls:
            take(self.machine.latency.calls[name])
        now = self.machine.fault_file.read()
        if now is NO_FAULTS:
            return function(self, *args, **kwargs)
        values = (*args, *kwargs.values())
        return self.run_with_faults(now, name, functools.partial(function, self, *args, **kwargs), values)

    return call


class NvmlSession:
    """Session counting, handles and injected faults. Thread-safe, like NVML."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._sessions = 0
        self._counting = threading.Lock()
        self._inside = threading.local()
        self._guard = threading.Lock()
        self._keys: dict[int, HandleTarget] = {}
        self._handles: dict[HandleTarget, int] = {}

    @simulated
    def nvmlInit(self) -> None:
        with self._counting:
            self._sessions += 1

    @simulated
    def nvmlShutdown(self) -> None:
        with self._counting:
            self.require_session()
            self._sessions -= 1

    def require_session(self) -> None:
        """Raise NVMLError UNINITIALIZED outside a session."""
        if not self._sessions:
            raise error(pynvml.NVML_ERROR_UNINITIALIZED)

    def handle(self, key: HandleTarget) -> Any:
        """Return the handle of ``key``; the same number each time."""
        cookie = self._handles.get(key)
        if cookie is None:
            with self._guard:
                cookie = self._handles.setdefault(key, next(_cookies))
                self._keys[cookie] = key
        return ctypes.cast(cookie, _HANDLE_OF[type(key)])

    def forget(self, key: HandleTarget) -> None:
        """Invalidate the handle of a destroyed object."""
        with self._guard:
            self._keys.pop(self._handles.pop(key, 0), None)

    def find(self, handle: Any) -> HandleTarget | None:
        """Return the target of a handle; None if it is not a handle of this session."""
        cookie = ctypes.cast(handle, ctypes.c_void_p).value if isinstance(handle, _HANDLE_TYPES) else None
        key = self._keys.get(cookie or 0)
        return key if key is not None and isinstance(handle, _HANDLE_OF[type(key)]) else None

    def target(self, handle: Any, kind: type[K]) -> K:
        """Return the target of a handle; INVALID_ARGUMENT if it is not of that kind."""
        key = self.find(handle)
        if not isinstance(key, kind):
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return key

    def device(self, handle: Any) -> GpuKey | MigKey:
        """Return the target of a device handle; any other handle is INVALID_ARGUMENT."""
        key = self.find(handle)
        if not isinstance(key, GpuKey | MigKey):
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return key

    def gpu(self, handle: Any, otherwise: int = pynvml.NVML_ERROR_NOT_SUPPORTED) -> int:
        """Return the minor of the GPU behind a handle; for a MIG device raise the error ``otherwise``."""
        key = self.device(handle)
        if isinstance(key, MigKey):
            raise error(otherwise)
        return key.minor

    def run_with_faults(self, now: InjectedFaults, name: str, function: Callable[[], R], arguments: Iterable[Any]) -> R:
        """Call ``function``, unless a fault makes it fail. Nested simulated calls are not affected again."""
        if getattr(self._inside, "call", False):
            return function()
        self._inside.call = True
        try:
            if _LOOKUPS.match(name):
                result = function()
                self._apply_faults(now, name, [result, *arguments])
                return result
            self._apply_faults(now, name, arguments)
            return function()
        finally:
            self._inside.call = False

    def _apply_faults(self, now: InjectedFaults, name: str, values: Iterable[Any]) -> None:
        keys = [key for value in values if (key := self.find(value)) is not None]
        gpus = {key.minor for key in keys if not isinstance(key, EventSet | GpmSample)}
        devices = {uuid for key in keys for uuid in self._devices(key)}
        for fault in now.faults:
            if (
                fault.call in (EVERY_CALL, name, plain_name(name))
                and (fault.gpu is None or fault.gpu in gpus)
                and (fault.device is None or fault.device in devices)
                and self.machine.take_fault(fault)
            ):
                delay(fault.seconds)
                if fault.code:
                    raise error(fault.code)
        if not gpus.isdisjoint(now.removed):
            raise error(pynvml.NVML_ERROR_GPU_IS_LOST)

    def _devices(self, key: HandleTarget) -> list[str]:
        """UUIDs of the MIG devices behind a handle; for a GPU instance those of its compute instances."""
        if isinstance(key, MigKey | ComputeInstanceKey):
            return [key.uuid]
        if isinstance(key, GpuInstanceKey):
            instances = (gi for gi in self.machine.gpu_state(key.minor).instances if gi.serial == key.serial)
            return [compute.uuid for gi in instances for compute in gi.compute]
        return []


_POLL_INTERVAL_SECONDS = 0.02

# Event types that Linux drivers report; an estimate.
_ALWAYS = (
    pynvml.nvmlEventTypeSingleBitEccError
    | pynvml.nvmlEventTypeDoubleBitEccError
    | pynvml.nvmlEventTypePState
    | pynvml.nvmlEventTypeXidCriticalError
)

_RECOVERY = pynvml.nvmlEventTypeGpuUnavailableError | pynvml.nvmlEventTypeGpuRecoveryAction


class EventCalls(NvmlSession):
    """``nvmlEventSet*`` and ``nvmlDevice*Event*``. MIG devices are NOT_SUPPORTED."""

    @simulated
    def nvmlEventSetCreate(self) -> Any:
        return self.handle(EventSet())

    @simulated
    def nvmlEventSetFree(self, eventSet: Any) -> None:
        self.forget(self.target(eventSet, EventSet))

    @simulated
    def nvmlDeviceGetSupportedEventTypes(self, handle: Any) -> int:
        self.gpu(handle)
        mig = pynvml.nvmlEventMigConfigChange if self.machine.product.mig_capable else 0
        recovery = _RECOVERY if self.machine.reports_recovery_action else 0
        return int(_ALWAYS | mig | recovery)

    @simulated
    def nvmlDeviceRegisterEvents(self, handle: Any, eventTypes: int, eventSet: Any) -> None:
        minor, event_types = self.gpu(handle), integer(eventTypes)
        watches = self.target(eventSet, EventSet).watches
        if event_types & ~self.nvmlDeviceGetSupportedEventTypes(handle):
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if minor in watches:
            watches[minor].mask |= event_types
        else:
            watches[minor] = Watch(event_types, self.machine.gpu_state(minor).next_event - 1)

    @simulated
    def nvmlEventSetWait_v2(self, eventSet: Any, timeoutms: int) -> Any:
        end = time.monotonic() + integer(timeoutms) / 1000
        while True:
            # Another thread may free the set or end the session in the meantime, or add a GPU.
            self.require_session()
            watches = dict(self.target(eventSet, EventSet).watches)
            for minor, watch in watches.items():
                event = self._next(minor, watch)
                if event is not None:
                    return self._data(minor, event)
            if not self.machine.fault_file.read().lost.isdisjoint(watches):
                raise error(pynvml.NVML_ERROR_GPU_IS_LOST)
            seconds = end - time.monotonic()
            if seconds <= 0:
                raise error(pynvml.NVML_ERROR_TIMEOUT)
            time.sleep(min(_POLL_INTERVAL_SECONDS, seconds))

    def _next(self, minor: int, watch: Watch) -> SimulatedEvent | None:
        for event in self.machine.gpu_state(minor).events:
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
