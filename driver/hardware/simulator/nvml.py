"""``SimulatedNvml``: an object that stands where the module ``pynvml`` stands.

Constants, struct classes and exceptions are pynvml's own. Functions are the simulated ones; a function nobody
simulated says FUNCTION_NOT_FOUND, as a driver that is too old does, and never reaches a real library.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, NoReturn

import pynvml

from .nvml_arguments import error
from .nvml_compute import ComputeCalls
from .nvml_device import DeviceCalls
from .nvml_events import EventCalls
from .nvml_fields import FieldCalls
from .nvml_mig import MigCalls
from .nvml_system import SystemCalls
from .smi_tool import CALL as SMI

# Functions of pynvml that compute and call no library.
_PURE = {"nvmlExceptionClass", "nvmlStructToFriendlyObject", "nvmlFriendlyObjectToStruct"}


class SimulatedNvml(SystemCalls, DeviceCalls, FieldCalls, MigCalls, ComputeCalls, EventCalls):
    """The pynvml functions of one simulated node: same names, arguments, structs, results and errors."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(pynvml, name):
            raise AttributeError(f"module 'pynvml' has no attribute {name!r}")
        value = getattr(pynvml, name)
        is_call = isinstance(value, FunctionType) and name.startswith(("nvml", "c_nvml"))
        return _refuse if is_call and name not in _PURE else value


def is_simulated(call: str) -> bool:
    """Whether there is a simulation of the pynvml function of that name; "nvidia-smi" counts as one."""
    return call == SMI or (call.startswith("nvml") and hasattr(SimulatedNvml, call))


def _refuse(*_: object, **__: object) -> NoReturn:
    raise error(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
