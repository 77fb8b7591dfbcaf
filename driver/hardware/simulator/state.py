"""What changes on a simulated GPU, and the file it lives in.

One file a GPU, ``<root>/sim/gpu-<minor>.json``, replaced as a whole (write, then swap): a reader sees the
state before or after a change, never between, whatever instruction the writer was killed at. Writers of one
GPU take turns by ``flock`` on ``gpu-<minor>.lock``, which the kernel frees when its holder dies; readers
take no lock. Nothing is fsynced: a power cut also ends a real GPU's instances.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from driver.errors import StateError

from .files import swap_in

ANY_INSTANCE = 0xFFFFFFFF
"""Stands for the whole GPU where an event names no GPU instance or compute instance."""

# A listener that looks every few milliseconds misses none of so many.
_KEPT_EVENTS = 16


class Process(msgspec.Struct, frozen=True, rename="camel"):
    """A process that holds a GPU or a MIG device: pid and bytes of GPU memory."""

    pid: int
    memory: int


class ComputeInstance(msgspec.Struct, frozen=True, rename="camel"):
    """A compute instance: one MIG device. ``start`` and ``size`` count compute slices of its GPU instance.

    ``index`` is the MIG device's index on its GPU; it stays, so others' destruction leaves gaps.
    """

    id: int
    profile: int
    start: int
    size: int
    uuid: str
    index: int
    processes: tuple[Process, ...] = ()


class GpuInstance(msgspec.Struct, frozen=True, rename="camel"):
    """A GPU instance on memory slices [start, start + size). ``serial`` tells it from a later one of its id."""

    id: int
    serial: int
    profile: int
    start: int
    size: int
    compute: tuple[ComputeInstance, ...] = ()


class Event(msgspec.Struct, frozen=True, rename="camel"):
    """Something that NVML tells listeners: an event type, its data, and the instances it is about."""

    number: int
    kind: int
    data: int = 0
    gpu_instance: int = ANY_INSTANCE
    compute_instance: int = ANY_INSTANCE


class GpuState(msgspec.Struct, frozen=True, rename="camel"):
    """Everything that changes on one GPU. ``events`` are the last few, oldest first.

    ``compute_mode`` and ``time_slice`` are NVML's and nvidia-smi's numbers, 0 the default; ``recovery_action`` is
    NVML's number of what the GPU needs to recover, 0 nothing.
    """

    mig_enabled: bool = False
    mig_pending: bool = False
    compute_mode: int = 0
    time_slice: int = 0
    next_serial: int = 1
    instances: tuple[GpuInstance, ...] = ()
    processes: tuple[Process, ...] = ()
    next_event: int = 1
    events: tuple[Event, ...] = ()
    recovery_action: int = 0

    def with_event(self, event: Event) -> GpuState:
        """The state where that event happened too; its number is the next one."""
        numbered = msgspec.structs.replace(event, number=self.next_event)
        kept = (*self.events, numbered)[-_KEPT_EVENTS:]
        return msgspec.structs.replace(self, events=kept, next_event=self.next_event + 1)


_STATE = msgspec.json.Decoder(GpuState)


class GpuFile:
    """The file of one GPU's state. Safe to share between threads and processes."""

    def __init__(self, directory: Path, minor: int) -> None:
        self.path = directory / f"gpu-{minor}.json"
        self._lock_path = str(directory / f"gpu-{minor}.lock")
        self._text_path = str(self.path)
        self._temporary = f"{self.path}.new"
        self._cached: tuple[bytes, GpuState] | None = None

    def read(self) -> GpuState:
        """The state as it is now; about 15 microseconds.

        :raises StateError: the file is missing or was damaged by someone else
        """
        try:
            content = self._content()
            cached = self._cached
            if cached is not None and cached[0] == content:
                return cached[1]
            state = _STATE.decode(content)
        except (OSError, msgspec.MsgspecError) as error:
            raise StateError(f"state of a simulated GPU, {self.path}: {error}") from error
        self._cached = (content, state)
        return state

    def write(self, state: GpuState) -> None:
        """Make ``state`` the GPU's. Only for the holder of :meth:`locked`."""
        content = msgspec.json.encode(state)
        # The mode is given here because the umask of a test or a container may let everybody write.
        descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, content)
        finally:
            os.close(descriptor)
        swap_in(self._temporary, self._text_path)
        self._cached = (content, state)

    @contextmanager
    def locked(self) -> Iterator[GpuState]:
        """The state, while nobody else changes this GPU; other GPUs are not affected."""
        descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield self.read()
        finally:
            os.close(descriptor)

    def _content(self) -> bytes:
        descriptor = os.open(self._text_path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Seven instances take 2 KiB; a longer file would fail to parse, not be cut short unseen.
            return os.read(descriptor, 1 << 16)
        finally:
            os.close(descriptor)
