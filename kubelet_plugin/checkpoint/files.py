"""Atomic file operations: a crash at any instruction leaves the old content or the new, never a mixture."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from driver.errors import StateError

TEMPORARY = ".tmp"

PROBE_BYTES = os.urandom(16 * 1024)
"""Content of a probe: more than a checkpoint record, and random, because a file system may compress or skip zeros."""


def write_atomically(path: Path, data: bytes, mode: int, *, durable: bool) -> None:
    """Replace ``path``. ``durable``: on disk when this returns, also after a power cut. Raises StateError."""
    # Strings, because a prepare waits for three writes: creating a Path takes as long as the call that uses it.
    directory, _ = os.path.split(path)
    temporary = _temporary(path)
    try:
        with _opened(temporary, mode) as descriptor:
            os.fchmod(descriptor, mode)
            _write_all(descriptor, data)
            os.ftruncate(descriptor, len(data))
            if durable:
                os.fdatasync(descriptor)
        os.replace(temporary, path)  # noqa: PTH105
        if durable:
            sync_directory(directory)
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108
        raise StateError(f"can't write {path}: {error.strerror}") from error


def reserve(path: Path, size: int, mode: int) -> None:
    """Allocate ``size`` bytes for the next ``write_atomically`` of ``path``. Raises StateError."""
    temporary = _temporary(path)
    try:
        with _opened(temporary, mode) as descriptor:
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108
        raise StateError(f"can't write {path}: {error.strerror}") from error


def unreserve(path: Path) -> None:
    """Delete the temporary file of ``path``; a missing one is no error. Raises StateError."""
    remove(Path(_temporary(path)), durable=False)


def probe(path: Path) -> None:
    """Write PROBE_BYTES to disk under the temporary name of ``path`` and delete them again. Raises StateError."""
    temporary = _temporary(path)
    try:
        with _opened(temporary, 0o600) as descriptor:
            try:
                _write_all(descriptor, PROBE_BYTES)
                os.fsync(descriptor)
            finally:
                os.unlink(temporary)  # noqa: PTH108
    except OSError as error:
        raise StateError(f"can't write {path.parent}: {error.strerror}") from error


def remove(path: Path, *, durable: bool) -> None:
    """Delete ``path``; a missing file is no error. Raises StateError."""
    try:
        # Checked first: a file system that is mounted read-only refuses to delete even a missing file.
        path.lstat()
        path.unlink()
        if durable:
            sync_directory(path.parent)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise StateError(f"can't remove {path}: {error.strerror}") from error


def sync_directory(directory: Path | str) -> None:
    """Make renames and deletions in ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary(path: Path) -> str:
    directory, name = os.path.split(path)
    return f"{directory}/.{name}{TEMPORARY}"


@contextmanager
def _opened(temporary: str, mode: int) -> Iterator[int]:
    """Open without truncating: reserved space stays allocated until it is overwritten."""
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, mode)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
