"""Leader election over a ``coordination.k8s.io/v1`` Lease, by the rules of client-go.

No two clocks are compared. Another's lease has expired if it has not changed for its duration since this process saw
its last change. Our own is lost if no renewal that began within the last ``renew_deadline_s`` succeeded. Others see a
renewal after it began, so with a deadline shorter than the duration this process stops before another takes over. The
times in the Lease are for people.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from driver.clock import Clock, micro_time
from driver.errors import CONFLICT, NOT_FOUND, ApiError, UsageError, accepted_status
from driver.kube.client import KubeClient, Object
from driver.kube.types import ObjectMeta

log = logging.getLogger(__name__)

CANDIDATE_JITTER = 1.2
"""Candidates wait up to this many retry periods longer than one, so that they do not ask in step."""

NEVER = float("-inf")

Lead = Callable[[threading.Event], None]
"""The leader's work until its argument is set: leadership was lost, or the process is to stop."""


@dataclass(frozen=True)
class Timing:
    """Seconds. ``lease_s``: how long others wait after the last renewal they saw; ``renew_deadline_s``: when the
    leader gives up; ``retry_s``: between tries. Raises UsageError if the leader would not stop in time.

    Shorter than usual (15, 10, 2): a claim for which nothing is offered waits for the next leader, and a change of
    leaders disturbs nothing else.
    """

    lease_s: int = 7
    renew_deadline_s: float = 5.0
    retry_s: float = 1.5

    def __post_init__(self) -> None:
        if not self.lease_s > self.renew_deadline_s > self.retry_s * CANDIDATE_JITTER > 0:
            raise UsageError(f"{self}: lease_s > renew_deadline_s > {CANDIDATE_JITTER} x retry_s > 0 is needed")


class LeaseMetadata(ObjectMeta, frozen=True, rename="camel"):
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)


