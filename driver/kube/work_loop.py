"""Work that is to be done soon after something changed, again and again, and that may fail."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import random
import threading
import time
from collections.abc import Callable
from typing import Protocol

from driver.errors import RecoverableError

log = logging.getLogger(__name__)

GiveWay = Callable[[threading.Event], None]
"""Called before work that can wait; returns when it may be done, at the latest when its argument, a stop, is set."""


def at_once(stop: threading.Event) -> None:
    """Gives way to nothing."""


class Backoff:
    """Doubling delays in seconds with full jitter, so that a fleet does not retry in step."""

    def __init__(self, first_s: float = 0.2, most_s: float = 30.0, jitter: Callable[[], float] = random.random) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._jitter = jitter
        self._failures = 0

    def next_s(self) -> float:
        """The delay after one more failure: between half and all of the doubled delay."""
        delay: float = min(self._most_s, self._first_s * 2 ** min(self._failures, 16))
        self._failures += 1
        return delay * (0.5 + 0.5 * self._jitter())

    def reset(self) -> None:
        """Start over after a success."""
        self._failures = 0


class Work:
    """Something to be done that may fail: when to do it again."""

    def __init__(
        self, what: str, work: Callable[[], float | None], patience: Callable[[RecoverableError], float | None]
    ) -> None:
        self._what = what
        self._work = work
        self._patience = patience
        self._backoff = Backoff()

    def attempt(self) -> tuple[float, float | None]:
        """Do it. Returns for how many seconds to leave it alone, and in how many after that to do it again (None: when
        something changes)."""
        try:
            again = self._work()
            self._backoff.reset()
        except RecoverableError as error:
            seconds = self._patience(error)
            return (self._failed(str(error)) if seconds is None else seconds), 0.0
        except Exception as error:
            # A defect of ours must not end the thread: the work would never be done again.
            log.exception("defect while %s", self._what)
            return self._failed(f"{type(error).__name__}: {error}"), 0.0
        return 0.0, again

    def _failed(self, error: str) -> float:
        delay = self._backoff.next_s()
        log.warning("%s failed, trying again", self._what, extra={"error": error, "retryIn": f"{delay:.1f}s"})
        return delay


class Repeating(Protocol):
    """A loop, as those know it who tell it that something changed."""

    def notify(self) -> None:
        """Work soon; cheap, from any thread."""
        ...

    def notify_within(self, seconds: float) -> None:
        """Work in so many seconds, or sooner where somebody wants that."""
        ...

    def run(self, stop: threading.Event) -> None:
        """Work at every notification until ``stop`` is set (then call ``notify`` once more)."""
        ...


MakeLoop = Callable[[str, Callable[[], float | None], float], Repeating]
"""Loop, or what has its work done by threads that many share (``driver.kube.work_loop``)."""


class Loop:
    """Calls ``work`` soon after each ``notify``, changes within ``coalesce_s`` together; backs off after a failure."""

    def __init__(
        self,
        what: str,
        work: Callable[[], float | None],
        coalesce_s: float,
        patience: Callable[[RecoverableError], float | None] = lambda _: None,
        give_way: GiveWay = at_once,
    ) -> None:
        """``what`` names the work in the log: "publishing slices". It may say after how many seconds it is to be done
        again, though nothing was notified.

        ``patience`` says of a failure how many seconds to wait after it, and has then said to people what there is to
        say; None: back off as usual.
        """
        self._work = Work(what, work, patience)
        self._coalesce_s = coalesce_s
        self._give_way = give_way
        self._changed = threading.Condition()
        self._due = math.inf

    def notify(self) -> None:
        """Work soon; cheap, from any thread."""
        self.notify_within(0.0)

    def notify_within(self, seconds: float) -> None:
        """Work in so many seconds, or sooner where somebody wants that."""
        with self._changed:
            self._due = min(self._due, time.monotonic() + seconds)
            self._changed.notify()

    def run(self, stop: threading.Event) -> None:
        """Work at every notification until ``stop`` is set (then call ``notify`` once more)."""
        while not stop.is_set():
            self._wait()
            stop.wait(self._coalesce_s)
            self._give_way(stop)
            with self._changed:
                self._due = math.inf
            if stop.is_set():
                return
            pause, again = self._work.attempt()
            stop.wait(pause)
            if again is not None:
                self.notify_within(again)

    def _wait(self) -> None:
        with self._changed:
            while (left := self._due - time.monotonic()) > 0:
                self._changed.wait(None if left == math.inf else left)


class LoopPool:
    """Makes loops and does their work; ``run`` is what each of its threads does. A loop's work is done by one thread
    at a time."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._due: list[tuple[float, int, PooledLoop]] = []
        self._count = itertools.count()

    def loop(self, what: str, work: Callable[[], float | None], coalesce_s: float) -> PooledLoop:
        """A loop as ``driver.kube.work_loop.Loop`` is one, but for its ``run``, which this pool does."""
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
