"""What the parts of the node plugin report to metrics, and the kinds of failures.

``Measurements`` does nothing: it is used where metrics are not asked for, because the Prometheus library needs a
megabyte.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from driver.errors import ApiError, ClaimError, HardwareError, StateError, TesseraError
from driver.http import Page
from driver.kube.types import Claim
from kubelet_plugin.checkpoint.gpu_and_claim_locks import LockTimeoutError
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.step_names import NodeStep

FAILURES = ((ClaimError, "claim"), (HardwareError, "hardware"), (ApiError, "api"), (StateError, "state"))
LOCK_FAILURE, OTHER_FAILURE, DEFECT = "lock", "other", "defect"


def failure_kind(error: Exception) -> str:
    """The kind of failure of a prepare or unprepare."""
    if isinstance(error, LockTimeoutError):
        return LOCK_FAILURE
    if not isinstance(error, TesseraError):
        return DEFECT
    return next((kind for type_, kind in FAILURES if isinstance(error, type_)), OTHER_FAILURE)


class Measurements:
    """The interface; ``Metrics`` implements it. No method blocks."""

    def observe_request(
        self, method: str, path: str, query: Mapping[str, str] | None, status: int | None, seconds: float
    ) -> None:
        """Count a request to the API server (``RequestObserver``)."""

    def measure(self, verb: str, claim: ClaimReference) -> AbstractContextManager[None]:
        """Measure a prepare or unprepare inside the block, and count its failure."""
        return nullcontext()

    def claim_read(self, claim: Claim) -> None:
        """Remember when a claim was created, unless the plugin has reported a device of it before."""

    def observe_step(self, step: NodeStep, seconds: float) -> None:
        """A step has taken ``seconds``."""

    def lock_waited(self, seconds: float) -> None:
        """Work on a claim has waited for its locks."""

    def slices_written(self, slices: int, seconds: float) -> None:
        """Count ``slices`` that were written or deleted in ``seconds``."""

    def count_orphan(self, kind: str) -> None:
        """Count an orphan: ``claim``, ``cdi-spec`` or ``record``."""

    def count_event(self, reason: str) -> None:
        """Count the repair or failure that an Event with this reason reports."""

    def set_claims_above_memory(self, claims: int) -> None:
        """So many claims of shared GPUs use more memory than they have."""

    def pages(self) -> Mapping[str, Page]:
        """The HTTP pages to serve, by path."""
        return {}
