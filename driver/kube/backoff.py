"""How long to wait before trying again."""

from __future__ import annotations

import random
from collections.abc import Callable


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
