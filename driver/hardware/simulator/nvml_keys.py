"""What the handles of the simulated NVML stand for.

Handles are the ctypes pointers that pynvml hands out, so that they fit into the same structs and arrays. What
they point to is a number only this module understands; following one ends as badly as with the real library.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from dataclasses import dataclass
from typing import Any

import pynvml

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


@dataclass(frozen=True, slots=True)
class EventSetKey:
    """What an event set's handle stands for."""

    number: int


Key = GpuKey | MigKey | GpuInstanceKey | ComputeInstanceKey | EventSetKey

_HANDLE_OF: dict[type[Key], Any] = {
    GpuKey: pynvml.c_nvmlDevice_t,
    MigKey: pynvml.c_nvmlDevice_t,
    GpuInstanceKey: pynvml.c_nvmlGpuInstance_t,
    ComputeInstanceKey: pynvml.c_nvmlComputeInstance_t,
    EventSetKey: pynvml.c_nvmlEventSet_t,
}
_HANDLE_TYPES = tuple(set(_HANDLE_OF.values()))


def minor_of(key: Key) -> int | None:
    """Minor of the GPU that something is on; an event set is on none."""
    return None if isinstance(key, EventSetKey) else key.minor


class HandleTable:
    """The handles of one session. Safe for several threads."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._keys: dict[int, Key] = {}
        self._handles: dict[Key, int] = {}

    def handle(self, key: Key) -> Any:
        """A handle of the kind that fits ``key``; the same number each time."""
        cookie = self._handles.get(key) or self._new_cookie(key)
        return ctypes.cast(cookie, _HANDLE_OF[type(key)])

    def forget(self, key: Key) -> None:
        """Drop the handle of something destroyed."""
        with self._guard:
            self._keys.pop(self._handles.pop(key, 0), None)

    def find(self, handle: Any) -> Key | None:
        """What a handle stands for; None for what is no handle of this session."""
        cookie = ctypes.cast(handle, ctypes.c_void_p).value if isinstance(handle, _HANDLE_TYPES) else None
        key = self._keys.get(cookie or 0)
        return key if key is not None and isinstance(handle, _HANDLE_OF[type(key)]) else None

    def _new_cookie(self, key: Key) -> int:
        with self._guard:
            cookie = self._handles.get(key) or next(_cookies)
            self._keys[cookie] = key
            self._handles[key] = cookie
        return cookie
