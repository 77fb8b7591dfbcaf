"""No network but loopback, for a cluster and the commands that are run against it."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.harness.images import BUSYBOX

CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


@contextmanager
def no_network() -> Iterator[None]:
    """This thread, and all threads and processes that it starts, in a network namespace that has only loopback."""
    with Path("/proc/thread-self/ns/net").open() as before:
        _check(_LIBC.unshare(CLONE_NEWNET))
        try:
            subprocess.run([str(BUSYBOX), "ip", "link", "set", "lo", "up"], check=True)
            yield
        finally:
            _check(_LIBC.setns(before.fileno(), CLONE_NEWNET))


def interfaces(pid: int) -> list[str]:
    """The network interfaces that a process sees."""
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()
    return [name.strip() for name, colon, _ in (line.partition(":") for line in lines) if colon]


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
