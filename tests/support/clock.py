"""A clock that stands still until a test moves it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from driver.clock import Clock

DEADLINE_S = 60.0
STEP_S = 0.5


class FakeClock(Clock):
    """``driver.clock.Clock`` by hand."""

    def __init__(self, started: float = 1000.0) -> None:
        self._now = started
        self._moved = threading.Condition()
        self._waiting: list[tuple[threading.Event, float]] = []

    @property
    def waiters(self) -> int:
        """How many wait: not those who need not any more, and have just not woken up."""
        with self._moved:
            return sum(1 for event, until in self._waiting if not event.is_set() and self._now < until)

    def monotonic(self) -> float:
        return self._now

    def now(self) -> datetime:
        return datetime(2026, 11, 21, tzinfo=UTC) + timedelta(seconds=self._now)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        with self._moved:
            entry = (event, self._now + seconds)
            self._waiting.append(entry)
            while not event.is_set() and self._now < entry[1]:
                self._moved.wait(0.002)  # events are set without telling this clock
            self._waiting.remove(entry)
        return event.is_set()

    def advance(self, seconds: float) -> None:
        with self._moved:
            self._now += seconds
            self._moved.notify_all()

    def run_until(self, predicate: Callable[[], object], what: str, waiters: int = 1) -> None:
        """Let time pass, half a second at a time, until ``predicate`` is true.

        It stands while fewer than ``waiters`` wait for it: what a thread does takes no time, however late it gets to.
        """
        end = time.monotonic() + DEADLINE_S
        event = threading.Event()
        while not predicate():
            assert time.monotonic() < end, what
            if self.waiters >= waiters:
                self.advance(STEP_S)
            event.wait(0.002)  # the threads under test need real time, too
