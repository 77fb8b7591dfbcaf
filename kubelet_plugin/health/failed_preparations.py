"""The claims with devices of the node that could not be prepared, or not be released: for how long, and why."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
import pynvml

from driver.clock import written_time
from driver.errors import HardwareError, StateError, TesseraError
from driver.model.plan import MOST_UNPREPARED, FailedClaim, FailureCause
from kubelet_plugin.changes import ChangeNotifier, NodeChange
from kubelet_plugin.checkpoint.gpu_and_claim_locks import LockTimeoutError
from kubelet_plugin.inventory.inventory import ClaimReference

PREPARE, UNPREPARE = VERBS = "prepare", "unprepare"
"""What the kubelet asks for; a release that failed is repeated by the plugin itself, too."""

MOST_CHARACTERS = 300
"""Most characters of the message of a claim."""

RELEASE_GRACE_SECONDS = 5.0
"""Time for which a release must fail until it is reported: a process that still ends keeps its GPU for a moment, and
the plugin tries again after 10 s. A failed preparation is reported at once: its pod waits for the kubelet's retry."""

FORGOTTEN_AFTER_SECONDS = 300.0
"""Time after its last attempt when a claim is no longer reported: the kubelet tries again about once a minute."""


class Failure(NamedTuple):
    """What is reported of a claim, and the times of its first and last failed attempt."""

    claim: FailedClaim
    first_at: float
    last_at: float

    def is_reported(self, verb: str) -> bool:
        return verb != UNPREPARE or self.last_at - self.first_at >= RELEASE_GRACE_SECONDS


class FailedPreparations:
    """Thread-safe. Reports a change when a claim fails for the first time, fails for another cause, or succeeds."""

    def __init__(
        self,
        changes: ChangeNotifier,
        clock: Callable[[], float] = time.time,
        since_start: Callable[[], float] = time.monotonic,
    ) -> None:
        self._changes, self._clock, self._since_start = changes, clock, since_start
        self._lock = threading.Lock()
        self._failed: dict[tuple[str, str], Failure] = {}
        """By verb and UID."""

    @contextmanager
    def observe(self, verb: str, claim: ClaimReference) -> Iterator[None]:
        """Record how the prepare or unprepare inside the block ends."""
        try:
            yield
        except Exception as error:
            self._record(verb, claim, error)
            raise
        with self._lock:
            ended = {verb: self._failed.pop((verb, claim.uid), None) for verb in VERBS}
        if any(failure is not None and failure.is_reported(verb) for verb, failure in ended.items()):
            self._changes.report(NodeChange.UNPREPARED)

    def reported(self, verb: str = PREPARE) -> tuple[FailedClaim, ...]:
        """The claims for which ``verb`` fails: first those not at fault themselves, then the oldest failure."""
        with self._lock:
            recent = self._since_start() - FORGOTTEN_AFTER_SECONDS
            self._failed = {key: failure for key, failure in self._failed.items() if failure.last_at >= recent}
            of_verb = (failure for (failed_verb, _), failure in self._failed.items() if failed_verb == verb)
            failures = [failure.claim for failure in of_verb if failure.is_reported(verb)]
        return tuple(sorted(failures, key=lambda failed: failed.cause is FailureCause.OTHER))[:MOST_UNPREPARED]

    def _record(self, verb: str, claim: ClaimReference, error: Exception) -> None:
        cause, message, now = _cause(error), str(error)[:MOST_CHARACTERS], self._since_start()
        with self._lock:
            before = self._failed.get((verb, claim.uid))
            if before is None:
                failed = FailedClaim(str(claim), claim.uid, written_time(int(self._clock())), cause, message)
            else:
                failed = msgspec.structs.replace(before.claim, cause=cause, message=message)
            failure = Failure(failed, now if before is None else before.first_at, now)
            self._failed[verb, claim.uid] = failure
        was_reported = before is not None and before.is_reported(verb) and before.claim.cause is cause
        if failure.is_reported(verb) and not was_reported:
            self._changes.report(NodeChange.UNPREPARED)


def _cause(error: Exception) -> FailureCause:
    if isinstance(error, HardwareError | LockTimeoutError):
        no_right = isinstance(error, HardwareError) and error.code == pynvml.NVML_ERROR_NO_PERMISSION
        return FailureCause.NODE if no_right else FailureCause.GPU
    if isinstance(error, StateError) or not isinstance(error, TesseraError):
        return FailureCause.NODE
    return FailureCause.OTHER
