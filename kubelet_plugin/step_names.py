"""The named steps of the node plugin's work: starting, preparing, unpreparing, publishing.

Each step can be repeated after a kill at any instruction. Tests observe, fail or kill at them through an injected
observer; operators see them in the log and in metrics.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum

from driver.step_observer import StepObserver, unobserved

log = logging.getLogger(__name__)


class NodeStep(StrEnum):
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
    SET_MEMORY_LIMIT = "set-memory-limit"  # by cgroup, or by MPS with its compute mode and daemon
    WRITE_CDI_SPEC = "write-cdi-spec"
    WRITE_PREPARED = "write-prepared"

    MARK_RELEASING = "mark-releasing"
    REMOVE_CDI_SPEC = "remove-cdi-spec"
    RESTORE_TIME_SLICE = "restore-time-slice"
    LIFT_MEMORY_LIMIT = "lift-memory-limit"
    DESTROY_COMPUTE_INSTANCE = "destroy-compute-instance"
    DESTROY_GPU_INSTANCE = "destroy-gpu-instance"
    REMOVE_RECORD = "remove-record"

    WRITE_SLICE = "write-slice"
    DELETE_SLICE = "delete-slice"
    WRITE_STATUS = "write-status"


Observer = StepObserver[NodeStep]

Took = Callable[[NodeStep, float], None]
"""Receives a step that has ended and its duration in seconds."""

UNOBSERVED = nullcontext[None]()


class StepRunner:
    """Runs steps: notifies the observer before and after each, logs its duration and passes it to ``took``.

    A failed step has neither an after nor a duration.
    """

    def __init__(self, observer: Observer = unobserved, took: Took | None = None) -> None:
        self._observer = None if observer is unobserved else observer
        self._took = took

    def __call__(self, step: NodeStep, **context: object) -> AbstractContextManager[None]:
        if self._observer is None and self._took is None and not log.isEnabledFor(logging.DEBUG):
            return UNOBSERVED
        return self._observed(step, context)

    @contextmanager
    def _observed(self, step: NodeStep, context: dict[str, object]) -> Iterator[None]:
        if self._observer is not None:
            self._observer(step, "before")
        started = time.perf_counter()
        yield
        elapsed = time.perf_counter() - started
        if self._took is not None:
            self._took(step, elapsed)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("step done", extra={"step": step.value, "ms": f"{elapsed * 1000:.2f}", **context})
        if self._observer is not None:
            self._observer(step, "after")
