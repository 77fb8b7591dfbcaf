"""Keeps ``status.devices`` of the node's prepared claims as it should be, after the answer to the kubelet."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from driver.errors import CONFLICT, NOT_FOUND, ApiError, RecoverableError
from driver.kube.backoff import Backoff
from driver.kube.clock import seconds_time
from driver.kube.loop import GiveWay, Loop, at_once
from driver.kube.transport import KubeClient
from kubelet_plugin.claim_status import (
    DeviceStatus,
    Object,
    Statuses,
    apply_body,
    says,
    status_path,
    unchanged_since,
)
from kubelet_plugin.claims import ClaimReference
from kubelet_plugin.steps import Step, Steps

log = logging.getLogger(__name__)

COALESCE_S = 0.25
"""How long to gather changes: a share that comes or goes is news for every claim on its GPU."""

FORBIDDEN_AGAIN_S = (5.0, 300.0)
"""Until the second try where RBAC forbids it, and at most between two: an API server that has just started forbids
much for a moment; later somebody has to change a role first."""

FORBIDDEN, INVALID = 403, 422

DRIVER_PERMISSION = "resourceclaims/driver"
"""Missing, it is a 422 whose message names it (Kubernetes 1.36 and newer), where another permission is a 403."""

BYTES_DIFFER = "field cannot be modified once set"
WHY_BYTES = (
    "its opaque parameters were sent as JSON with blanks or in another order than kubectl writes it, and the API "
    "server (seen on 1.37.1) takes its own rewriting of them for a change of the allocation"
)

ROLE = (
    "resourceclaims/status: patch; from Kubernetes 1.36 also resourceclaims/driver: associated-node:patch for "
    "resourceNames [%s], with a token that names the node (a pod's own does)"
)


@dataclass
class Known:
    """A claim's state with us: since when each device is as it is, what it says already, and whether it is over: not
    ours to write any more."""

    since: dict[str, str] = field(default_factory=dict)
    said: Sequence[DeviceStatus] | None = None
    over: bool = False

    def turned(self, devices: Sequence[DeviceStatus], now: str) -> None:
        """Note the time for devices that are new, or were ready and are not, or the other way round."""
        before = {each.device: each.ready for each in self.said or ()}
        for each in devices:
            if each.device not in self.since or before.get(each.device, each.ready) is not each.ready:
                self.since[each.device] = now


class StatusWriter:
    """One writer a node. ``desired`` is asked for what every prepared claim should say; ``notify`` when that changed.

    An unprepared claim keeps its last status: it is deallocated next, and the API server drops the entries then.
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
        self._known: dict[ClaimReference, Known] = {}
        # Prepared before this process: their status may be written already, with a time to keep.
        self._inherited: set[ClaimReference] | None = None
        self._forbidden: Backoff | None = None
        self._loop = Loop("writing claim status", self._write_changes, COALESCE_S, self._patience, give_way)

    def notify(self) -> None:
        """Write soon what changed; cheap, from any thread."""
        self._loop.notify()

    def run(self, stop: threading.Event) -> None:
        """Write at the start and at every notification, until ``stop`` is set (then call ``notify`` once more)."""
        self.notify()
        self._loop.run(stop)

    def _patience(self, error: RecoverableError) -> float | None:
        """Where RBAC forbids it somebody has to change a role first: said once."""
        if not isinstance(error, ApiError) or error.status != FORBIDDEN:
            return None
        if self._forbidden is None:
            log.error("claim status may not be written", extra={"error": str(error), "role": ROLE % self._driver})
            self._forbidden = Backoff(*FORBIDDEN_AGAIN_S)
        return self._forbidden.next_s()

    def _write_changes(self) -> None:
        desired = self._desired()
        if self._inherited is None:
            self._inherited = set(desired)
        for gone in self._known.keys() - desired.keys():
            del self._known[gone]
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
        known = self._known.get(claim) or self._meet(claim, devices)
        self._known[claim] = known
        if not known.over and known.said != devices:
            known.turned(devices, seconds_time(self._now()))
            self._write(claim, devices, known)

    def _meet(self, claim: ClaimReference, devices: Sequence[DeviceStatus]) -> Known:
        if claim not in (self._inherited or ()):
            return Known()
        stored = self._read(claim)
        if stored is None:
            return Known(over=True)
        known = Known(unchanged_since(stored, self._driver, devices))
        if known.since.keys() >= {each.device for each in devices}:
            known.said = devices if says(stored, apply_body(claim, self._driver, devices, known.since)) else None
        return known

    def _read(self, claim: ClaimReference) -> Object | None:
        """The claim as the API server has it; None where it is gone, or another of its name."""
        try:
            found = msgspec.json.decode(self._client.get(status_path(claim).removesuffix("/status")), type=Object)
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise
        except msgspec.MsgspecError as error:
            raise ApiError(f"ResourceClaim {claim}: the API server's answer does not parse: {error}") from error
        return found if found["metadata"]["uid"] == claim.uid else None

    def _write(self, claim: ClaimReference, devices: Sequence[DeviceStatus], known: Known) -> None:
        body = apply_body(claim, self._driver, devices, known.since)
        try:
            with self._step(Step.WRITE_STATUS, claim=str(claim)):
                self._client.apply(status_path(claim), body, self._driver)
        except ApiError as error:
            if not self._is_over(claim, error):
                raise
            known.over = True
        known.said = devices

    def _is_over(self, claim: ClaimReference, error: ApiError) -> bool:
        """Whether the refusal means that the claim is gone, another, or no longer allocated."""
        if error.status == INVALID and DRIVER_PERMISSION in str(error):
            raise ApiError(str(error), FORBIDDEN) from error
        if error.status == INVALID and BYTES_DIFFER in str(error):
            log.error(
                "the API server lets nobody write this claim's status", extra={"claim": str(claim), "why": WHY_BYTES}
            )
            return True
        if error.status not in (NOT_FOUND, CONFLICT, INVALID):
            return False
        stored = self._read(claim) if error.status != NOT_FOUND else None
        return stored is None or not (stored.get("status") or {}).get("allocation")
