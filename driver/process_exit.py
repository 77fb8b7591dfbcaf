"""End of a process whose threads may hang in the NVIDIA driver's library, where they can't be interrupted."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterable

from driver.clock import wait_until
from driver.errors import FatalError

EXIT_TIMEOUT_SECONDS = 3.0
EXIT_INTERVAL_SECONDS = 0.01

WRITERS_TIMEOUT_SECONDS = 15.0
"""Longest time that threads that write may take to end: longer than a request to the API server."""


def join_all(threads: Iterable[threading.Thread]) -> None:
    """Wait until all threads have ended. Raises FatalError if one has not: only the end of the process ends it then."""
    end = time.monotonic() + WRITERS_TIMEOUT_SECONDS
    threads = list(threads)
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if hung := [thread.name for thread in threads if thread.is_alive()]:
        raise FatalError(f"does not answer, so that this process has to end: {', '.join(hung)}")


def leave(log: logging.Logger) -> None:
    """Wait a few seconds for all non-daemon threads; if some are left, end the process with exit code 0."""
    # Polled, not joined: a thread that is just being started is listed already, but can't be joined yet.
    if not wait_until(EXIT_TIMEOUT_SECONDS, lambda: not _remaining(), EXIT_INTERVAL_SECONDS):
        hung = [thread.name for thread in _remaining()]
        log.error("exiting although threads do not end", extra={"threads": ",".join(hung)})
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)


def _remaining() -> list[threading.Thread]:
    """Threads that keep the process from ending."""
    return [thread for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]
