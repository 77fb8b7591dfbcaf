"""Named steps of work that may be killed between any two instructions, and their observers.

Tests observe, delay, fail or kill at steps through an injected observer. Each process names its own steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Literal, TypeVar

S = TypeVar("S", bound=StrEnum)

Moment = Literal["before", "after"]
StepObserver = Callable[[S, Moment], None]


def unobserved(step: StrEnum, moment: Moment) -> None:
    """The observer of production: does nothing."""


@contextmanager
def observed(observer: StepObserver[S], step: S) -> Iterator[None]:
    """Report ``step`` to ``observer`` before and after; a failed step has no "after"."""
    observer(step, "before")
    yield
    observer(step, "after")
