"""Loops: work that is done soon after each notification and again, with growing delays, after each failure."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import random
import threading
import time
from collections.abc import Callable

from driver.errors import RecoverableError

log = logging.getLogger(__name__)

GiveWay = Callable[[threading.Event], None]
"""Called before work that can wait; returns when the work may be done, or when its argument, a stop, is set."""


def at_once(stop: threading.Event) -> None:
    """Never wait."""


class Backoff:
    """Doubling delays in seconds with full jitter, so that a fleet does not retry in step."""

    def __init__(self, first_s: float = 0.2, most_s: float = 30.0, jitter: Callable[[], float] = random.random) -> None:
        self._first_s, self._most_s, self._jitter = first_s, most_s, jitter
        self._failures = 0

    def next_s(self) -> float:
        """The delay after one more failure: between half and all of the doubled delay."""
        delay: float = min(self._most_s, self._first_s * 2 ** min(self._failures, 16))
        self._failures += 1
        return delay * (0.5 + 0.5 * self._jitter())

    def reset(self) -> None:
        """Start over after a success."""
        self._failures = 0


class LoopPool:
    """A queue of loops. Each thread that calls ``run`` does the work of one loop at a time."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._queue: list[tuple[float, int, Loop]] = []
        self._count = itertools.count()

    def loop(self, name: str, work: Callable[[], float | None], coalesce_seconds: float) -> Loop:
        """A loop whose work the threads of this pool do."""
        return Loop(name, work, coalesce_seconds, pool=self)

    def run(self, stop: threading.Event) -> None:
        """Do work until ``stop`` is set (then call ``wake``)."""
        while (loop := self._next(stop)) is not None:
            loop.turn(stop)

    def wake(self) -> None:
        """Let each ``run`` check its stop."""
        with self.changed:
            self.changed.notify_all()

    def push(self, loop: Loop, due: float) -> None:
        """Queue ``loop``. The caller holds ``changed``."""
        heapq.heappush(self._queue, (due, next(self._count), loop))
        self.changed.notify()

    def _next(self, stop: threading.Event) -> Loop | None:
        with self.changed:
            while not stop.is_set():
                seconds = self._queue[0][0] - time.monotonic() if self._queue else None
                if seconds is None or seconds > 0:
                    self.changed.wait(seconds)
                    continue
                due, _, loop = heapq.heappop(self._queue)
                if loop.begin(due):
                    return loop
        return None


class Loop:
    """Calls ``work`` soon after each ``notify``, in one thread at a time: that of ``run``, or one of ``pool``.

    ``name`` names the work in the log: "publishing slices". ``work`` may return the seconds after which it is due again
    without a notification. Changes within ``coalesce_seconds`` are handled together. ``retry_delay`` returns the
    seconds to wait after a failure, which it has then reported; None: log the failure and back off.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], float | None],
        coalesce_seconds: float,
        retry_delay: Callable[[RecoverableError], float | None] = lambda _: None,
        give_way: GiveWay = at_once,
        pool: LoopPool | None = None,
    ) -> None:
        self._name, self._work, self._coalesce_seconds = name, work, coalesce_seconds
        self._retry_delay, self._give_way = retry_delay, give_way
        self._pool = pool or LoopPool()
        self._backoff = Backoff()
        self._due = math.inf
        self._not_before = 0.0
        self._working = False

    def notify(self) -> None:
        """Work soon; cheap, from any thread."""
        self.notify_within(0.0)

    def notify_within(self, seconds: float) -> None:
        """Work in so many seconds, or sooner if another notification requires that."""
        with self._pool.changed:
            self._schedule(seconds)
            self._pool.changed.notify()

    def run(self, stop: threading.Event) -> None:
        """Do the work of a loop without a pool until ``stop`` is set (then call ``notify`` once more)."""
        self._pool.run(stop)

    def begin(self, due: float) -> bool:
        """Whether a turn begins now; False if ``due`` is out of date. The caller holds the pool's ``changed``."""
        if self._working or due != self._due:
            return False
        self._working = True
        return True

    def turn(self, stop: threading.Event) -> None:
        """Do the work once, after ``begin``."""
        self._give_way(stop)
        with self._pool.changed:
            self._due = math.inf
        pause, again = (0.0, None) if stop.is_set() else self._attempt()
        with self._pool.changed:
            self._working, self._not_before = False, time.monotonic() + pause
            if self._due < math.inf:
                # Coalesce the changes since the turn began, however long it took.
                self._due = max(self._due, self._not_before + self._coalesce_seconds)
                self._pool.push(self, self._due)
            if again is not None:
                self._schedule(again + pause)

    def _schedule(self, seconds: float) -> None:
        due = max(self._not_before, time.monotonic() + seconds + self._coalesce_seconds)
        if due < self._due:
            self._due = due
            if not self._working:
                self._pool.push(self, due)

    def _attempt(self) -> tuple[float, float | None]:
        """Call ``work``. Returns the seconds to wait in any case, and those until the work is due again after that."""
        try:
            again = self._work()
        except RecoverableError as error:
            seconds = self._retry_delay(error)
            return (self._failed(str(error)) if seconds is None else seconds), 0.0
        except Exception as error:
            # A defect must not end the thread: the work would never be done again.
            log.exception("defect while %s", self._name)
            return self._failed(f"{type(error).__name__}: {error}"), 0.0
        self._backoff.reset()
        return 0.0, again

    def _failed(self, error: str) -> float:
        delay = self._backoff.next_s()
        log.warning("%s failed, trying again", self._name, extra={"error": error, "retryIn": f"{delay:.1f}s"})
        return delay


MakeLoop = Callable[[str, Callable[[], float | None], float], Loop]
"""``Loop`` or ``LoopPool.loop``."""
