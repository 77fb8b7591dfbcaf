"""Waiting for what others do."""

from __future__ import annotations

import time
from collections.abc import Callable


def within(seconds: float, true: Callable[[], object], look_s: float) -> bool:
    """Whether it becomes true in time, looked at every ``look_s`` seconds."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() >= end:
            return False
        time.sleep(look_s)
    return True
