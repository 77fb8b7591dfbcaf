"""Letting what can wait give way to what a pod waits for.

All of the process shares one interpreter, and often two cores with the API server: slices that are built and written
between two prepares of a burst cost each of them several times its own time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from kubelet_plugin.claims import ClaimReference
from kubelet_plugin.preparation import PreparedDevice
from kubelet_plugin.service import ClaimWork

QUIET_S = 0.03
"""How long no claim has been worked on when a burst counts as over: the calls of one come sooner after each other."""


class Lull:
    """Knows whether claims are being worked on. Thread-safe; who works on claims never waits here."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._working = 0
        self._worked_at = float("-inf")

    @contextmanager
    def broken(self) -> Iterator[None]:
        """A claim is being worked on inside the block."""
        with self._guard:
            self._working += 1
        try:
            yield
        finally:
            with self._guard:
                self._working -= 1
                self._worked_at = self._clock()

    @property
    def broken_now(self) -> bool:
        """Whether a claim is being worked on, also one whose answer came without it."""
        return self._working > 0

    def within(self, most_s: float) -> Callable[[threading.Event], None]:
        """What to call before work that can wait: it waits for a lull, or for ``most_s`` or its argument, a stop."""
        return partial(self._wait, most_s)

    def _wait(self, most_s: float, stop: threading.Event) -> None:
        end = self._clock() + most_s
        while (left := min(self._left(), end - self._clock())) > 0:
            if stop.wait(left):
                return

    def _left(self) -> float:
        """Seconds until there may be a lull."""
        with self._guard:
            return QUIET_S if self._working else self._worked_at + QUIET_S - self._clock()


class LullWork:
    """Claim work that breaks the lull while it lasts."""

    def __init__(self, work: ClaimWork, lull: Lull) -> None:
        self._work = work
        self._lull = lull

    def prepare(self, reference: ClaimReference) -> Sequence[PreparedDevice]:
        with self._lull.broken():
            return self._work.prepare(reference)

    def unprepare(self, reference: ClaimReference) -> None:
        with self._lull.broken():
            self._work.unprepare(reference)
