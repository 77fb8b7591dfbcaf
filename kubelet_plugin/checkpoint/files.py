"""Atomic file operations: a crash at any instruction leaves the old content or the new, never a mixture.

A prepare waits for three writes. Therefore paths may be strings, since creating a Path takes as long as the call that
uses it, and system calls are few: after each one a thread may have to wait for the interpreter.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from driver.errors import StateError

TEMPORARY = ".tmp"

PRIVATE = 0o600
"""Mode of a file that only its owner may read and write."""

CREATE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
"""Flags of the file that is written before it replaces another."""

PROBE_BYTES = os.urandom(16 * 1024)
"""Content of a probe: more than a checkpoint record, and random, because a file system may compress or skip zeros."""


def write_atomically(
    path: str | Path, data: bytes, *, durable: bool, mode: int = PRIVATE, reserved: bool = False
) -> None:
    """Replace ``path``. ``durable``: on disk when this returns, also after a power cut. Raises StateError.

    ``reserved``: ``reserve`` may have allocated space for it.
    """
    directory, temporary = _temporary(path)
    try:
        # Without truncating, reserved space stays allocated until it is overwritten.
        descriptor = os.open(temporary, CREATE if reserved else CREATE | os.O_TRUNC, mode)
        try:
            if mode != PRIVATE:  # no usual umask takes anything from PRIVATE
                os.fchmod(descriptor, mode)
            _write_all(descriptor, data)
            if reserved:
                os.ftruncate(descriptor, len(data))
            if durable:
                os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
        if durable:
            sync_directory(directory)
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)
        raise StateError(f"can't write {path}: {error.strerror}") from error


def read_if_exists(path: str | Path) -> bytes | None:
    """The content; None if the file is missing or unreadable: writing it reports any error."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        return os.read(descriptor, os.fstat(descriptor).st_size)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def reserve(path: str | Path, size: int, mode: int) -> None:
    """Allocate ``size`` bytes for the next ``write_atomically`` of ``path``. Raises StateError."""
    _, temporary = _temporary(path)
    try:
        descriptor = os.open(temporary, CREATE, mode)
        try:
            os.posix_fallocate(descriptor, 0, size)
        finally:
            os.close(descriptor)
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)
        raise StateError(f"can't write {path}: {error.strerror}") from error


def unreserve(path: str | Path) -> None:
    """Delete the temporary file of ``path``; a missing one is no error. Raises StateError."""
    remove(_temporary(path)[1], durable=False)


def probe(path: str | Path) -> None:
    """Write PROBE_BYTES to disk under the temporary name of ``path`` and delete them again. Raises StateError."""
    directory, temporary = _temporary(path)
    try:
        descriptor = os.open(temporary, CREATE, PRIVATE)
        try:
            os.unlink(temporary)
            _write_all(descriptor, PROBE_BYTES)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StateError(f"can't write {directory}: {error.strerror}") from error


def remove(path: str | Path, *, durable: bool) -> None:
    """Delete ``path``; a missing file is no error. Raises StateError."""
    try:
        # Checked first: a file system that is mounted read-only refuses to delete even a missing file.
        os.lstat(path)
        os.unlink(path)
        if durable:
            sync_directory(os.path.dirname(path))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise StateError(f"can't remove {path}: {error.strerror}") from error


def sync_directory(directory: str | Path) -> None:
    """Make renames and deletions in ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary(path: str | Path) -> tuple[str, str]:
    """The directory of ``path``, and the name under which its content is written."""
    directory, name = os.path.split(path)
    return directory, f"{directory}/.{name}{TEMPORARY}"


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
