"""What every simulated NVML function shares: the session, the node's faults, and what a handle's owner looks like."""

# ruff: noqa: N802
from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

import pynvml

from .faults import NOTHING
from .injection import Injector
from .machine import Machine
from .nvml_arguments import error, integer
from .nvml_keys import ComputeInstanceKey, GpuInstanceKey, GpuKey, HandleTable, MigKey
from .state import ComputeInstance, GpuInstance, GpuState

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="NvmlSession")


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


def simulated(
    since: int = 0, *, in_session: bool = True
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Mark a method as the simulation of the pynvml function of its name.

    Outside a session it raises UNINITIALIZED (unless ``in_session`` is False), with a driver older than ``since``
    FUNCTION_NOT_FOUND, and what the node's faults say.
    """

    def decorate(function: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        name = function.__name__

        @functools.wraps(function)
        def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
            if in_session:
                self.require_session()
            if since > self.machine.description.driver_major:
                raise error(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
            now = self.machine.faults.read()
            if now is NOTHING:
                return function(self, *args, **kwargs)
            values = (*args, *kwargs.values())
            return self.injector.run(now, name, functools.partial(function, self, *args, **kwargs), values)

        return cast("Callable[Concatenate[S, P], R]", call)

    return decorate


class NvmlSession(HandleTable):
    """Session counting and what handles stand for. Safe for several threads, as NVML is."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine
        self.injector = Injector(machine, self)
        self._sessions = 0
        self._counting = threading.Lock()

    @simulated(in_session=False)
    def nvmlInitWithFlags(self, flags: int) -> None:
        integer(flags)
        with self._counting:
            self._sessions += 1

    @simulated(in_session=False)
    def nvmlInit(self) -> None:
        self.nvmlInitWithFlags(0)

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
        """What a device handle stands for; another kind of handle, or none, is INVALID_ARGUMENT."""
        key = self.find(handle)
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
        key = self.find(handle)
        if isinstance(key, GpuInstanceKey):
            state = self.machine.state(key.minor)
            return GpuInstanceView(key.minor, state, self.find_gpu_instance(state, key.serial))
        raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def compute_instance(self, handle: Any) -> ComputeView:
        """The compute instance behind a handle; one that is gone is INVALID_ARGUMENT."""
        key = self.find(handle)
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
