"""Health of a process's threads and loops: threads that have ended, and work that does not end.

Nothing here judges work that waits for hardware: a GPU that hangs keeps a thread forever, and a restart would not help.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any, TypeVar

from driver.errors import TesseraError
from driver.kube.work_loop import Loop, MakeLoop
from driver.step_observer import Moment, StepObserver

S = TypeVar("S", bound=StrEnum)

STUCK_TIMEOUT_SECONDS = 120.0
"""Longest time of one turn: several requests without a response (10 s each) and a slow disk fit into it."""


class Watched:
    """One piece of work that is repeated. ``failure`` is why its last turn failed, or None."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self.failure: str | None = None
        self._name = name
        self._clock = clock
        self._busy_since: float | None = None

    def begin(self) -> None:
        self._busy_since = self._clock()

    def end(self, failure: str | None) -> None:
        self._busy_since, self.failure = None, failure

    def stuck(self) -> str | None:
        """The duration of the present turn, if that is too long."""
        began = self._busy_since
        seconds = 0.0 if began is None else self._clock() - began
        return f"{self._name} takes {seconds:.0f} s" if seconds > STUCK_TIMEOUT_SECONDS else None


class Watchdog:
    """Watches threads and loops; ``stop`` ends the threads."""

    def __init__(self, stop: threading.Event, clock: Callable[[], float] = time.monotonic) -> None:
        self._stop = stop
        self._clock = clock
        self._threads: list[threading.Thread] = []
        self._watched: list[Watched] = []

    def start(self, target: Callable[..., object]) -> threading.Thread:
        """Run ``target(stop)`` in a thread that must live until ``stop`` is set. Returns the thread."""
        thread = threading.Thread(target=target, args=(self._stop,), daemon=True, name=target.__qualname__)
        thread.start()
        self._threads.append(thread)
        return thread

    def watch(self, name: str) -> Watched:
        """Work whose turns must end."""
        watched = Watched(name, self._clock)
        self._watched.append(watched)
        return watched

    def loops(self, make: MakeLoop, watched: Watched) -> MakeLoop:
        """Makes loops like ``make``, and watches their turns."""

        def made(name: str, work: Callable[[], float | None], coalesce_seconds: float) -> Loop:
            def turn() -> float | None:
                watched.begin()
                try:
                    again = work()
                except Exception as error:
                    watched.end(str(error) if isinstance(error, TesseraError) else f"internal error: {error!r}")
                    raise
                watched.end(None)
                return again

            return make(name, turn, coalesce_seconds)

        return made

    def steps(self, observer: StepObserver[S], step: S, watched: Watched) -> StepObserver[S]:
        """An observer that calls ``observer`` and watches every ``step``; a failed step ends when the next begins."""

        def observe(each: S, moment: Moment) -> Any:
            observer(each, moment)
            if each is step and moment == "before":
                watched.begin()
            elif each is step:
                watched.end(None)

        return observe

    def failure(self) -> str | None:
        """The threads that have ended and the work that does not end, or None."""
        if self._stop.is_set():
            return None
        dead = [f"thread {thread.name} has ended" for thread in self._threads if not thread.is_alive()]
        stuck = [reason for watched in self._watched if (reason := watched.stuck()) is not None]
        return "; ".join([*dead, *stuck]) or None
