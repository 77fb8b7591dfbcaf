"""Where faults meet calls: run by every simulated NVML function while the node has disturbances."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeVar

import pynvml

from .faults import Disturbances
from .machine import Machine
from .nvml_arguments import error
from .nvml_keys import ComputeInstanceKey, GpuInstanceKey, HandleTable, Key, MigKey, minor_of

R = TypeVar("R")

# Their result says which GPU they are about, not their arguments.
_LOOKUPS = re.compile(r"^nvmlDeviceGet(Mig)?(Device)?HandleBy")


@cache
def plain_name(call: str) -> str:
    """The function's name without version: a fault of one version is a fault of all."""
    return re.sub(r"(WithFlags|_v\d+)$", "", call)


class Injector:
    """Makes the calls of one session fail or wait as the node's faults say."""

    def __init__(self, machine: Machine, handles: HandleTable) -> None:
        self._machine = machine
        self._handles = handles
        self._inside = threading.local()

    def run(self, now: Disturbances, name: str, function: Callable[[], R], arguments: Iterable[Any]) -> R:
        """What ``function`` gives, unless a fault concerns the call. Calls that it makes itself aren't hit again."""
        if getattr(self._inside, "call", False):
            return function()
        self._inside.call = True
        try:
            if _LOOKUPS.match(name):
                result = function()
                self._strike(now, name, [result, *arguments])
                return result
            self._strike(now, name, arguments)
            return function()
        finally:
            self._inside.call = False

    def _strike(self, now: Disturbances, name: str, values: Iterable[Any]) -> None:
        keys = [key for value in values if (key := self._handles.find(value)) is not None]
        gpus = {minor for key in keys if (minor := minor_of(key)) is not None}
        devices = {uuid for key in keys for uuid in self._devices(key)}
        for fault in now.faults:
            if fault.concerns(name, gpus, devices) or fault.concerns(plain_name(name), gpus, devices):
                self._happen(fault.seconds, fault.code if self._machine.faults.take(fault) else None)
        if not gpus.isdisjoint(now.removed):
            raise error(pynvml.NVML_ERROR_GPU_IS_LOST)

    @staticmethod
    def _happen(seconds: float, code: int | None) -> None:
        if code is None:
            return
        if seconds:
            time.sleep(seconds)
        if code:
            raise error(code)

    def _devices(self, key: Key) -> list[str]:
        """UUIDs of the MIG devices a handle stands for; a GPU instance's are those of its compute instances."""
        if isinstance(key, MigKey | ComputeInstanceKey):
            return [key.uuid]
        if isinstance(key, GpuInstanceKey):
            found = (gi for gi in self._machine.state(key.minor).instances if gi.serial == key.serial)
            return [compute.uuid for gi in found for compute in gi.compute]
        return []
