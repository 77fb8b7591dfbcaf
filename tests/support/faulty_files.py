"""File operations that fail where a test says: at the n-th one below some directories, as a full or broken disk does.

The layer is ``os`` itself, patched while a block runs, so that whatever the product does to files is seen.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

BY_PATH = ("rename", "replace", "unlink", "mkdir", "stat", "lstat", "listdir", "scandir")
BY_DESCRIPTOR = ("write", "fsync", "fdatasync", "fchmod", "ftruncate", "posix_fallocate")
ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS)
READING = ("stat", "lstat", "listdir", "scandir", "io.open")
"""Of these EIO alone is plausible: neither a full disk nor one that is mounted read-only keeps anybody from reading."""


@dataclass(frozen=True)
class FileTrouble:
    """The ``number``-th operation fails with ``error``; ``lasting``: so does each later one that could."""

    number: int
    operation: str
    error: int
    lasting: bool = False

    def __str__(self) -> str:
        return f"{self.operation} ({self.number}) {errno.errorcode[self.error]}{' lasting' if self.lasting else ''}"

    def hits(self, number: int, operation: str) -> bool:
        if number == self.number:
            return True
        return self.lasting and number > self.number and self.error in plausible(operation)


def plausible(operation: str) -> tuple[int, ...]:
    """The errors that an operation may meet; a deletion needs no space, as a rule, but btrfs says ENOSPC."""
    name = operation.split(" ")[0]
    return (errno.EIO,) if name in READING or operation.endswith(" to read") else ERRORS


class FaultyFiles:
    """Operations on what is below ``directories``; ``seen`` are those of the last ``faults``."""

    def __init__(self, *directories: Path) -> None:
        self._directories = tuple(str(directory) for directory in directories)
        self._descriptors: set[int] = set()
        self._trouble: FileTrouble | None = None
        self._number = 0
        self.seen: list[str] = []

    @contextmanager
    def faults(self, trouble: FileTrouble | None = None) -> Iterator[None]:
        """Count anew, and fail as ``trouble`` says, while the block runs."""
        self._trouble, self._number = trouble, 0
        self.seen.clear()
        with self._patched():
            yield

    def close(self) -> None:
        """As the end of the process does: whatever it opened last time and left open is closed, with its locks."""
        for descriptor in list(self._descriptors):
            os.close(descriptor)
        self._descriptors.clear()

    @contextmanager
    def _patched(self) -> Iterator[None]:
        calls: dict[str, Callable[..., Any]] = {
            name: partial(self._by_path, name, getattr(os, name)) for name in BY_PATH
        }
        calls |= {name: partial(self._by_descriptor, name, getattr(os, name)) for name in BY_DESCRIPTOR}
        calls |= {"open": partial(self._open, os.open), "close": partial(self._close, os.close)}
        every: Any = patch.multiple(os, **calls)  # type: ignore[call-overload]
        with every, patch.object(io, "open", partial(self._by_path, "io.open", io.open)):
            yield

    def _open(self, function: Callable[..., int], path: Any, flags: int, *rest: Any, **more: Any) -> int:
        what = "open" if flags & (os.O_WRONLY | os.O_RDWR) else "open to read"
        descriptor: int = self._by_path(what, function, path, flags, *rest, **more)
        if self._is_ours(path):
            self._descriptors.add(descriptor)
        return descriptor

    def _close(self, function: Callable[[int], None], descriptor: int) -> None:
        self._descriptors.discard(descriptor)
        function(descriptor)

    def _by_path(self, name: str, function: Callable[..., Any], path: Any = ".", *rest: Any, **more: Any) -> Any:
        if self._is_ours(path):
            self._strike(name, path)
        return function(path, *rest, **more)

    def _by_descriptor(self, name: str, function: Callable[..., Any], descriptor: int, *rest: Any) -> Any:
        if descriptor in self._descriptors:
            self._strike(name, descriptor)
        return function(descriptor, *rest)

    def _is_ours(self, path: Any) -> bool:
        return not isinstance(path, int) and str(path).startswith(self._directories)

    def _strike(self, name: str, about: object) -> None:
        number, trouble = self._number, self._trouble
        self._number += 1
        self.seen.append(name)
        if trouble is not None and trouble.hits(number, name):
            raise OSError(trouble.error, os.strerror(trouble.error), str(about))
