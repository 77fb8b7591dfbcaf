"""Asking GPUs without waiting for ever for one that hangs: NVML has no time-outs of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from driver.errors import HardwareError

T = TypeVar("T")


class Patient:
    """Runs each question in a thread of its own. For one caller; a question that hangs is left behind, and not asked
    again before it has come back.

    The thread ends with the answer: a process that ends waits for those that hang, and for no others.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._hung: dict[object, Future[Any]] = {}

    def ask(self, key: object, question: Callable[[], T]) -> T:
        """The answer, or what ``question`` raises. Raises HardwareError where none came in time, or none has come to
        an earlier question about ``key``."""
        earlier = self._hung.get(key)
        if earlier is not None and not earlier.done():
            raise HardwareError(f"it has not answered for more than {self._timeout_s:g} s")
        asked: Future[T] = Future()
        threading.Thread(target=_answer, args=(asked, question), name="nvml", daemon=False).start()
        try:
            answer = asked.result(self._timeout_s)
        except TimeoutError:
            self._hung[key] = asked
            raise HardwareError(f"it did not answer within {self._timeout_s:g} s") from None
        self._hung.pop(key, None)
        return answer


def _answer(asked: Future[T], question: Callable[[], T]) -> None:
    try:
        asked.set_result(question())
    except BaseException as error:  # noqa: BLE001 - whoever asked is to raise it
        asked.set_exception(error)
