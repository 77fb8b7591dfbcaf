"""The steps of preparing, by name.

Each can be repeated after the process was killed at any instruction. Tests observe, fail or kill at them
through an injected observer; operators see them in the log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Literal

log = logging.getLogger(__name__)


class Step(StrEnum):
    """In the order in which a claim goes through them; the second group undoes the first."""

    READ_CLAIM = "read-claim"
    RESOLVE_ALLOCATION = "resolve-allocation"
    CHECK_FREE = "check-free"
    WRITE_INTENT = "write-intent"
    SET_MIG_MODE = "set-mig-mode"
    CREATE_GPU_INSTANCE = "create-gpu-instance"
    CREATE_COMPUTE_INSTANCE = "create-compute-instance"
    WRITE_CDI_SPEC = "write-cdi-spec"
    WRITE_PREPARED = "write-prepared"

    REMOVE_CDI_SPEC = "remove-cdi-spec"
    DESTROY_COMPUTE_INSTANCE = "destroy-compute-instance"
    DESTROY_GPU_INSTANCE = "destroy-gpu-instance"
    REMOVE_RECORD = "remove-record"


Moment = Literal["before", "after"]
Observer = Callable[[Step, Moment], None]


def unobserved(step: Step, moment: Moment) -> None:
    """The observer of production: does nothing."""


class Steps:
    """Runs steps: tells the observer, and logs how long each took."""

    def __init__(self, observer: Observer = unobserved) -> None:
        self._observer = observer

    @contextmanager
    def __call__(self, step: Step, **context: object) -> Iterator[None]:
        self._observer(step, "before")
        started = time.perf_counter()
        yield
        if log.isEnabledFor(logging.DEBUG):
            elapsed = (time.perf_counter() - started) * 1000
            log.debug("step done", extra={"step": step.value, "ms": f"{elapsed:.2f}", **context})
        self._observer(step, "after")
