"""Work that is to be done soon after something changed, again and again, and that may fail."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Protocol

from driver.errors import RecoverableError
from driver.kube.backoff import Backoff

log = logging.getLogger(__name__)

GiveWay = Callable[[threading.Event], None]
"""Called before work that can wait; returns when it may be done, at the latest when its argument, a stop, is set."""


def at_once(stop: threading.Event) -> None:
    """Gives way to nothing."""


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
"""Loop, or what has its work done by threads that many share (``driver.kube.loop_pool``)."""


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
