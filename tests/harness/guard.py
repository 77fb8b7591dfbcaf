"""The guard of an ephemeral cluster: a process that waits for the owner's death and then ends the cluster.

It costs nothing while it waits (it sleeps on the owner's pidfd) and covers every way to die, SIGKILL included.
PR_SET_PDEATHSIG would not do: it follows the thread that started a process, not the process, is not inherited by
shims and containers, and unmounts nothing.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path

from tests.harness.cleanup import GUARD, destroy
from tests.harness.processes import ProcessRecord, ProcessTable, open_process, spawn
from tests.harness.state import ClusterState, read_state

REPOSITORY = Path(__file__).resolve().parents[2]


def start_guard(state: ClusterState) -> None:
    """Start the guard of the cluster; its owner is in the state. It ends with the cluster or with the owner."""
    log = state.layout.logs / f"{GUARD}.log"
    environment = {"PATH": os.defpath, "PYTHONPATH": str(REPOSITORY)}
    pid = spawn([sys.executable, "-m", "tests.harness.guard", state.directory], environment, log)
    ProcessTable(state.layout.root).record(GUARD, pid)


def watch(directory: Path) -> None:
    """Wait until the owner of the cluster in ``directory`` is gone, then end it, unless it was meant to stay."""
    state = read_state(directory)
    if state is None or state.owner is None:
        return
    _wait_for_end(state.owner)
    owner = state.owner
    destroy(directory, only_if=lambda: _still_of(directory, owner))


def _still_of(directory: Path, owner: ProcessRecord) -> bool:
    """By now the cluster may have been released to stay, or ended, or another may have taken its name."""
    state = read_state(directory)
    return state is not None and state.owner == owner


def _wait_for_end(owner: ProcessRecord) -> None:
    handle = open_process(owner)
    if handle is not None:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll()
        os.close(handle)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch(Path(sys.argv[1]))
