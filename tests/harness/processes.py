"""Starting processes so that they can always be found again, and ending exactly those.

Two traces lead to a process: a record (process id, start time, boot) written right after its start, and an environment
variable naming the cluster, which its children inherit (containerd's shims, say) and which also covers a crash between
the start and the record. A process is never signalled by its number alone: a pidfd pins it, then its start time or its
environment is compared, so a recycled number is never hit.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

MARKER = "TESSERA_TEST_CLUSTER"
STOP_GRACE_S = 3.0
"""Between SIGTERM and SIGKILL. Nothing here has to be saved: the cluster's data go with it."""
_KEPT_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


class ProcessRecord(msgspec.Struct, frozen=True):
    """One start of one process. ``started`` is in clock ticks since boot; with ``boot`` it tells namesakes apart."""

    name: str
    pid: int
    started: int
    boot: str

    @property
    def alive(self) -> bool:
        """Whether this very process still runs; one that ended but was not waited for does not."""
        return boot_id() == self.boot and start_ticks(self.pid) == self.started


def boot_id() -> str:
    """Different after each boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int | None:
    """When process ``pid`` started, in clock ticks since boot; None if there is none, or a zombie.

    A process whose first thread has ended looks like a zombie while others still run, and hold its sockets and locks:
    one that is being killed, for some milliseconds.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rsplit(")", 1)[1].split()  # the name before it may hold spaces and brackets
    threads = int(fields[16])
    return None if state in "ZX" and threads <= 1 else int(fields[18])


def environ_of(pid: int) -> list[str]:
    """The environment that process ``pid`` was started with, "NAME=value" each; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def record_of(name: str, pid: int) -> ProcessRecord | None:
    """A record of the process that has this number now; None if there is none."""
    started = start_ticks(pid)
    return None if started is None else ProcessRecord(name, pid, started, boot_id())


def marked(cluster: Path) -> list[ProcessRecord]:
    """Every process whose environment says that it belongs to the cluster in the directory ``cluster``."""
    pids = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
    found = (record_of("marked", pid) for pid in pids if f"{MARKER}={cluster}" in environ_of(pid))
    return [record for record in found if record is not None]


def send(record: ProcessRecord, number: signal.Signals) -> bool:
    """Signal exactly this process; False if it is gone."""
    handle = open_process(record)
    if handle is None:
        return False
    try:
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def pidfd(pid: int) -> int | None:
    """A pidfd of the process that has this number now, for the caller to close; None if there is none."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        # EINVAL: the process is gone, but its number still names a session or group, of its shims say (Linux 6.1).
        if error.errno in (errno.ESRCH, errno.EINVAL):
            return None
        raise


def open_process(record: ProcessRecord) -> int | None:
    """A pidfd of exactly this process, for the caller to close; None if it is gone."""
    handle = pidfd(record.pid)
    if handle is None:
        return None
    if record.alive:
        return handle
    os.close(handle)
    return None


def wait_gone(records: Iterable[ProcessRecord], deadline_s: float) -> list[ProcessRecord]:
    """Wait until all have ended; return those that have not after ``deadline_s``."""
    end = time.monotonic() + deadline_s
    return [record for record in records if not _gone(record, end)]


def stop(records: Sequence[ProcessRecord], grace_s: float = STOP_GRACE_S) -> None:
    """End all these processes: SIGTERM to all, then SIGKILL to those still there after ``grace_s`` seconds."""
    for record in records:
        send(record, signal.SIGTERM)
    kill(wait_gone(records, grace_s))


def kill(records: Sequence[ProcessRecord]) -> None:
    """SIGKILL all of these and wait for their end."""
    for record in records:
        send(record, signal.SIGKILL)
    wait_gone(records, 10.0)


def _gone(record: ProcessRecord, end: float) -> bool:
    handle = open_process(record)
    if handle is not None:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        ended = bool(poll.poll(max(0.0, end - time.monotonic()) * 1000))
        os.close(handle)
        if not ended:
            return False
    _reap(record.pid)
    return True


def _reap(pid: int) -> None:
    """Collect a child of ours that ended; somebody else's child is not our business."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return


class ProcessTable:
    """The processes of one cluster, by name, as files in ``directory/run``: readable by any later run."""

    def __init__(self, directory: Path) -> None:
        self._cluster = directory
        self._run = directory / "run"

    def spawn(self, name: str, command: Sequence[str], log: Path) -> ProcessRecord:
        """Start ``command`` in a session of its own, its output appended to ``log``, and record it as ``name``."""
        environment = {**_KEPT_ENVIRONMENT, "HOME": str(self._cluster), MARKER: str(self._cluster)}
        pid = spawn(command, environment, log)
        return self.record(name, pid)

    def record(self, name: str, pid: int) -> ProcessRecord:
        """Write down that ``name`` is the process ``pid``."""
        # A process that ended at once is a zombie until we wait for it: its record then says so by matching nothing.
        record = ProcessRecord(name, pid, start_ticks(pid) or -1, boot_id())
        temporary = self._run / f".{name}"
        temporary.write_bytes(msgspec.json.encode(record))
        temporary.rename(self._run / f"{name}.json")
        return record

    def get(self, name: str) -> ProcessRecord | None:
        """The last start of ``name``, whether it still runs or not."""
        try:
            return msgspec.json.decode((self._run / f"{name}.json").read_bytes(), type=ProcessRecord)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def all(self) -> list[ProcessRecord]:
        """The last start of every process, in the order of their names."""
        names = sorted(file.stem for file in self._run.glob("[!.]*.json"))
        return [record for record in map(self.get, names) if record is not None]


def spawn(command: Sequence[str], environment: dict[str, str], log: Path) -> int:
    """Start ``command`` detached: own session, no input, output appended to ``log``. Returns its process id.

    posix_spawn and not Popen: nobody owns it, so nobody complains or waits when the starting process ends.
    """
    output = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawn(
        command[0],
        list(command),
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), output, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=[],
        setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM],
    )
