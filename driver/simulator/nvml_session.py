"""The base of all simulated NVML functions: C arguments, handles, sessions, and injected faults.

Handles are the ctypes pointers of pynvml, so that they fit into its structs and arrays. They point to a number that
only this module understands; dereferencing one crashes, as with the real library.
"""

# ruff: noqa: N802
from __future__ import annotations

import ctypes
import functools
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

import pynvml

from driver.simulator.faults import NO_FAULTS, InjectedFaults
from driver.simulator.machine import ComputeInstance, GpuInstance, Machine, SimulatedGpuState


def error(code: int) -> Exception:
    """Return the exception that pynvml raises for a return code."""
    failure: Exception = pynvml.NVMLError(code)
    return failure


def integer(value: Any) -> int:
    """Return the number that C would receive.

    :raises ctypes.ArgumentError: the value is not a number
    """
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
    """The GPU behind a device handle."""

    minor: int


@dataclass(frozen=True, slots=True)
class MigKey:
    """The MIG device behind a device handle."""

    minor: int
    uuid: str


@dataclass(frozen=True, slots=True)
class GpuInstanceKey:
    """The GPU instance behind a handle. The serial invalidates it once the instance is destroyed."""

    minor: int
    serial: int


@dataclass(frozen=True, slots=True)
class ComputeInstanceKey:
    """The compute instance behind a handle."""

    minor: int
    uuid: str


@dataclass(frozen=True, slots=True)
class EventSetKey:
    """The event set behind a handle."""

    number: int


HandleTarget = GpuKey | MigKey | GpuInstanceKey | ComputeInstanceKey | EventSetKey

_HANDLE_OF: dict[type[HandleTarget], Any] = {
    GpuKey: pynvml.c_nvmlDevice_t,
    MigKey: pynvml.c_nvmlDevice_t,
    GpuInstanceKey: pynvml.c_nvmlGpuInstance_t,
    ComputeInstanceKey: pynvml.c_nvmlComputeInstance_t,
    EventSetKey: pynvml.c_nvmlEventSet_t,
}
_HANDLE_TYPES = tuple(set(_HANDLE_OF.values()))


def minor_of(key: HandleTarget) -> int | None:
    """Minor of the target's GPU; None for an event set."""
    return None if isinstance(key, EventSetKey) else key.minor


class HandleTable:
    """The handles of one session. Thread-safe."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._keys: dict[int, HandleTarget] = {}
        self._handles: dict[HandleTarget, int] = {}

    def handle(self, key: HandleTarget) -> Any:
        """Return the handle of ``key``; the same number each time."""
        cookie = self._handles.get(key) or self._new_cookie(key)
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

    def _new_cookie(self, key: HandleTarget) -> int:
        with self._guard:
            cookie = self._handles.get(key) or next(_cookies)
            self._keys[cookie] = key
            self._handles[key] = cookie
        return cookie


R = TypeVar("R")

# Functions whose result, not their arguments, identifies the GPU.
_LOOKUPS = re.compile(r"^nvmlDeviceGet(Mig)?(Device)?HandleBy")


@cache
def plain_name(call: str) -> str:
    """Return the function's name without version: a fault of one version applies to all."""
    return re.sub(r"(WithFlags|_v\d+)$", "", call)


class FaultInjector:
    """Applies the injected faults of the node to the calls of one session."""

    def __init__(self, machine: Machine, handles: HandleTable) -> None:
        self._machine = machine
        self._handles = handles
        self._inside = threading.local()

    def run(self, now: InjectedFaults, name: str, function: Callable[[], R], arguments: Iterable[Any]) -> R:
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
        keys = [key for value in values if (key := self._handles.find(value)) is not None]
        gpus = {minor for key in keys if (minor := minor_of(key)) is not None}
        devices = {uuid for key in keys for uuid in self._devices(key)}
        for fault in now.faults:
            if fault.concerns(name, gpus, devices) or fault.concerns(plain_name(name), gpus, devices):
                self._delay_or_fail(fault.seconds, fault.code if self._machine.faults.take(fault) else None)
        if not gpus.isdisjoint(now.removed):
            raise error(pynvml.NVML_ERROR_GPU_IS_LOST)

    @staticmethod
    def _delay_or_fail(seconds: float, code: int | None) -> None:
        if code is None:
            return
        if seconds:
            time.sleep(seconds)
        if code:
            raise error(code)

    def _devices(self, key: HandleTarget) -> list[str]:
        """UUIDs of the MIG devices behind a handle; for a GPU instance those of its compute instances."""
        if isinstance(key, MigKey | ComputeInstanceKey):
            return [key.uuid]
        if isinstance(key, GpuInstanceKey):
            found = (gi for gi in self._machine.state(key.minor).instances if gi.serial == key.serial)
            return [compute.uuid for gi in found for compute in gi.compute]
        return []


