"""Starts the process of the MPS daemons, and starts it again if it dies.

If a container's first process ends, so do all others in it, and with the MPS daemons all their clients. So the first
one does next to nothing: it imports the rest only in the process that it forks.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from importlib import import_module

RESTART_SECONDS = 1.0
ENDED = (0, 3)
"""Exit statuses after which it is not started again: told to end; the machine lacks something."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run() -> int:
    """Run the serving process until it is told to end; return the exit status."""
    while True:
        status = _run_once()
        if status in ENDED:
            return status
        time.sleep(RESTART_SECONDS)


def _run_once() -> int:
    """Run the serving process; return its exit status, negative for a signal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    worker = os.fork()
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        import_module("kubelet_plugin.mps.app").main(sys.argv[1:])
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _: os.kill(worker, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])


if __name__ == "__main__":
    sys.exit(run())
