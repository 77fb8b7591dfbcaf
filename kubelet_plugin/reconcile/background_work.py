"""Claim activity: background work waits while claims are being prepared or unprepared.

All threads share one interpreter, and often two cores with the API server: slices that are built and written between
two prepares of a burst cost each of them several times its own duration.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from driver.kube.work_loop import Loop, MakeLoop
from driver.watchdog import Watched
from kubelet_plugin.metrics.metrics_interface import Measurements
from kubelet_plugin.metrics.probes import NodeProbes
from kubelet_plugin.step_names import StepRunner

QUIET_PERIOD_SECONDS = 0.03
"""Time without work on claims after which a burst counts as over: calls of a burst follow each other sooner."""


class ClaimActivity:
    """Knows whether claims are being prepared or unprepared. Thread-safe; work on claims never waits here."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._working = 0
        self._worked_at = float("-inf")

    @contextmanager
    def working(self, *_: object) -> Iterator[None]:
        """A claim is being worked on inside the block (a ``ClaimObserver``)."""
        with self._guard:
            self._working += 1
        try:
            yield
        finally:
            with self._guard:
                self._working -= 1
                self._worked_at = self._clock()

    @property
    def active(self) -> bool:
        """Whether a claim is being worked on, also one that was answered with a timeout."""
        return self._working > 0

    def wait_idle(self, timeout_seconds: float) -> Callable[[threading.Event], None]:
        """Return a function to call before background work: it waits until no claim is being worked on, for at most
        ``timeout_seconds``, or until its argument, a stop, is set."""

        def wait(stop: threading.Event) -> None:
            end = self._clock() + timeout_seconds
            while (seconds := min(self._seconds_to_quiet(), end - self._clock())) > 0:
                if stop.wait(seconds):
                    return

        return wait

    def _seconds_to_quiet(self) -> float:
        """Shortest time until the node may be idle."""
        with self._guard:
            return QUIET_PERIOD_SECONDS if self._working else self._worked_at + QUIET_PERIOD_SECONDS - self._clock()


@dataclass(frozen=True, slots=True)
class BackgroundWork:
    """How work in the background gives way to claims in progress, and by what it and its steps are observed."""

    activity: ClaimActivity
    probes: NodeProbes
    measurements: Measurements
    steps: StepRunner

    def loop(self, delay_seconds: float, watched: Watched) -> MakeLoop:
        """Make loops that wait for claims in progress for at most ``delay_seconds``."""
        give_way = self.activity.wait_idle(delay_seconds)
        return self.probes.watchdog.loops(partial(Loop, give_way=give_way), watched)