class LeaseSpec(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(msgspec.Struct, frozen=True):
    metadata: LeaseMetadata
    spec: LeaseSpec = LeaseSpec()


def leases(namespace: str) -> str:
    """The path of a namespace's Leases."""
    return f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"


def lease_object(namespace: str, name: str, spec: LeaseSpec, version: str = "") -> Object:
    """A Lease to be written; with ``version`` only over that very one."""
    metadata = {"name": name, "namespace": namespace, **({"resourceVersion": version} if version else {})}
    body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
    return {**body, "spec": msgspec.to_builtins(spec)}


class LeaderElector:
    """A candidate for the Lease ``namespace/name``; ``identity`` is unique to this process, restarts included."""

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        name: str,
        identity: str,
        timing: Timing | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.identity = identity
        self._client = client
        self._namespace, self._name = namespace, name
        self._path = f"{leases(namespace)}/{name}"
        self._timing = timing or Timing()
        self._clock = clock or Clock()
        self._lease: Lease | None = None
        self._changed_at = 0.0
        self._renewed_at = NEVER

    def run(self, stop: threading.Event, lead: Lead) -> None:
        """Be a candidate until ``stop`` is set, and call ``lead`` whenever elected, in a thread of its own.

        The argument of ``lead`` is set when leadership is lost or ``stop`` is set. The Lease is released, so that
        another need not wait, only after ``lead`` has returned. Exceptions of ``lead`` are raised here.
        """
        while not stop.is_set():
            if self._try():
                log.info("elected leader", extra={"lease": self._name, "identity": self.identity})
                self._hold(stop, lead)
                self._clock.wait(stop, self._timing.retry_s)
            else:
                jitter = CANDIDATE_JITTER * random.random()  # noqa: S311 - spreads load, guards nothing
                self._clock.wait(stop, self._timing.retry_s * (1 + jitter))

    def leading(self) -> bool:
        """Whether no other process can have taken over by now."""
        return self._is_ours() and self._seconds_left() > 0

    def attempt(self) -> bool:
        """Try once to get or to keep the Lease; returns whether that succeeded. Raises ApiError."""
        began = self._clock.monotonic()
        if not self._is_ours():
            self._read()
        if self._is_anothers():
            return False
        with accepted_status(NOT_FOUND, CONFLICT):
            self._write(began)
            return True
        self._read()  # another process was faster: the next attempt decides from the present state
        return False

    def _try(self) -> bool:
        try:
            return self.attempt()
        except ApiError as error:
            log.warning("the Lease can't be had", extra={"lease": self._name, "error": str(error)})
            return False

    # While this process leads

    def _hold(self, stop: threading.Event, lead: Lead) -> None:
        """Lead until leadership is lost, ``stop`` is set or ``lead`` returns."""
        lost = threading.Event()
        with ThreadPoolExecutor(2, thread_name_prefix="leader") as pool:
            leading, renewing = pool.submit(lead, lost), pool.submit(self._renew, lost)
            self._guard(stop, lost, leading)
            lost.set()
        if self._is_ours():
            self._release()
        for ended in (leading, renewing):
            ended.result()

    def _guard(self, stop: threading.Event, lost: threading.Event, leading: Future[None]) -> None:
        """Return when leading has to end. Not part of ``_renew``, since a request may hang beyond the deadline."""
        while not (stop.is_set() or lost.is_set() or leading.done()):
            if self._seconds_left() <= 0:
                log.error("leadership lost: not renewed in time", extra={"lease": self._name})
                return
            self._clock.wait(stop, min(self._seconds_left(), self._timing.retry_s))

    def _renew(self, lost: threading.Event) -> None:
        while not self._clock.wait(lost, self._timing.retry_s):
            if not self._try() and self._is_anothers():
                log.error("leadership lost: another took the Lease", extra={"lease": self._name})
                lost.set()

    def _release(self) -> None:
        """Clear the holder, so that the next one may take over at once."""
        now = micro_time(self._clock.now())
        transitions = None if self._lease is None else self._lease.spec.lease_transitions
        try:
            self._put(LeaseSpec(None, 1, now, now, transitions))
        except ApiError as error:
            log.warning("the Lease can't be given up", extra={"lease": self._name, "error": str(error)})
        self._renewed_at = NEVER

    # The Lease

    def _seconds_left(self) -> float:
        return self._renewed_at + self._timing.renew_deadline_s - self._clock.monotonic()

    def _is_ours(self) -> bool:
        return self._lease is not None and self._lease.spec.holder_identity == self.identity

    def _is_anothers(self) -> bool:
        """Whether another process has it, by the last change that this one saw and by its own clock."""
        if self._lease is None or not self._lease.spec.holder_identity or self._is_ours():
            return False
        return self._clock.monotonic() < self._changed_at + (self._lease.spec.lease_duration_seconds or 0)

    def _read(self) -> None:
        stored = self._client.find(self._path)
        lease = None if stored is None else self._parsed(stored)
        if lease is not None and (self._lease is None or lease.spec != self._lease.spec):
            self._changed_at = self._clock.monotonic()
        self._lease = lease

    def _write(self, began: float) -> None:
        """Acquire or renew it, on top of its last known version: another write since then wins (status 409)."""
        now, before = micro_time(self._clock.now()), LeaseSpec() if self._lease is None else self._lease.spec
        acquired, transitions = before.acquire_time, before.lease_transitions or 0
        if not self._is_ours():
            acquired, transitions = now, transitions + (self._lease is not None)
        self._put(LeaseSpec(self.identity, self._timing.lease_s, acquired, now, transitions))
        self._renewed_at = began

    def _put(self, spec: LeaseSpec) -> None:
        if self._lease is None:
            body = lease_object(self._namespace, self._name, spec)
            stored = self._client.create(leases(self._namespace), body)
        else:
            body = lease_object(self._namespace, self._name, spec, self._lease.metadata.resource_version)
            stored = self._client.replace(self._path, body)
        self._lease = self._parsed(stored)
        self._changed_at = self._clock.monotonic()

    def _parsed(self, stored: Object) -> Lease:
        try:
            return msgspec.convert(stored, Lease)
        except msgspec.MsgspecError as error:
            raise ApiError(f"{self._path}: the answer is no Lease: {error}") from error
