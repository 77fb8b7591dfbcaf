"""What goes wrong on a simulated node on purpose, and the file that says so: ``<root>/sim/faults.json``.

Any process that knows the directory may write it while others use the node; they notice at their next call. The
file exists only while there is something in it, so that a node in order pays one look per call.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import msgspec
import pynvml

from driver.errors import StateError

from .files import write_file

T = TypeVar("T")

EVERY_CALL = "*"


class Fault(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Calls that fail with ``code`` (0: they don't) after ``seconds``.

    ``call`` is a pynvml function, or "*". ``gpu`` (minor) and ``device`` (UUID of a MIG device) limit it to calls
    that concern them. ``times`` is how often it still happens; None: until it is cleared.
    """

    id: int
    call: str = EVERY_CALL
    code: int = 0
    seconds: float = 0.0
    gpu: int | None = None
    device: str | None = None
    times: int | None = None

    def concerns(self, call: str, gpus: set[int], devices: set[str]) -> bool:
        """Whether a call of that function, about these GPUs and MIG devices, is one that it hits."""
        return (
            self.call in (EVERY_CALL, call)
            and (self.gpu is None or self.gpu in gpus)
            and (self.device is None or self.device in devices)
        )


class Disturbances(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, dict=True):
    """All that is wrong with a node now; and GPUs added to its description, as that spells them."""

    next_id: int = 1
    faults: tuple[Fault, ...] = ()
    removed: tuple[int, ...] = ()
    added: tuple[dict[str, object], ...] = ()

    @cached_property
    def lost(self) -> frozenset[int]:
        """Minors of the GPUs that no call reaches."""
        fallen = {f.gpu for f in self.faults if f.call == EVERY_CALL and f.code == pynvml.NVML_ERROR_GPU_IS_LOST}
        return frozenset(gpu for gpu in fallen if gpu is not None) | frozenset(self.removed)

    @property
    def is_empty(self) -> bool:
        """Whether a file with this content would say nothing."""
        return not (self.faults or self.removed or self.added)


NOTHING = Disturbances()

_DISTURBANCES = msgspec.json.Decoder(Disturbances)


class FaultFile:
    """The file of one node's disturbances. Safe to share between threads and processes."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "faults.json"
        self._text_path = str(self.path)
        self._lock_path = str(directory / "faults.lock")
        self._known: tuple[bytes, Disturbances] = (b"", NOTHING)

    def read(self) -> Disturbances:
        """What is wrong now. Without a file, one failed look: 1 to 2 microseconds.

        :raises StateError: the file was damaged by someone else
        """
        if not os.access(self._text_path, os.F_OK):
            return NOTHING
        try:
            content, (known, current) = self.path.read_bytes(), self._known
            if content != known:
                current = _DISTURBANCES.decode(content)
                self._known = (content, current)
        except FileNotFoundError:
            return NOTHING
        except (OSError, msgspec.MsgspecError) as error:
            raise StateError(f"faults of a simulated node, {self.path}: {error}") from error
        return current

    def change(self, rule: Callable[[Disturbances], tuple[Disturbances, T]]) -> T:
        """Apply ``rule`` to what is wrong now, while nobody else changes it; its second value is the result."""
        descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            before = self.read()
            changed, result = rule(before)
            if changed.is_empty:
                self.path.unlink(missing_ok=True)
            elif changed != before:
                write_file(self.path, msgspec.json.format(msgspec.json.encode(changed), indent=2).decode() + "\n")
            return result
        finally:
            os.close(descriptor)

    def take(self, fault: Fault) -> bool:
        """Count one occurrence of ``fault``; False: it was cleared or used up meanwhile."""
        return fault.times is None or self.change(lambda present: _one_less(present, fault.id))


def _one_less(present: Disturbances, number: int) -> tuple[Disturbances, bool]:
    found = next((fault for fault in present.faults if fault.id == number), None)
    if found is None or found.times is None:
        return present, found is not None
    left = () if found.times <= 1 else (msgspec.structs.replace(found, times=found.times - 1),)
    faults = tuple(kept for fault in present.faults for kept in (left if fault is found else (fault,)))
    return msgspec.structs.replace(present, faults=faults), True
