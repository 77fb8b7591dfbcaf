"""A clock that stands still until a test moves it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

DEADLINE_S = 20.0
STEP_S = 0.5


class FakeClock:
    """``driver.kube.clock.Clock`` by hand."""

    def __init__(self, started: float = 1000.0) -> None:
        self._now = started
        self._moved = threading.Condition()
        self.waiters = 0

    def monotonic(self) -> float:
        return self._now

    def now(self) -> datetime:
        return datetime(2026, 11, 21, tzinfo=UTC) + timedelta(seconds=self._now)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        with self._moved:
            until = self._now + seconds
            self.waiters += 1
            while not event.is_set() and self._now < until:
                self._moved.wait(0.002)  # events are set without telling this clock
            self.waiters -= 1
        return event.is_set()

    def advance(self, seconds: float) -> None:
        with self._moved:
            self._now += seconds
            self._moved.notify_all()

    def run_until(self, predicate: Callable[[], object], what: str) -> None:
        """Let time pass, half a second at a time, until ``predicate`` is true."""
        end = time.monotonic() + DEADLINE_S
        event = threading.Event()
        while not predicate():
            assert time.monotonic() < end, what
            self.advance(STEP_S)
            event.wait(0.01)  # the threads under test need real time, too
