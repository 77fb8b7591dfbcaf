"""The named steps of the node plugin's work: starting, preparing, unpreparing, publishing.

Each step can be repeated after a kill at any instruction. Tests observe, fail or kill at them through an injected
observer; operators see them in the log and in metrics.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from driver.steps import StepObserver, unobserved

log = logging.getLogger(__name__)


class Step(StrEnum):
    """In order: start of a process, prepare, unprepare, and reports after the answer."""

    LOAD_CHECKPOINT = "load-checkpoint"
    DISCOVER = "discover"
    TIDY_CDI_SPECS = "tidy-cdi-specs"
    RECOVER_RECORD = "recover-record"
    LISTEN = "listen"
    OFFER_REGISTRATION = "offer-registration"

    READ_CLAIM = "read-claim"
    RESOLVE_ALLOCATION = "resolve-allocation"
    RESERVE_CDI_SPEC = "reserve-cdi-spec"
    CHECK_FREE = "check-free"
    WRITE_INTENT = "write-intent"
    SET_MIG_MODE = "set-mig-mode"
    CREATE_GPU_INSTANCE = "create-gpu-instance"
    CREATE_COMPUTE_INSTANCE = "create-compute-instance"
    SET_TIME_SLICE = "set-time-slice"
    WRITE_CDI_SPEC = "write-cdi-spec"
    WRITE_PREPARED = "write-prepared"

    MARK_RELEASING = "mark-releasing"
    REMOVE_CDI_SPEC = "remove-cdi-spec"
    RESTORE_TIME_SLICE = "restore-time-slice"
    DESTROY_COMPUTE_INSTANCE = "destroy-compute-instance"
    DESTROY_GPU_INSTANCE = "destroy-gpu-instance"
    REMOVE_RECORD = "remove-record"

    WRITE_SLICE = "write-slice"
    DELETE_SLICE = "delete-slice"
    WRITE_STATUS = "write-status"


Observer = StepObserver[Step]


class Steps:
    """Runs steps: notifies the observer before and after each, logs its duration and passes it to ``took``.

    A failed step has neither an after nor a duration.
    """

    def __init__(self, observer: Observer = unobserved, took: Callable[[Step, float], None] = lambda *_: None) -> None:
        self._observer = observer
        self._took = took

    @contextmanager
    def __call__(self, step: Step, **context: object) -> Iterator[None]:
        self._observer(step, "before")
        started = time.perf_counter()
        yield
        elapsed = time.perf_counter() - started
        self._took(step, elapsed)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("step done", extra={"step": step.value, "ms": f"{elapsed * 1000:.2f}", **context})
        self._observer(step, "after")
