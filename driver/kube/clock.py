"""Time, injected: tests run hours in milliseconds."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """What waiting and measuring code asks of time."""

    def monotonic(self) -> float:
        """Seconds since some moment; never goes back. What decides anything is measured with it."""
        ...

    def now(self) -> datetime:
        """The time of day in UTC, for people to read; nothing is decided by it."""
        ...

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait until ``event`` is set, at most ``seconds``; says whether it is."""
        ...


class SystemClock:
    """The machine's own."""

    def monotonic(self) -> float:
        return time.monotonic()

    def now(self) -> datetime:
        return datetime.now(UTC)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        return event.wait(max(0.0, seconds))


def micro_time(moment: datetime) -> str:
    """As Kubernetes' MicroTime is written: six digits of the second, always."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def seconds_time(moment: datetime) -> str:
    """As Kubernetes' Time is written: whole seconds."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
