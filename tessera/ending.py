"""Ending a process of which a thread may hang in the driver's library, where nothing reaches it."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time

GRACE_S = 3.0


def leave(log: logging.Logger) -> None:
    """Return if nothing but daemon threads is left within a few seconds; else end the process at once, successfully."""
    end = time.monotonic() + GRACE_S
    others = [each for each in threading.enumerate() if each is not threading.main_thread() and not each.daemon]
    for thread in others:
        thread.join(max(0.0, end - time.monotonic()))
    if hung := [thread.name for thread in others if thread.is_alive()]:
        log.error("left behind what does not answer", extra={"threads": ",".join(hung)})
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)
