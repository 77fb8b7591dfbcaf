"""Many loops, few threads: for a process in which thousands of things may have to be done, most of them seldom."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable

from driver.kube.loop import Work


class LoopPool:
    """Makes loops and does their work; ``run`` is what each of its threads does. A loop's work is done by one thread
    at a time."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._due: list[tuple[float, int, PooledLoop]] = []
        self._count = itertools.count()

    def loop(self, what: str, work: Callable[[], float | None], coalesce_s: float) -> PooledLoop:
        """A loop as ``driver.kube.loop.Loop`` is one, but for its ``run``, which this pool does."""
        return PooledLoop(self, Work(what, work, lambda _: None), coalesce_s)

    def run(self, stop: threading.Event) -> None:
        """Work until ``stop`` is set (then call ``wake``)."""
        while not stop.is_set():
            loop = self._next(stop)
            if loop is not None:
                loop.attempt()

    def wake(self) -> None:
        """Let every ``run`` see that it is over."""
        with self.changed:
            self.changed.notify_all()

    def push(self, loop: PooledLoop, due: float) -> None:
        """The caller holds ``changed``."""
        heapq.heappush(self._due, (due, next(self._count), loop))
        self.changed.notify()

    def _next(self, stop: threading.Event) -> PooledLoop | None:
        with self.changed:
            while not stop.is_set():
                left = self._due[0][0] - time.monotonic() if self._due else None
                if left is None or left > 0:
                    self.changed.wait(left)
                    continue
                due, _, loop = heapq.heappop(self._due)
                if loop.begin(due):
                    return loop
        return None


class PooledLoop:
    """One loop of a pool."""

    def __init__(self, pool: LoopPool, work: Work, coalesce_s: float) -> None:
        self._pool = pool
        self._work = work
        self._coalesce_s = coalesce_s
        self._due = math.inf
        self._not_before = 0.0
        self._working = False

    def notify(self) -> None:
        """Work soon; cheap, from any thread."""
        self.notify_within(0.0)

    def notify_within(self, seconds: float) -> None:
        """Work in so many seconds, or sooner where somebody wants that."""
        with self._pool.changed:
            due = max(self._not_before, time.monotonic() + seconds + self._coalesce_s)
            if due < self._due:
                self._due = due
                if not self._working:
                    self._pool.push(self, due)

    def run(self, stop: threading.Event) -> None:
        """Nothing: the pool does it."""

    def begin(self, due: float) -> bool:
        """Whether it is to be done now; ``due`` may be out of date. The caller holds the pool's ``changed``."""
        if self._working or due != self._due:
            return False
        self._working, self._due = True, math.inf
        return True

    def attempt(self) -> None:
        """Do the work that was begun."""
        pause, again = self._work.attempt()
        with self._pool.changed:
            self._working = False
            self._not_before = time.monotonic() + pause
            if again is not None:
                self._due = min(self._due, self._not_before + again)
            self._due = max(self._due, self._not_before)
            if self._due < math.inf:
                self._pool.push(self, self._due)
