"""Asking GPUs without waiting for ever for one that hangs: NVML has no time-outs of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from driver.errors import HardwareError

T = TypeVar("T")

MOST_HUNG = 64
"""Threads that may hang at once: one a GPU."""


class Patient:
    """Runs questions in threads of its own. For one caller; a question that hangs is left behind, and not asked again
    before it has come back."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(MOST_HUNG, thread_name_prefix="nvml")
        self._hung: dict[object, Future[Any]] = {}

    def ask(self, key: object, question: Callable[[], T]) -> T:
        """The answer, or what ``question`` raises. Raises HardwareError where none came in time, or none has come to
        an earlier question about ``key``."""
        earlier = self._hung.get(key)
        if earlier is not None and not earlier.done():
            raise HardwareError(f"it has not answered for more than {self._timeout_s:g} s")
        asked = self._pool.submit(question)
        try:
            answer = asked.result(self._timeout_s)
        except TimeoutError:
            self._hung[key] = asked
            raise HardwareError(f"it did not answer within {self._timeout_s:g} s") from None
        self._hung.pop(key, None)
        return answer

    def close(self) -> None:
        """Ask nothing any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
