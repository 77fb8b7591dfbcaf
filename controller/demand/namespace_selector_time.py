"""The processor time that the selectors of one namespace may take.

A claim has up to 1,024 expressions of 10 KiB, and one evaluation may take a second. Each namespace therefore has a
budget, so that the claims of one tenant can't keep the controller from deciding for the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

BUDGET_SECONDS = 3.0
"""Processor time that a namespace has at once; decisions have to follow each other within 20 s."""

REFILL_PER_SECOND = 0.05
"""The part of a second that comes back to the budget each second."""

RETRY_SECONDS = 60.0
"""Time for which selectors stay refused after the budget was exhausted."""

EXHAUSTED = (
    "the selectors of this namespace take too long to evaluate: Tessera limits the time for them; make them fewer, "
    "shorter or simpler"
)

T = TypeVar("T")


class BudgetExhausted(Exception):
    """No processor time is left in the budget."""


class SelectorTime:
    """The budget of processor time of one namespace; remembered answers cost nothing. For one thread."""

    def __init__(
        self,
        budget: float = BUDGET_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        processor_time: Callable[[], float] = time.thread_time,
    ) -> None:
        """``budget`` in seconds; infinite for DeviceClasses, which administrators write."""
        self._budget, self._clock, self._processor_time = budget, clock, processor_time
        self._left, self._filled_at = budget, clock()
        self._refused_at: float | None = None

    def spend(self, work: Callable[[], T]) -> T:
        """Call ``work`` and subtract its processor time. Raises BudgetExhausted if no time is left to begin."""
        self._refill()
        if self._left <= 0:
            self._refused_at = self._refused_at or self._filled_at
            raise BudgetExhausted
        began = self._processor_time()
        try:
            return work()
        finally:
            self._left -= self._processor_time() - began

    @property
    def full(self) -> bool:
        """Whether none of the budget is missing."""
        self._refill()
        return self._left >= self._budget

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(self._budget, self._left + (now - self._filled_at) * REFILL_PER_SECOND)
        self._filled_at = now

    def retry(self) -> bool:
        """Whether to try refused selectors again now; at most every RETRY_SECONDS."""
        if self._refused_at is None or self._clock() - self._refused_at < RETRY_SECONDS:
            return False
        self._refused_at = None
        return True
