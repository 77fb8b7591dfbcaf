"""Writing files so that a crash at any instruction leaves the old content or the new, never a mixture."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from driver.errors import StateError

TEMPORARY = ".tmp"


def write_atomically(path: Path, data: bytes, mode: int, *, durable: bool) -> None:
    """Replace ``path``. ``durable``: on disk when this returns, also after a power cut. Raises StateError."""
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
        try:
            os.fchmod(descriptor, mode)
            _write_all(descriptor, data)
            if durable:
                os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
        if durable:
            sync_directory(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise StateError(f"can't write {path}: {error.strerror}") from error


def remove(path: Path, *, durable: bool) -> None:
    """Delete ``path``; one that is gone already is no error. Raises StateError."""
    try:
        if not os.path.lexists(path):
            return
        path.unlink()
        if durable:
            sync_directory(path.parent)
    except OSError as error:
        raise StateError(f"can't remove {path}: {error.strerror}") from error


def sync_directory(directory: Path) -> None:
    """Make renames and deletions in ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
