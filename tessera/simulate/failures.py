"""Errors of the allocator that are not "it does not fit"."""

from __future__ import annotations

from enum import StrEnum

from driver.errors import RecoverableError


class Failure(StrEnum):
    """Why there is no answer. All but ``INVALID_POOLS`` stop the scheduling of the pod, on all nodes."""

    SELECTOR = "selector"
    TOO_MANY_DEVICES = "too many devices"
    INCOMPLETE_POOL = "incomplete pool"
    INVALID_POOL = "invalid pool"
    INVALID_POOLS = "invalid pools"
    CONSTRAINT = "constraint"
    CAPACITY = "capacity"
    NODE_SELECTOR = "node selector"
    UNKNOWN_KIND = "unknown kind"
    TOO_LONG = "too long"


class AllocationError(RecoverableError):
    """The scheduler fails at these claims; another node helps only for ``INVALID_POOLS``."""

    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure = failure
