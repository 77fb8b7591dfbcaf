"""NVML errors as HardwareError, with names and remedies."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import pynvml

from driver.errors import HardwareError

ABSENT = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})
"""Codes that mean that the GPU or driver does not have a feature, rather than a failure."""

UNKNOWN_NUMBER = ABSENT | {pynvml.NVML_ERROR_INVALID_ARGUMENT}
"""Codes that mean that there is no link or profile of that number, which the driver may be too old to know."""

NAMES = {
    value: name.removeprefix("NVML_ERROR_")
    for name, value in vars(pynvml).items()
    if name.startswith("NVML_ERROR_") and isinstance(value, int)
}

REMEDIES = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 was not found",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the nvidia kernel module is not loaded",
    pynvml.NVML_ERROR_NO_PERMISSION: "the plugin must run as root",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the loaded kernel module is older than the libraries: reboot the node",
    pynvml.NVML_ERROR_IN_USE: "a process still uses it; outside of pods usually dcgm-exporter or nvidia-persistenced",
    pynvml.NVML_ERROR_RESET_REQUIRED: (
        "the GPU needs a reset: stop DCGM and nvidia-persistenced, then nvidia-smi --gpu-reset; or reboot the node "
        "where a reset is not supported"
    ),
    pynvml.NVML_ERROR_UNKNOWN: "the kernel's log says more (dmesg | grep -i nvrm); reset the GPU or reboot the node",
    pynvml.NVML_ERROR_GPU_IS_LOST: "the GPU fell off the bus; the node needs a reboot",
}
"""Explanations of common NVML errors."""


@contextmanager
def nvml_call(what: str) -> Iterator[None]:
    """Turn an NVMLError inside the block into a HardwareError that names ``what`` was attempted."""
    try:
        yield
    except pynvml.NVMLError as error:
        raise refused(what, error) from error


def refused(what: str, error: pynvml.NVMLError) -> HardwareError:
    """The error of an NVML call; ``what`` was attempted."""
    return HardwareError(f"{what}: NVML says {described(error)}", error.value)


def described(error: pynvml.NVMLError) -> str:
    """The name of the code and a remedy. NVML's own text needs the library, which may be missing."""
    code = error.value
    remedy = REMEDIES.get(code)
    return f"{NAMES.get(code, 'error')} ({code}{', ' + remedy if remedy else ''})"


def fact(function: Callable[..., Any], *arguments: Any, absent: Container[int] = ABSENT) -> Any | None:
    """Return the result of an NVML function, or None if the GPU or its driver does not support it (``absent``: codes
    that say so)."""
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        if error.value in absent:
            return None
        raise


def text(value: bytes | str) -> str:
    """NVML strings come as bytes from structs and as str from functions."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
