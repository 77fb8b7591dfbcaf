"""Threads of the product inside a test, and waiting for what they do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.harness.waiting import wait_for

SOON_S = 60.0


def eventually(predicate: Callable[[], object], what: str) -> None:
    """Wait until ``predicate`` is true; fails after a minute, saying ``what`` did not happen."""
    wait_for(predicate, SOON_S, what, interval_s=0.005)


@contextmanager
def in_thread(run: Callable[[threading.Event], None], wake: Callable[[], None] = lambda: None) -> Iterator[None]:
    """``run(stop)`` in a thread while the block runs; ``wake`` gets it out of whatever it waits for."""
    stop = threading.Event()
    thread = threading.Thread(target=run, args=(stop,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        end = time.monotonic() + SOON_S
        while thread.is_alive() and time.monotonic() < end:
            wake()
            thread.join(0.02)
        assert not thread.is_alive()
