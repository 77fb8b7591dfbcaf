"""Ending a process of which a thread may hang in the driver's library, where nothing reaches it."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterable

from driver.errors import FatalError
from tessera.waiting import within

GRACE_S = 3.0
LOOK_S = 0.01

WRITERS_S = 15.0
"""How long those that write may take to end: longer than a request to the API server."""


def ended(threads: Iterable[threading.Thread], within_s: float = WRITERS_S) -> None:
    """Wait until they have ended. Raises FatalError where one goes on: only the end of the process ends it then."""
    end = time.monotonic() + within_s
    threads = list(threads)
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if hung := [thread.name for thread in threads if thread.is_alive()]:
        raise FatalError(f"does not answer, so that this process has to end: {', '.join(hung)}")


def leave(log: logging.Logger) -> None:
    """Return if nothing but daemon threads is left within a few seconds; else end the process at once, successfully."""
    # Looked at, not joined: a thread that is just being started is listed already, and can't be joined.
    if not within(GRACE_S, lambda: not _lasting(), LOOK_S):
        hung = [thread.name for thread in _lasting()]
        log.error("left behind what does not answer", extra={"threads": ",".join(hung)})
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)


def _lasting() -> list[threading.Thread]:
    """What would keep the process from ending."""
    return [each for each in threading.enumerate() if each is not threading.main_thread() and not each.daemon]
