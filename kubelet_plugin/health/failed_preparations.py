"""The claims with devices of the node that could not be prepared, or not be released: for how long, and why."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pynvml

from driver.clock import written_time
from driver.errors import HardwareError, StateError, TesseraError
from driver.model.plan import MOST_UNPREPARED, FailureCause, UnpreparedClaim
from kubelet_plugin.changes import ChangeNotifier, NodeChange
from kubelet_plugin.checkpoint.gpu_and_claim_locks import LockTimeoutError
from kubelet_plugin.inventory.inventory import ClaimReference

PREPARE, UNPREPARE = VERBS = "prepare", "unprepare"
"""What the kubelet asks for; a release that failed is repeated by the plugin itself, too."""

MOST_CHARACTERS = 300
"""Most characters of the message of a claim."""

FORGOTTEN_AFTER_SECONDS = 300.0
"""Time after its last attempt when a claim is no longer reported: the kubelet tries again about once a minute."""


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
        self._failed: dict[tuple[str, str], tuple[UnpreparedClaim, float]] = {}
        """By verb and UID, with the time of the last attempt."""

    @contextmanager
    def observe(self, verb: str, claim: ClaimReference) -> Iterator[None]:
        """Record how the prepare or unprepare inside the block ends."""
        try:
            yield
        except Exception as error:
            self._record(verb, claim, error)
            raise
        with self._lock:
            ended = [self._failed.pop((failed, claim.uid), None) for failed in VERBS]
        if any(ended):
            self._changes.report(NodeChange.UNPREPARED)

    def reported(self, verb: str = PREPARE) -> tuple[UnpreparedClaim, ...]:
        """The claims for which ``verb`` fails: first those not at fault themselves, then the oldest failure."""
        with self._lock:
            recent = self._since_start() - FORGOTTEN_AFTER_SECONDS
            self._failed = {key: (failed, at) for key, (failed, at) in self._failed.items() if at >= recent}
            failures = [failed for (failed_verb, _), (failed, _) in self._failed.items() if failed_verb == verb]
        return tuple(sorted(failures, key=lambda failed: failed.cause is FailureCause.OTHER))[:MOST_UNPREPARED]

    def _record(self, verb: str, claim: ClaimReference, error: Exception) -> None:
        cause, message = _cause(error), str(error)[:MOST_CHARACTERS]
        with self._lock:
            before, _ = self._failed.get((verb, claim.uid), (None, 0.0))
            if before is None:
                failed = UnpreparedClaim(str(claim), claim.uid, written_time(int(self._clock())), cause, message)
            else:
                failed = msgspec.structs.replace(before, cause=cause, message=message)
            self._failed[verb, claim.uid] = failed, self._since_start()
        if before is None or before.cause is not cause:
            self._changes.report(NodeChange.UNPREPARED)


def _cause(error: Exception) -> FailureCause:
    if isinstance(error, HardwareError | LockTimeoutError):
        no_right = isinstance(error, HardwareError) and error.code == pynvml.NVML_ERROR_NO_PERMISSION
        return FailureCause.NODE if no_right else FailureCause.GPU
    if isinstance(error, StateError) or not isinstance(error, TesseraError):
        return FailureCause.NODE
    return FailureCause.OTHER
