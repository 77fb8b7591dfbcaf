"""Waiting for something to become true, with a deadline that says what was seen last."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from driver.errors import RecoverableError

T = TypeVar("T")

POLL_S = 0.05
"""Seconds between two looks: short against everything that is waited for, and idle CPU stays low."""

GROWTH, MOST_POLL_S = 0.05, 0.5
"""What has taken long already is looked at less often: the interval grows to this part of the time, up to a limit."""


class DeadlineError(RecoverableError):
    """What was waited for did not come true in time; the message names it and the last value seen."""


def wait_for(predicate: Callable[[], T], deadline_s: float, what: str, interval_s: float = POLL_S) -> T:
    """Call ``predicate`` until it returns something true, and return that.

    A RecoverableError that it raises counts as "not yet" and is shown if time runs out; any other error ends the
    wait. Raises DeadlineError after ``deadline_s`` seconds, with ``what`` and the last value or error.
    """
    began = time.monotonic()
    end = began + deadline_s
    while True:
        try:
            seen: object = predicate()
            if seen:
                return seen  # type: ignore[return-value]
        except RecoverableError as error:
            seen = error
        if time.monotonic() >= end:
            raise DeadlineError(f"{what}: not within {deadline_s:g} s; last seen: {seen!r}")
        time.sleep(max(interval_s, min(MOST_POLL_S, GROWTH * (time.monotonic() - began))))