P = ParamSpec("P")
S = TypeVar("S", bound="NvmlSession")


class GpuInstanceView(NamedTuple):
    """A GPU instance and its GPU."""

    minor: int
    instance: GpuInstance


class ComputeView(NamedTuple):
    """A compute instance with its GPU instance and GPU."""

    minor: int
    instance: GpuInstance
    compute: ComputeInstance


def simulated(*, in_session: bool = True) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Mark a method as the simulation of the pynvml function of its name.

    Outside a session it raises UNINITIALIZED (unless ``in_session`` is False). Injected faults apply to it.
    """

    def decorate(function: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        name = function.__name__

        @functools.wraps(function)
        def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
            if in_session:
                self.require_session()
            now = self.machine.faults.read()
            if now is NO_FAULTS:
                return function(self, *args, **kwargs)
            values = (*args, *kwargs.values())
            return self.injector.run(now, name, functools.partial(function, self, *args, **kwargs), values)

        return cast("Callable[Concatenate[S, P], R]", call)

    return decorate


class NvmlSession(HandleTable):
    """Session counting and handle lookup. Thread-safe, like NVML."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine
        self.injector = FaultInjector(machine, self)
        self._sessions = 0
        self._counting = threading.Lock()

    @simulated(in_session=False)
    def nvmlInit(self) -> None:
        with self._counting:
            self._sessions += 1

    @simulated()
    def nvmlShutdown(self) -> None:
        with self._counting:
            self.require_session()
            self._sessions -= 1

    def require_session(self) -> None:
        """Raise NVMLError UNINITIALIZED outside a session."""
        if not self._sessions:
            raise error(pynvml.NVML_ERROR_UNINITIALIZED)

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

    def gpu_instance(self, handle: Any) -> GpuInstanceView:
        """Return the GPU instance behind a handle; a destroyed one is INVALID_ARGUMENT."""
        key = self.find(handle)
        if isinstance(key, GpuInstanceKey):
            state = self.machine.state(key.minor)
            return GpuInstanceView(key.minor, self.find_gpu_instance(state, key.serial))
        raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def compute_instance(self, handle: Any) -> ComputeView:
        """Return the compute instance behind a handle; a destroyed one is INVALID_ARGUMENT."""
        key = self.find(handle)
        if isinstance(key, ComputeInstanceKey):
            return self.find_compute(key.minor, self.machine.state(key.minor), key.uuid)
        raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def mig_device(self, handle: Any) -> ComputeView:
        """Return the MIG device behind a handle; a GPU or a destroyed device is INVALID_ARGUMENT."""
        key = self.device(handle)
        if isinstance(key, MigKey):
            return self.find_compute(key.minor, self.machine.state(key.minor), key.uuid)
        raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    @staticmethod
    def find_gpu_instance(state: SimulatedGpuState, serial: int) -> GpuInstance:
        """The GPU instance of that serial, or INVALID_ARGUMENT."""
        for instance in state.instances:
            if instance.serial == serial:
                return instance
        raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    @staticmethod
    def find_compute(minor: int, state: SimulatedGpuState, uuid: str) -> ComputeView:
        """The compute instance of that MIG UUID, or INVALID_ARGUMENT."""
        for instance in state.instances:
            for compute in instance.compute:
                if compute.uuid == uuid:
                    return ComputeView(minor, instance, compute)
        raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
