"""What a cluster changes on the machine outside of its own directory, and putting it back.

A kubelet sets a few sysctls and makes two fixed folders, whatever its root directory is; the harness adds a few more.
The first cluster on the machine remembers how things were; the end of the last one restores them. (A foreign kubelet
is refused by preflight.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tests.harness.layout import RUN
from tests.harness.locks import file_lock
from tests.harness.processes import boot_id

SYSCTLS = tuple(
    Path("/proc/sys") / name
    for name in (
        "vm/overcommit_memory",
        "vm/panic_on_oom",
        "kernel/panic",
        "kernel/panic_on_oops",
        "kernel/keys/root_maxkeys",
        "kernel/keys/root_maxbytes",
    )
)
DEVICE_PLUGINS = Path("/var/lib/kubelet/device-plugins")
MOUNT_POINTS = (Path("/run/cdi"), Path("/var/lib/tessera"))
"""Of nodes in their usual places (usual_places.py)."""
KUBELET_SOCKET = DEVICE_PLUGINS / "kubelet.sock"
FOLDERS = (DEVICE_PLUGINS, DEVICE_PLUGINS.parent, Path("/var/log/containers"), *MOUNT_POINTS, RUN)
"""Inner folders first."""


class HostTraces(msgspec.Struct, frozen=True):
    """How the machine was: the sysctls' values since its boot, and which of the folders there were not."""

    boot: str
    sysctls: dict[str, str]
    absent: list[str]


def remember(base: Path) -> None:
    """Write down how the machine is, unless that was done already. The caller holds ``base_lock``."""
    file = _file(base)
    if file.exists():
        return
    values = {str(sysctl): sysctl.read_text().strip() for sysctl in SYSCTLS if sysctl.exists()}
    absent = [str(folder) for folder in FOLDERS if not folder.exists()]
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.encode(HostTraces(boot_id(), values, absent)))
    temporary.rename(file)


def restore(base: Path) -> None:
    """Put back what was remembered, if no cluster is left below ``base``; else nothing."""
    with file_lock(base_lock(base)):
        if any(base.glob("*/state.json")) or not _file(base).exists():
            return
        traces = msgspec.json.decode(_file(base).read_bytes(), type=HostTraces)
        if traces.boot == boot_id():
            _restore_sysctls(traces.sysctls)
        _remove_folders([Path(folder) for folder in traces.absent])
        _file(base).unlink()


@contextmanager
def kubelet_start(base: Path) -> Iterator[Callable[[], bool]]:
    """Only one kubelet of the machine starts at a time; yields a probe that says when the next one may.

    Every kubelet first clears and then binds the same socket, a path fixed in its code: of two at once one would fail.
    Later it doesn't matter to a kubelet (nor to DRA) that another took the socket's place.
    """
    with file_lock(base / ".kubelet-start.lock"):
        before = _identity(KUBELET_SOCKET)
        yield lambda: _identity(KUBELET_SOCKET) not in (None, before)


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_ctime_ns


def base_lock(base: Path) -> Path:
    """The lock of everything that concerns all clusters: their networks, and the machine itself."""
    return base / ".lock"


def _file(base: Path) -> Path:
    return base / ".host.json"


def _restore_sysctls(values: dict[str, str]) -> None:
    for name, value in values.items():
        if Path(name).read_text().strip() != value:
            Path(name).write_text(value)


def _remove_folders(folders: list[Path]) -> None:
    for folder in folders:
        if not folder.is_dir():
            continue
        for socket in (entry for entry in folder.iterdir() if entry.is_socket()):
            socket.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()
