"""The lock of the state directory: of several node plugins on a node, its owner is the active one.

It is a kernel lock, so it is free as soon as its owner is gone, however it ended. The locked file names the process and
socket of the owner; the other plugins forward calls of the kubelet to that socket.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

from driver.errors import EnvironmentFault
from kubelet_plugin.checkpoint.files import locked, open_lock

REGISTERED = "registered"

NOTE_LIMIT = 4096


class InstanceLock:
    """The lock of one state directory as seen by this process.

    ``fixed`` is the socket of an owner that names no socket in the file: a plugin without ``--pod-uid``.
    """

    def __init__(self, directory: Path, own: Path, fixed: Path) -> None:
        """Open the file without locking it. Raises EnvironmentFault if the directory can't be used."""
        self._directory, self._own, self._fixed = directory, own, fixed
        try:
            self._lock = open_lock(directory)
        except OSError as error:
            raise self._unusable(error) from error

    def take(self) -> bool:
        """Become the owner, unless another process is. Raises EnvironmentFault."""
        try:
            if not locked(self._lock):
                return False
            os.ftruncate(self._lock, 0)  # an empty file means that the owner is not known
            self._write(str(self._own))
        except OSError as error:
            raise self._unusable(error) from error
        return True

    def note_registered(self) -> None:
        """Record that the kubelet has registered the owner; only the owner calls it. Raises EnvironmentFault."""
        try:
            self._write(str(self._own), REGISTERED)
        except OSError as error:
            raise self._unusable(error) from error

    def release(self) -> None:
        """Release the lock. The file names this process until another one takes the lock."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def owner(self) -> Path | None:
        """The socket of the last owner; None if it is unknown or is this process."""
        lines = self._read()
        if not lines:
            return None
        found = Path(lines[1]) if len(lines) > 1 else self._fixed
        return None if found == self._own else found

    def known_to_kubelet(self) -> bool:
        """Whether another process is the owner and, if its version reports that, registered."""
        lines = self._read()
        return self.owner() is not None and (len(lines) == 1 or REGISTERED in lines[2:])

    def _write(self, *lines: str) -> None:
        data = "".join(f"{line}\n" for line in (str(os.getpid()), *lines)).encode()
        os.pwrite(self._lock, data, 0)

    def _read(self) -> list[str]:
        return os.pread(self._lock, NOTE_LIMIT, 0).decode("utf-8", "replace").splitlines()

    def _unusable(self, error: OSError) -> EnvironmentFault:
        return EnvironmentFault(f"--state-dir {self._directory}: can't be used: {error.strerror}")


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
    """The sockets beside ``own`` that match ``pattern``."""
    with suppress(OSError):
        return [path for path in sorted(own.parent.glob(pattern)) if path != own and path.is_socket()]
    return []
