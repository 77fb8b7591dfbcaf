"""What every simulated NVML function shares: the session and the handles.

Handles are the ctypes pointers that pynvml hands out, so that they fit into the same structs and arrays. What
they point to is a number only this module understands; following one ends as badly as with the real library.
"""

# ruff: noqa: N802
from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

import pynvml

from .machine import Machine
from .nvml_arguments import error, integer
from .state import ComputeInstance, GpuInstance, GpuState

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="NvmlSession")

# Unique over all sessions of the process: a handle of one simulated node means nothing to another.
_cookies = itertools.count(0x7E55_0000_1000, 0x10)


@dataclass(frozen=True, slots=True)
class GpuKey:
    """What a GPU's handle stands for."""

    minor: int


@dataclass(frozen=True, slots=True)
class MigKey:
    """What a MIG device's handle stands for."""

    minor: int
    uuid: str


@dataclass(frozen=True, slots=True)
class GpuInstanceKey:
    """What a GPU instance's handle stands for. The serial outdates it once the instance is destroyed."""

    minor: int
    serial: int


@dataclass(frozen=True, slots=True)
class ComputeInstanceKey:
    """What a compute instance's handle stands for."""

    minor: int
    uuid: str


Key = GpuKey | MigKey | GpuInstanceKey | ComputeInstanceKey


class GpuInstanceView(NamedTuple):
    """A GPU instance, with the GPU and the state it was found in."""

    minor: int
    state: GpuState
    instance: GpuInstance


class ComputeView(NamedTuple):
    """A compute instance, with everything around it."""

    minor: int
    state: GpuState
    instance: GpuInstance
    compute: ComputeInstance


def simulated(since: int = 0) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Mark a method as the simulation of the pynvml function of its name.

    Outside a session it raises UNINITIALIZED, and FUNCTION_NOT_FOUND with a driver older than ``since``.
    """

    def decorate(function: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(function)
        def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
            self.require_session()
            if since > self.machine.description.driver_major:
                raise error(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
            return function(self, *args, **kwargs)

        return cast("Callable[Concatenate[S, P], R]", call)

    return decorate


class NvmlSession:
    """Session counting and handles. Safe for several threads, as NVML is."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._sessions = 0
        self._guard = threading.Lock()
        self._keys: dict[int, Key] = {}
        self._handles: dict[Key, int] = {}

    def nvmlInitWithFlags(self, flags: int) -> None:
        integer(flags)
        with self._guard:
            self._sessions += 1

    def nvmlInit(self) -> None:
        self.nvmlInitWithFlags(0)

    def nvmlShutdown(self) -> None:
        with self._guard:
            self.require_session()
            self._sessions -= 1

    def require_session(self) -> None:
        """Raise NVMLError UNINITIALIZED outside a session."""
        if not self._sessions:
            raise error(pynvml.NVML_ERROR_UNINITIALIZED)

    def handle(self, key: Key) -> Any:
        """A handle of the kind that fits ``key``; the same number each time."""
        cookie = self._handles.get(key) or self._new_cookie(key)
        return ctypes.cast(cookie, _HANDLE_OF[type(key)])

    def forget(self, key: Key) -> None:
        """Drop the handle of something destroyed."""
        with self._guard:
            self._keys.pop(self._handles.pop(key, 0), None)

    def device(self, handle: Any) -> GpuKey | MigKey:
        """What a device handle stands for; another kind of handle, or none, is INVALID_ARGUMENT."""
        key = self._key(handle)
        if not isinstance(key, GpuKey | MigKey):
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return key

    def gpu(self, handle: Any, otherwise: int = pynvml.NVML_ERROR_NOT_SUPPORTED) -> int:
        """Minor of the GPU behind a handle; for a MIG device the error ``otherwise``."""
        key = self.device(handle)
        if isinstance(key, MigKey):
            raise error(otherwise)
        return key.minor

    def gpu_instance(self, handle: Any) -> GpuInstanceView:
        """The GPU instance behind a handle; one that is gone is INVALID_ARGUMENT."""
        key = self._key(handle)
        if isinstance(key, GpuInstanceKey):
            state = self.machine.state(key.minor)
            return GpuInstanceView(key.minor, state, self.find_gpu_instance(state, key.serial))
        raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def compute_instance(self, handle: Any) -> ComputeView:
        """The compute instance behind a handle; one that is gone is INVALID_ARGUMENT."""
        key = self._key(handle)
        if isinstance(key, ComputeInstanceKey):
            return self.find_compute(key.minor, self.machine.state(key.minor), key.uuid)
        raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def mig_device(self, handle: Any) -> ComputeView:
        """The MIG device behind a device handle; a GPU's, or one that is gone, is INVALID_ARGUMENT."""
        key = self.device(handle)
        if isinstance(key, MigKey):
            return self.find_compute(key.minor, self.machine.state(key.minor), key.uuid)
        raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    @staticmethod
    def find_gpu_instance(state: GpuState, serial: int) -> GpuInstance:
        """The GPU instance of that serial, or INVALID_ARGUMENT."""
        for instance in state.instances:
            if instance.serial == serial:
                return instance
        raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    @staticmethod
    def find_compute(minor: int, state: GpuState, uuid: str) -> ComputeView:
        """The compute instance of that MIG UUID, or INVALID_ARGUMENT."""
        for instance in state.instances:
            for compute in instance.compute:
                if compute.uuid == uuid:
                    return ComputeView(minor, state, instance, compute)
        raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def _key(self, handle: Any) -> Key:
        cookie = ctypes.cast(handle, ctypes.c_void_p).value if isinstance(handle, _HANDLE_TYPES) else None
        key = self._keys.get(cookie or 0)
        if key is None or not isinstance(handle, _HANDLE_OF[type(key)]):
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return key

    def _new_cookie(self, key: Key) -> int:
        with self._guard:
            cookie = self._handles.get(key) or next(_cookies)
            self._keys[cookie] = key
            self._handles[key] = cookie
        return cookie


_HANDLE_OF: dict[type[Key], Any] = {
    GpuKey: pynvml.c_nvmlDevice_t,
    MigKey: pynvml.c_nvmlDevice_t,
    GpuInstanceKey: pynvml.c_nvmlGpuInstance_t,
    ComputeInstanceKey: pynvml.c_nvmlComputeInstance_t,
}
_HANDLE_TYPES = tuple(set(_HANDLE_OF.values()))
