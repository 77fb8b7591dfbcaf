"""The lock of the state directory: of several node plugins on a node, its owner is the active one.

It is a kernel lock, so it is free as soon as its owner is gone, however it ended. The locked file names the process and
socket of the owner; the other plugins forward calls of the kubelet to that socket.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from driver.errors import EnvironmentFault

log = logging.getLogger(__name__)

LOCK_FILE = "lock"

REGISTERED = "registered"

NOTE_LIMIT = 4096

LOCK_CHECK_INTERVAL_SECONDS = 0.1
"""Between two checks whether another plugin has ended: the kubelet reaches none meanwhile."""


class InstanceLock:
    """The lock of one state directory as seen by this process, whose socket is ``own``.

    ``own`` is None without ``--pod-uid``: the file then names no socket, and ``fixed`` is the owner's.
    """

    def __init__(self, directory: Path, own: Path | None = None, fixed: Path | None = None) -> None:
        """Open the file without locking it. Raises EnvironmentFault if the directory can't be used."""
        self._directory, self._own, self._fixed = directory, own, fixed
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Never closed: the kernel releases the lock when the process ends.
            self._lock = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unusable(error) from error

    def take(self) -> bool:
        """Become the owner, unless another process is. Raises EnvironmentFault."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._lock, 0)  # an empty file means that the owner is not known
            self._write()
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._unusable(error) from error
        return True

    def note_registered(self) -> None:
        """Record that the kubelet has registered the owner; only the owner calls it. Raises EnvironmentFault."""
        try:
            self._write(REGISTERED)
        except OSError as error:
            raise self._unusable(error) from error

    def release(self) -> None:
        """Release the lock. The file names this process until another one takes the lock."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def owner(self) -> Path | None:
        """The socket of the last owner; None if it is unknown or is this process."""
        socket = _noted_socket(self._read(), self._fixed)
        return None if socket == self._own else socket

    def known_to_kubelet(self) -> bool:
        """Whether another process is the owner and, if its version reports that, registered."""
        lines = self._read()
        return self.owner() is not None and (len(lines) == 1 or REGISTERED in lines[2:])

    def owner_pid(self) -> str:
        """The process ID of the last owner, or ``unknown``."""
        return next(iter(self._read()), "") or "unknown"

    def _write(self, *notes: str) -> None:
        lines = (str(os.getpid()), *([str(self._own)] if self._own else []), *notes)
        data = "".join(f"{line}\n" for line in lines).encode()
        os.pwrite(self._lock, data, 0)

    def _read(self) -> list[str]:
        return os.pread(self._lock, NOTE_LIMIT, 0).decode("utf-8", "replace").splitlines()

    def _unusable(self, error: OSError) -> EnvironmentFault:
        return EnvironmentFault(f"--state-dir {self._directory}: can't be used: {error.strerror}")


def claim_directory(directory: Path, stop: threading.Event) -> None:
    """Lock ``directory`` until this process ends, however it ends.

    Waits, until ``stop`` is set, while another process has the lock: a rolling update starts the new plugin before the
    old one has ended. Raises EnvironmentFault.
    """
    lock, logged = InstanceLock(directory), False
    while not lock.take():
        if not logged:
            extra = {"stateDir": str(directory), "pid": lock.owner_pid()}
            log.warning("waits for another node plugin to end", extra=extra)
            logged = True
        if stop.wait(LOCK_CHECK_INTERVAL_SECONDS):
            return


def active_socket(directory: Path, fixed: Path) -> Path | None:
    """The socket of the node's active plugin, ``fixed`` if it has no pod's uid; None if there is none. Only reads."""
    try:
        lines = (directory / LOCK_FILE).read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    return _noted_socket(lines, fixed)


def _noted_socket(lines: Sequence[str], fixed: Path | None) -> Path | None:
    """The socket in the lines of the locked file."""
    return (Path(lines[1]) if len(lines) > 1 else fixed) if lines else None


def is_listening(path: Path) -> bool:
    """Whether a process listens on the socket; a socket without one was left by a killed process."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)
        try:
            connection.connect(str(path))
        except OSError as error:
            return error.errno in (errno.EAGAIN, errno.EINPROGRESS)  # its queue is full
    return True


def sibling_sockets(own: Path, pattern: str) -> list[Path]:
    """The other sockets in the directory of ``own`` that match ``pattern``."""
    with suppress(OSError):
        return [path for path in sorted(own.parent.glob(pattern)) if path != own and path.is_socket()]
    return []
