"""Leader election over a ``coordination.k8s.io/v1`` Lease, by the rules of client-go.

No two clocks are compared: another's lease has expired when it has not changed for its duration since *we*
last saw it change, and our own is lost when no renewal of ours that began in the last ``renew_deadline_s``
succeeded. What others see of a renewal they see after we began it, so with a deadline shorter than the
duration we have stopped before anybody takes over. The times in the Lease are for people.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from driver.errors import CONFLICT, NOT_FOUND, ApiError, UsageError
from driver.kube.client import KubeClient, Object
from driver.kube.clock import Clock, micro_time
from driver.kube.types import ObjectMeta

log = logging.getLogger(__name__)

CANDIDATE_JITTER = 1.2
"""Candidates wait up to this many retry periods longer than one, so that they do not ask in step."""

Lead = Callable[[threading.Event], None]
"""What the leader does until the event it is given is set: leadership was lost, or the process is to stop."""


@dataclass(frozen=True)
class Timing:
    """Seconds. ``lease_s``: how long others wait after the last renewal they saw; ``renew_deadline_s``: when the
    leader gives up; ``retry_s``: between tries. Raises UsageError where the leader would not stop in time.

    Shorter than usual (15, 10, 2): a claim for which nothing is offered waits for the next leader, and a change of
    leaders disturbs nobody else.
    """

    lease_s: int = 7
    renew_deadline_s: float = 5.0
    retry_s: float = 1.5

    def __post_init__(self) -> None:
        if not self.lease_s > self.renew_deadline_s > self.retry_s * CANDIDATE_JITTER > 0:
            raise UsageError(f"{self}: lease_s > renew_deadline_s > {CANDIDATE_JITTER} x retry_s > 0 is needed")


class LeaseSpec(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(msgspec.Struct, frozen=True):
    metadata: ObjectMeta
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
    """One candidate for the Lease ``namespace/name``; ``identity`` must be its own alone, restarts included."""

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
        self._timing = timing or Timing()
        self._clock = clock or Clock()
        self._lease: Lease | None = None
        self._seen_at = 0.0
        self._renewed_at = float("-inf")

    def run(self, stop: threading.Event, lead: Lead) -> None:
        """Be a candidate until ``stop`` is set, and call ``lead`` whenever elected, in a thread of its own.

        The event ``lead`` is given is set when leadership is lost or ``stop`` is set; the Lease is given up, so
        that another need not wait, only after ``lead`` has returned. What ``lead`` raises is raised here.
        """
        while self._campaign(stop):
            log.info("elected leader", extra={"lease": self._name, "identity": self.identity})
            self._hold(stop, lead)
            self._clock.wait(stop, self._timing.retry_s)

    def leading(self) -> bool:
        """Whether nobody else can have taken over by now."""
        return self._is_ours() and self._left_s() > 0

    def attempt(self) -> bool:
        """One try to get or to keep the Lease; says whether it succeeded. Raises ApiError."""
        began = self._clock.monotonic()
        if not self._is_ours():
            self._look()
        if self._is_anothers():
            return False
        try:
            self._write(began)
        except ApiError as error:
            if error.status not in (NOT_FOUND, CONFLICT):
                raise
            self._look()  # somebody was faster, changed or deleted it: the next try decides by what is there now
            return False
        return True

    # While others lead

    def _campaign(self, stop: threading.Event) -> bool:
        """Try until elected; False: ``stop`` was set first."""
        while not stop.is_set():
            if self._tried():
                return True
            jitter = CANDIDATE_JITTER * random.random()  # noqa: S311 - spreads load, guards nothing
            self._clock.wait(stop, self._timing.retry_s * (1 + jitter))
        return False

    def _tried(self) -> bool:
        try:
            return self.attempt()
        except ApiError as error:
            log.warning("the Lease can't be had", extra={"lease": self._name, "error": str(error)})
            return False

    # While we lead

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
        """Return when leading has to end. Apart from renewing, because a request may hang beyond the deadline."""
        while not (stop.is_set() or lost.is_set() or leading.done()):
            if self._left_s() <= 0:
                log.error("leadership lost: not renewed in time", extra={"lease": self._name})
                return
            self._clock.wait(stop, min(self._left_s(), self._timing.retry_s))

    def _renew(self, lost: threading.Event) -> None:
        while not self._clock.wait(lost, self._timing.retry_s):
            if not self._tried() and self._is_anothers():
                log.error("leadership lost: another took the Lease", extra={"lease": self._name})
                lost.set()

    def _release(self) -> None:
        """Clear the holder, so that the next one need not wait; it may take over at once."""
        now = micro_time(self._clock.now())
        transitions = None if self._lease is None else self._lease.spec.lease_transitions
        spec = LeaseSpec(None, 1, now, now, transitions)
        try:
            self._put(spec)
        except ApiError as error:
            log.warning("the Lease can't be given up", extra={"lease": self._name, "error": str(error)})
        self._renewed_at = float("-inf")

    # The Lease

    def _left_s(self) -> float:
        return self._renewed_at + self._timing.renew_deadline_s - self._clock.monotonic()

    def _is_ours(self) -> bool:
        return self._lease is not None and self._lease.spec.holder_identity == self.identity

    def _is_anothers(self) -> bool:
        """Whether somebody else has it, by what we saw and by our own clock."""
        if self._lease is None or not self._lease.spec.holder_identity or self._is_ours():
            return False
        return self._clock.monotonic() < self._seen_at + (self._lease.spec.lease_duration_seconds or 0)

    def _look(self) -> None:
        path = f"{leases(self._namespace)}/{self._name}"
        stored = self._client.find(path)
        try:
            found = None if stored is None else msgspec.convert(stored, Lease)
        except msgspec.MsgspecError as error:
            raise ApiError(f"GET {path}: the answer is no Lease: {error}") from error
        if found is not None and (self._lease is None or found.spec != self._lease.spec):
            self._seen_at = self._clock.monotonic()
        self._lease = found

    def _write(self, began: float) -> None:
        """Take or renew it, over what we know of it: whoever wrote since then wins (status 409)."""
        now, before = micro_time(self._clock.now()), LeaseSpec() if self._lease is None else self._lease.spec
        transitions = before.lease_transitions or 0
        if self._is_ours():
            spec = LeaseSpec(self.identity, self._timing.lease_s, before.acquire_time, now, transitions)
        else:
            taken = transitions + (self._lease is not None)
            spec = LeaseSpec(self.identity, self._timing.lease_s, now, now, taken)
        self._put(spec)
        self._renewed_at = began

    def _put(self, spec: LeaseSpec) -> None:
        folder = leases(self._namespace)
        if self._lease is None:
            stored = self._client.create(folder, lease_object(self._namespace, self._name, spec))
        else:
            body = lease_object(self._namespace, self._name, spec, self._lease.metadata.resource_version)
            stored = self._client.replace(f"{folder}/{self._name}", body)
        try:
            self._lease = msgspec.convert(stored, Lease)
        except msgspec.MsgspecError as error:
            raise ApiError(f"writing Lease {self._name}: the answer is no Lease: {error}") from error
        self._seen_at = self._clock.monotonic()
