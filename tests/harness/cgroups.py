"""The control groups of a cluster: a group a node, below which its kubelet puts its pods.

Everything that runs in such a group is a container of ours; that is how containers are found after a crash has taken
away whoever knew them. Tried on cgroup v1 (every controller a hierarchy of its own beside a bare v2 one, kernel 6.18)
and on v2 (Debian 12 with systemd, kernel 6.1, in an emulated machine).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from driver.errors import EnvironmentFault
from tests.harness.processes import pidfd

TOP = "tessera-test"
REQUIRED_V1 = ("cpu", "cpuacct", "cpuset", "memory", "pids", "devices", "freezer")
REQUIRED_V2 = ("cpu", "cpuset", "memory", "pids")


@dataclass(frozen=True)
class Cgroups:
    """The hierarchies of a machine: one for v2 (``unified``), several for v1. A group is a path such as "a/b".

    ``beside`` is a cgroup2 hierarchy without controllers, as systemd and some others mount beside v1 ("hybrid"): runc
    puts containers there, too.
    """

    mounts: tuple[Path, ...]
    unified: bool
    missing: tuple[str, ...] = ()
    beside: tuple[Path, ...] = ()

    @classmethod
    def detect(cls, mounts: Path = Path("/proc/self/mounts")) -> Cgroups:
        """What this machine has; it counts as v1 if there is any v1 hierarchy."""
        found = [line.split() for line in mounts.read_text().splitlines()]
        v2 = [Path(where) for _, where, kind, *_ in found if kind == "cgroup2"]
        v1 = {Path(where): options.split(",") for _, where, kind, options, *_ in found if kind == "cgroup"}
        if v1:
            controllers = {option for options in v1.values() for option in options}
            missing = tuple(name for name in REQUIRED_V1 if name not in controllers)
            return cls(tuple(v1), False, missing, tuple(v2))
        available = _read(v2[0] / "cgroup.controllers").split() if v2 else []
        return cls(tuple(v2[:1]), True, tuple(name for name in REQUIRED_V2 if name not in available))

    @property
    def version(self) -> str:
        """ "v1" or "v2"."""
        return "v2" if self.unified else "v1"

    def create(self, group: str) -> None:
        """Make ``group`` in every hierarchy, ready for a kubelet's ``cgroupRoot``. It may be there already.

        Raises EnvironmentFault where v2 controllers can't be handed down to it.
        """
        for mount in self.mounts:
            try:
                self._create(mount, group)
            except FileNotFoundError:  # the end of another cluster has taken the folder that all share away
                self._create(mount, group)

    def _create(self, mount: Path, group: str) -> None:
        parent = mount
        for element in Path(group).parts:
            if self.unified:
                _delegate(parent)
            parent = _make_child(parent, element)
        if self.unified:
            _check_delegated(parent)

    def processes(self, group: str) -> set[int]:
        """The process ids in ``group`` and below it, in any hierarchy."""
        files = (file for folder in self._folders(group) for file in folder.rglob("cgroup.procs"))
        return {int(pid) for file in files for pid in _read(file).split()}

    def kill(self, group: str, deadline_s: float = 60.0) -> None:
        """SIGKILL everything in ``group`` until it is empty; raises EnvironmentFault if that takes too long."""
        end = time.monotonic() + deadline_s
        while pids := self.processes(group):
            for pid in pids:
                _kill_member(pid, group)
            if time.monotonic() > end:
                raise EnvironmentFault(f"processes in cgroup {group} survive SIGKILL: {sorted(pids)}")
            time.sleep(0.02)

    def remove(self, group: str, deadline_s: float = 60.0) -> None:
        """Remove ``group`` and all below it from every hierarchy. It must be empty of processes."""
        end = time.monotonic() + deadline_s
        while folders := [folder for top in self._folders(group) for folder in _deepest_first(top)]:
            for folder in folders:
                _rmdir(folder)
            if any(folder.exists() for folder in folders) and time.monotonic() > end:
                raise EnvironmentFault(f"cgroup {group} can't be removed: {[str(folder) for folder in folders]}")
            time.sleep(0.02)

    def remove_if_empty(self, group: str) -> None:
        """Remove ``group`` itself where nothing is below it: the folder all clusters share, after the last one."""
        for folder in self._folders(group):
            _rmdir(folder)

    def _folders(self, group: str) -> list[Path]:
        folders = (mount / group for mount in (*self.mounts, *self.beside))
        return [folder for folder in folders if folder.is_dir()]


def _make_child(parent: Path, element: str) -> Path:
    child = parent / element
    child.mkdir(exist_ok=True)
    for name in ("cpuset.cpus", "cpuset.mems"):
        # v1 only: a new cpuset starts empty, and no process can join it until it has CPUs and memory nodes.
        if (child / "cgroup.clone_children").exists() and (child / name).exists() and not _read(child / name).strip():
            (child / name).write_text(_read(parent / name))
    return child


def _delegate(folder: Path) -> None:
    for controller in _read(folder / "cgroup.controllers").split():
        try:
            (folder / "cgroup.subtree_control").write_text(f"+{controller}")
        except OSError:
            continue  # some can't be handed down (cpuset.partition, rt); _check_delegated says what is missing


def _check_delegated(folder: Path) -> None:
    missing = set(REQUIRED_V2) - set(_read(folder / "cgroup.controllers").split())
    if missing:
        raise EnvironmentFault(
            f"cgroup v2: {', '.join(sorted(missing))} can't be handed down to {folder}: in a container, move its "
            "processes out of the root group first; elsewhere boot with systemd.unified_cgroup_hierarchy=1"
        )


def _kill_member(pid: int, group: str) -> None:
    """SIGKILL ``pid`` if it is in ``group``: a pidfd first, so that the process checked is the one killed."""
    handle = pidfd(pid)
    if handle is None:
        return
    try:
        if f"/{group}/" in _read(Path(f"/proc/{pid}/cgroup")):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)


def _deepest_first(top: Path) -> Iterator[Path]:
    for folder, _, _ in os.walk(top, topdown=False):
        yield Path(folder)


def _rmdir(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return  # gone already, or busy for another moment: the caller looks again


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
