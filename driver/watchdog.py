"""Whether the loops of a process turn: threads that have ended, work that never does.

Work is watched by being wrapped where a process is put together. Nothing here judges what waits for hardware: a GPU
that hangs keeps a thread for ever, and a restart would not bring it back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any, TypeVar

from driver.errors import TesseraError
from driver.kube.work_loop import MakeLoop, Repeating
from driver.steps import Moment, StepObserver

S = TypeVar("S", bound=StrEnum)

STUCK_S = 120.0
"""Longest time of one turn: some requests that are not answered (10 s each), and a slow disk, fit into it."""


class Watched:
    """One piece of work that is done again and again. ``failure`` is why its last turn failed, or None."""

    def __init__(self, what: str, clock: Callable[[], float]) -> None:
        self.what = what
        self.failure: str | None = None
        self.turned = False
        self._clock = clock
        self._busy_since: float | None = None

    def around(self, work: Callable[[], float | None]) -> Callable[[], float | None]:
        """``work``, noted."""

        def watched() -> float | None:
            self.begin()
            try:
                again = work()
            except Exception as error:
                self.end(str(error) if isinstance(error, TesseraError) else f"internal error: {error!r}")
                raise
            self.end(None)
            return again

        return watched

    def begin(self) -> None:
        self._busy_since = self._clock()

    def end(self, failure: str | None) -> None:
        self._busy_since, self.failure, self.turned = None, failure, True

    def stuck(self, longest_s: float) -> str | None:
        """How long its turn takes already, where that is too long."""
        began = self._busy_since
        took = 0.0 if began is None else self._clock() - began
        return f"{self.what} takes {took:.0f} s" if took > longest_s else None


class Watchdog:
    """Watches threads and loops from when they are given to it."""

    def __init__(self, stop: threading.Event, clock: Callable[[], float] = time.monotonic) -> None:
        """``stop`` is what the threads end for."""
        self._stop = stop
        self._clock = clock
        self._threads: list[threading.Thread] = []
        self._watched: list[Watched] = []

    def start(self, target: Callable[..., object]) -> threading.Thread:
        """Run ``target(stop)`` in a thread that has to live until ``stop`` is set. Returns it."""
        thread = threading.Thread(target=target, args=(self._stop,), daemon=True, name=target.__qualname__)
        thread.start()
        self._threads.append(thread)
        return thread

    def watch(self, what: str) -> Watched:
        """Work whose turns have to end; who does it calls ``begin`` and ``end``, or wraps it."""
        watched = Watched(what, self._clock)
        self._watched.append(watched)
        return watched

    def loops(self, make: MakeLoop, watched: Watched) -> MakeLoop:
        """What makes loops whose turns are noted in ``watched``."""

        def made(what: str, work: Callable[[], float | None], coalesce_s: float) -> Repeating:
            return make(what, watched.around(work), coalesce_s)

        return made

    def steps(self, observer: StepObserver[S], step: S, watched: Watched) -> StepObserver[S]:
        """``observer``, and every ``step`` noted in ``watched``; one that fails ends with the next."""

        def observe(each: S, moment: Moment) -> Any:
            observer(each, moment)
            if each is step and moment == "before":
                watched.begin()
            elif each is step:
                watched.end(None)

        return observe

    def look(self) -> str | None:
        """What does not turn any more, or None."""
        if self._stop.is_set():
            return None
        dead = [f"thread {thread.name} has ended" for thread in self._threads if not thread.is_alive()]
        stuck = [told for watched in self._watched if (told := watched.stuck(STUCK_S)) is not None]
        return "; ".join([*dead, *stuck]) or None
