"""Time, injected so that tests run hours in milliseconds, and how Kubernetes writes it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime


class Clock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """Seconds since some moment; never goes back. Every decision is made with it."""
        return time.monotonic()

    def now(self) -> datetime:
        """The time of day in UTC, for people to read; no decision is made with it."""
        return datetime.now(UTC)

    def seconds_since(self, time: str | None) -> float:
        """The age of what was created at ``time``, as the API server writes it; infinite if that is unknown."""
        return math.inf if time is None else (self.now() - datetime.fromisoformat(time)).total_seconds()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait until ``event`` is set, at most ``seconds``. Returns whether it is."""
        return event.wait(max(0.0, seconds))


def soonest(*seconds: float | None) -> float | None:
    """The least of several delays until work is due again; None: it is not due without a notification."""
    return min((delay for delay in seconds if delay is not None), default=None)


def wait_until(timeout_s: float, condition: Callable[[], object], interval_s: float) -> bool:
    """Poll ``condition`` every ``interval_s`` seconds; returns whether it became true in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(interval_s)
    return True


def micro_time(moment: datetime) -> str:
    """Kubernetes' MicroTime: always six digits of the second."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def seconds_time(moment: datetime) -> str:
    """Kubernetes' Time: whole seconds."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def written_time(stamp: int) -> str:
    """``stamp`` (seconds since 1970) in the format of Kubernetes (RFC 3339, UTC)."""
    return seconds_time(datetime.fromtimestamp(stamp, UTC))


def read_time(text: str) -> int | None:
    """The inverse of ``written_time``; None if ``text`` is not such a time."""
    try:
        return int(datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp())
    except ValueError:
        return None
