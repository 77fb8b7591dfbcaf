"""Node plugins that are killed at a step and started again, cheaply: forks of one process (``plugin_zygote``)."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.harness.cluster import Cluster
from tests.harness.processes import STOP_GRACE_S, ProcessTable, stop
from tests.harness.waiting import wait_for
from tests.support import plugin_zygote
from tests.support.mps import with_daemons_in

READY_S = 60.0
DEAD_S = 60.0
STOPPED_S = 60.0


class Point(NamedTuple):
    """The ``number``th time (from 1) that a process comes to a moment ("before" or "after") of a step."""

    step: str
    moment: str
    number: int = 1

    def __str__(self) -> str:
        return f"{self.moment} {self.step}" + (f" number {self.number}" if self.number > 1 else "")


class Zygote:
    """What plugins are forked from."""

    def __init__(self, address: Path) -> None:
        self._address = address

    def fork(self, folder: Path, settings: Mapping[str, Any]) -> int:
        """Start a plugin; returns a pidfd of it, for the caller to close."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._address))
            connection.sendall(json.dumps({"folder": str(folder), "settings": settings}, default=str).encode() + b"\n")
            _, handles, _, _ = socket.recv_fds(connection, 32, 1)
        return handles[0]

    def listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
            connection.connect(str(self._address))
            return True
        return False


def zygote(cluster: Cluster, mps: Path | None = None) -> AbstractContextManager[Zygote]:
    """Running while the block runs; it belongs to the cluster, and so do its children.

    ``mps``: the directory of the MPS daemons of its children.
    """
    return zygote_in(cluster.directory, cluster.logs_dir, mps)


@contextmanager
def zygote_in(directory: Path, logs: Path, mps: Path | None = None) -> Iterator[Zygote]:
    """The same without a cluster."""
    address, table = directory / "zygote.sock", ProcessTable(directory)
    command = [sys.executable, "-P", plugin_zygote.__file__, str(address)]
    record = table.spawn("zygote", with_daemons_in(mps, command) if mps else command, logs / "zygote.log")
    try:
        wait_for(address.exists, READY_S, "the process that plugins are forked from")
        yield Zygote(address)
    finally:
        stop([record], STOP_GRACE_S)


class KillablePlugin:
    """One node's plugin: one process at a time."""

    def __init__(self, parent: Zygote, folder: Path, settings: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._parent = parent
        self._settings = settings
        self._handle: int | None = None

    @property
    def running(self) -> bool:
        return self._handle is not None and not self._ended(0)

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        lines = Path(f"/proc/self/fdinfo/{self._handle}").read_text().splitlines()
        return next(int(line.removeprefix("Pid:")) for line in lines if line.startswith("Pid:"))

    def start(self) -> None:
        """Start it without waiting for anything."""
        assert not self.running
        self._let_go()
        self.forget()
        self._handle = self._parent.fork(self.folder, self._settings)

    def order(self, point: Point) -> None:
        """Let the process, running or to be started, kill itself there."""
        temporary = self.folder / "order.new"
        temporary.write_text(f"{point.number} {point.step} {point.moment}")
        temporary.rename(self.folder / "order")

    def kill(self) -> None:
        if self._handle is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            self._ended(DEAD_S)
        (self.folder / "order").unlink(missing_ok=True)

    def end(self) -> None:
        """SIGTERM, and wait until it is gone."""
        assert self._handle is not None
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGTERM)
        assert self._ended(STOPPED_S)

    def killed(self) -> bool:
        """Wait until the process has obeyed its order; False where it did not come there in time."""
        return self._ended(DEAD_S) and not (self.folder / "order").exists()

    def seen(self) -> list[Point]:
        """Every point that the process came to since it started, or since ``forget``."""
        found: list[Point] = []
        for line in (self.folder / "seen").read_text().splitlines():
            step, moment = line.split()
            found.append(Point(step, moment, 1 + sum(point[:2] == (step, moment) for point in found)))
        return found

    def between_steps(self) -> bool:
        """Whether the last that was seen of every step is its end: one that failed has none, and comes again."""
        last = {point.step: point.moment for point in self.seen()}
        return "before" not in last.values()

    def forget(self) -> None:
        (self.folder / "seen").write_bytes(b"")

    def log(self) -> str:
        """Empty before the first line."""
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""

    def close(self) -> None:
        self.kill()
        self._let_go()

    def _ended(self, timeout_s: float) -> bool:
        """Whether the process is gone, with its locks and sockets, within so many seconds."""
        return self._handle is None or bool(select.select([self._handle], [], [], timeout_s)[0])

    def _let_go(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
