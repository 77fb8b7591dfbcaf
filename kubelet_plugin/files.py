"""Writing files so that a crash at any instruction leaves the old content or the new, never a mixture."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from contextlib import suppress
from pathlib import Path

from driver.errors import EnvironmentFault, StateError

log = logging.getLogger(__name__)

TEMPORARY = ".tmp"

LOOK_S = 0.1
"""Between two looks at whether another plugin has ended: the kubelet reaches none meanwhile."""


def write_atomically(path: Path, data: bytes, mode: int, *, durable: bool) -> None:
    """Replace ``path``. ``durable``: on disk when this returns, also after a power cut. Raises StateError."""
    # Strings, for a prepare waits three times: a Path costs as much as the call it is used for.
    directory, name = os.path.split(path)
    temporary = f"{directory}/.{name}{TEMPORARY}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
        try:
            os.fchmod(descriptor, mode)
            _write_all(descriptor, data)
            if durable:
                os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)  # noqa: PTH105
        if durable:
            sync_directory(directory)
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108
        raise StateError(f"can't write {path}: {error.strerror}") from error


def remove(path: Path, *, durable: bool) -> None:
    """Delete ``path``; one that is gone already is no error. Raises StateError."""
    try:
        # Looked for first: a file system that is mounted read-only refuses to delete even what is not there.
        path.lstat()
        path.unlink()
        if durable:
            sync_directory(path.parent)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise StateError(f"can't remove {path}: {error.strerror}") from error


def claim_directory(directory: Path, stop: threading.Event) -> None:
    """Keep every other plugin out of ``directory`` until this process ends, however it ends.

    Waits, until ``stop`` is set, while another process has it: a rolling update starts the new plugin beside the old
    one. Raises EnvironmentFault where the directory can't be used.
    """
    try:
        lock = open_lock(directory)
        said = False
        while not locked(lock):
            if not said:
                owner = os.pread(lock, 32, 0).decode("utf-8", "replace").partition("\n")[0] or "unknown"
                log.warning("waits for another node plugin to end", extra={"stateDir": str(directory), "pid": owner})
                said = True
            if stop.wait(LOOK_S):
                return
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
    except OSError as error:
        raise EnvironmentFault(f"--state-dir {directory}: can't be used: {error.strerror}") from error


def open_lock(directory: Path) -> int:
    """The file in ``directory`` that the plugin at work has locked. Raises OSError.

    Never closed: the kernel gives the lock back when the process is gone.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def locked(lock: int) -> bool:
    """Lock that file; False where another process has. Raises OSError."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sync_directory(directory: Path | str) -> None:
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
