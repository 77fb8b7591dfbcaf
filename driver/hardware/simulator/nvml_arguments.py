"""The ways C takes arguments and returns errors, for the simulated NVML functions."""

from __future__ import annotations

import ctypes
from typing import Any

import pynvml


def error(code: int) -> Exception:
    """The exception pynvml raises for that return code."""
    failure: Exception = pynvml.NVMLError(code)
    return failure


def integer(value: Any) -> int:
    """The number C would receive.

    :raises ctypes.ArgumentError: what is no number, as ctypes does
    """
    number = value.value if isinstance(value, ctypes._SimpleCData) else value  # noqa: SLF001 - no public name
    if not isinstance(number, int):
        raise ctypes.ArgumentError(f"expected an integer, got {type(value).__name__}")
    return number


def text(value: Any) -> str:
    """The string C would receive; None is a null pointer: INVALID_ARGUMENT."""
    if value is None:
        raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    if not isinstance(value, str | bytes):
        raise TypeError(f"bytes or string expected, got {type(value).__name__}")
    return value.decode() if isinstance(value, bytes) else value


def pointer_to(kind: Any, reference: Any) -> Any:
    """``reference`` (byref, pointer or array) as a pointer to ``kind``; a null pointer is INVALID_ARGUMENT."""
    pointer = ctypes.cast(reference, ctypes.POINTER(kind))
    if not pointer:
        raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return pointer


def fill_unsized(kind: Any, reference: Any, capacity: int, values: list[Any]) -> None:
    """Write values into an array whose size C can't know but documents: at least ``capacity`` elements.

    :raises ctypes.ArgumentError: a shorter array, past whose end the real library would write
    """
    pointer = pointer_to(kind, reference)
    if isinstance(reference, ctypes.Array) and len(reference) < capacity:
        raise ctypes.ArgumentError(f"array of {len(reference)}: NVML may write {capacity} elements")
    for index, value in enumerate(values):
        pointer[index] = value
