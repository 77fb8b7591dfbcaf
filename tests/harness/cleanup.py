"""Ending a cluster: the same way whether it is stopped, its owner crashed, or a start finds what a crash left.

Kubelets go first, so that nothing is restarted; then the other processes of the cluster, known by record or by
environment; then containers, known by their cgroup; then mounts, cgroups and files. Each step finds its objects by
looking, not by remembering, and may be repeated: an interrupted cleanup is finished by the next.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.harness import host, processes
from tests.harness.cgroups import TOP, Cgroups
from tests.harness.layout import Layout
from tests.harness.locks import file_lock
from tests.harness.mounts import unmount_below
from tests.harness.state import read_state

GUARD = "guard"
DRAIN_S = 0.5
"""For etcd and the API server, which would drain their watches for seconds: their data go anyway."""
CONTAINER_LOG_LINKS = Path("/var/log/containers")
"""The kubelet links every container's log here, whatever podLogsDir says."""


def cgroup_of(directory: Path) -> str:
    """The cgroup below which the nodes of the cluster in ``directory`` have theirs."""
    return f"{TOP}/{directory.name}"


def destroy(directory: Path, keep_logs: bool = False, only_if: Callable[[], bool] = lambda: True) -> None:
    """End the cluster in ``directory`` and remove all of it, except its logs with ``keep_logs``.

    ``only_if`` is asked once the cluster's lock is held. Nothing there is fine. Raises EnvironmentFault if a process,
    mount or cgroup resists; the files are then still there.
    """
    with file_lock(Layout(directory).lock):
        if only_if():
            destroy_locked(directory, keep_logs)
    host.restore(directory.parent)


def destroy_locked(directory: Path, keep_logs: bool = False) -> None:
    """``destroy`` for a caller that holds the cluster's lock; what concerns the whole machine stays as it is."""
    layout = Layout(directory)
    end_processes(directory)
    for folder in (directory, layout.sockets):
        unmount_below(folder)
    groups = Cgroups.detect()
    groups.remove(cgroup_of(directory))
    groups.remove_if_empty(TOP)
    _remove_log_links(directory)
    _remove_files(layout, keep_logs)


def end_processes(directory: Path) -> None:
    """End every process of the cluster in ``directory``, containers included."""
    records = [record for record in processes.ProcessTable(directory).all() if record.pid != os.getpid()]
    processes.kill([record for record in records if record.name == GUARD])
    processes.stop([record for record in records if record.name.startswith("kubelet")])
    processes.stop([record for record in records if not record.name.startswith("kubelet")], grace_s=DRAIN_S)
    while left := processes.marked(directory):  # shims, and what a crash kept from being recorded
        processes.kill(left)
    Cgroups.detect().kill(cgroup_of(directory))


def left_something(directory: Path) -> bool:
    """Whether anything is there to be ended, be it what a crash or an interrupted cleanup left."""
    layout = Layout(directory)
    return any(folder.exists() for folder in (directory, layout.sockets)) or bool(processes.marked(directory))


def in_use(directory: Path) -> bool:
    """Whether the cluster in ``directory`` is one that somebody still wants."""
    state = read_state(directory)
    return state is not None and state.in_use()


def _remove_log_links(directory: Path) -> None:
    if not CONTAINER_LOG_LINKS.is_dir():
        return
    for link in CONTAINER_LOG_LINKS.iterdir():
        with suppress(FileNotFoundError):  # the kubelets of other clusters take theirs away at any time
            if link.is_symlink() and link.readlink().is_relative_to(directory):
                link.unlink()


def _remove_files(layout: Layout, keep_logs: bool) -> None:
    shutil.rmtree(layout.sockets, ignore_errors=True)
    if not layout.root.exists():
        return
    for entry in layout.root.iterdir():
        if keep_logs and entry == layout.logs:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    if not keep_logs:
        layout.root.rmdir()
