"""Writes ``status.devices`` of the node's prepared claims, after the answer to the kubelet."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from driver.errors import CONFLICT, NOT_FOUND, ApiError, RecoverableError
from driver.kube.client import KubeClient
from driver.kube.clock import seconds_time
from driver.kube.decoding import decode
from driver.kube.work_loop import Backoff, GiveWay, Loop, at_once
from kubelet_plugin.claims.steps import Step, Steps
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.status.claim_status import (
    STORED,
    DeviceStatus,
    Statuses,
    StoredClaim,
    apply_body,
    contains,
    status_path,
    unchanged_since,
)

log = logging.getLogger(__name__)

COALESCE_S = 0.25
"""Time to collect changes: a share that is prepared or released changes the status of every claim on its GPU."""

FORBIDDEN_RETRY_SECONDS = (5.0, 300.0)
"""First and longest retry delay if RBAC forbids the write: an API server that has just started may forbid it briefly;
afterwards an operator has to change a role."""

FORBIDDEN, INVALID = 403, 422

DRIVER_PERMISSION = "resourceclaims/driver"
"""If it is missing, the answer is 422 with this text (Kubernetes 1.36 and newer), not 403 as for other permissions."""

BYTES_DIFFER = "field cannot be modified once set"
WHY_BYTES = (
    "its opaque parameters are JSON with blanks or with keys in another order than kubectl writes, and the API "
    "server (seen on 1.37.1) takes its own reformatting of them for a change of the allocation"
)

ROLE = (
    "resourceclaims/status: patch; from Kubernetes 1.36 also resourceclaims/driver: associated-node:patch for "
    "resourceNames [%s], with a token that names the node (a pod's own does)"
)


@dataclass
class ClaimWriteState:
    """What is written for a claim: transition times by device, the last status, and whether the claim is over, so that
    it must not be written any more."""

    since: dict[str, str] = field(default_factory=dict)
    written: Sequence[DeviceStatus] | None = None
    over: bool = False

    def note_transitions(self, devices: Sequence[DeviceStatus], now: str) -> None:
        """Set the transition time of devices that are new or whose readiness has changed."""
        before = {each.device: each.ready for each in self.written or ()}
        for each in devices:
            if each.device not in self.since or before.get(each.device, each.ready) is not each.ready:
                self.since[each.device] = now


class StatusWriter:
    """One writer per node. ``desired`` returns the status of every prepared claim; call ``notify`` when it has changed.

    An unprepared claim keeps its last status: it is deallocated next, and the API server then removes the entries.
    """

    def __init__(
        self,
        client: KubeClient,
        driver: str,
        desired: Callable[[], Statuses],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        steps: Steps | None = None,
        give_way: GiveWay = at_once,
    ) -> None:
        self._client = client
        self._driver = driver
        self._desired = desired
        self._now = now
        self._step = steps or Steps()
        self._states: dict[ClaimReference, ClaimWriteState] = {}
        # Prepared before this process: their status may be written already, with transition times to keep.
        self._inherited: set[ClaimReference] | None = None
        self._forbidden: Backoff | None = None
        self._loop = Loop("writing claim status", self._write_changes, COALESCE_S, self._retry_delay, give_way)

    def notify(self) -> None:
        """Write changes soon. Cheap; may be called from any thread."""
        self._loop.notify()

    def run(self, stop: threading.Event) -> None:
        """Write at the start and at every notification until ``stop`` is set (then call ``notify`` once more)."""
        self.notify()
        self._loop.run(stop)

    def _retry_delay(self, error: RecoverableError) -> float | None:
        """The retry delay of ``error``. A missing permission is logged once."""
        if not isinstance(error, ApiError) or error.status != FORBIDDEN:
            return None
        if self._forbidden is None:
            log.error("not permitted to write claim status", extra={"error": str(error), "role": ROLE % self._driver})
            self._forbidden = Backoff(*FORBIDDEN_RETRY_SECONDS)
        return self._forbidden.next_s()

    def _write_changes(self) -> None:
        desired = self._desired()
        if self._inherited is None:
            self._inherited = set(desired)
        for gone in self._states.keys() - desired.keys():
            del self._states[gone]
        failure: ApiError | None = None
        for claim, devices in desired.items():
            try:
                self._bring_up_to_date(claim, devices)
            except ApiError as error:
                if error.status is None:
                    raise
                failure = failure or error
        if failure is not None:
            raise failure
        self._forbidden = None

    def _bring_up_to_date(self, claim: ClaimReference, devices: Sequence[DeviceStatus]) -> None:
        state = self._states.get(claim) or self._load_state(claim, devices)
        self._states[claim] = state
        if not state.over and state.written != devices:
            state.note_transitions(devices, seconds_time(self._now()))
            self._write(claim, devices, state)

    def _load_state(self, claim: ClaimReference, devices: Sequence[DeviceStatus]) -> ClaimWriteState:
        if claim not in (self._inherited or ()):
            return ClaimWriteState()
        stored = self._read(claim)
        if stored is None:
            return ClaimWriteState(over=True)
        entries = stored.entries(self._driver)
        state = ClaimWriteState(unchanged_since(entries, devices))
        if state.since.keys() >= {each.device for each in devices}:
            state.written = (
                devices if contains(entries, apply_body(claim, self._driver, devices, state.since)) else None
            )
        return state

    def _read(self, claim: ClaimReference) -> StoredClaim | None:
        """The claim at the API server; None if it is gone or replaced by another claim of that name."""
        try:
            found = decode(self._client.get(status_path(claim).removesuffix("/status")), STORED)
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise
        except msgspec.MsgspecError as error:
            raise ApiError(f"ResourceClaim {claim}: the API server's answer does not parse: {error}") from error
        return found if found.metadata.uid == claim.uid else None

    def _write(self, claim: ClaimReference, devices: Sequence[DeviceStatus], state: ClaimWriteState) -> None:
        body = apply_body(claim, self._driver, devices, state.since)
        try:
            with self._step(Step.WRITE_STATUS, claim=str(claim)):
                self._client.apply(status_path(claim), body, self._driver)
        except ApiError as error:
            if not self._is_over(claim, error):
                raise
            state.over = True
        state.written = devices

    def _is_over(self, claim: ClaimReference, error: ApiError) -> bool:
        """Whether the error means that the claim is gone, replaced, or no longer allocated."""
        if error.status == INVALID and DRIVER_PERMISSION in str(error):
            raise ApiError(str(error), FORBIDDEN) from error
        if error.status == INVALID and BYTES_DIFFER in str(error):
            log.error(
                "the API server rejects every write of this claim's status",
                extra={"claim": str(claim), "why": WHY_BYTES},
            )
            return True
        if error.status not in (NOT_FOUND, CONFLICT, INVALID):
            return False
        stored = self._read(claim) if error.status != NOT_FOUND else None
        return stored is None or not stored.allocated
