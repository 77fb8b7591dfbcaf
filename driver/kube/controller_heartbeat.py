"""Heartbeat of the controller: a Lease that the leader renews and that every node watches.

Clocks are not compared: each node measures the time since it saw the last renewal, and commands that look once compare
the time that the API server has written with its clock.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from driver.clock import Clock, micro_time
from driver.errors import ApiError
from driver.kube.client import KubeClient, Object
from driver.kube.get_and_list import read_all
from driver.kube.lease import Lease, LeaseSpec, lease_object, leases
from driver.kube.watch_cache import Change, WatchCache

log = logging.getLogger(__name__)

HEARTBEAT = "tessera-controller-heartbeat"

LEAVING = "gpu.tessera.dev/uninstalling"
"""Annotation of the Lease, which every node watches: Tessera is being uninstalled, and nodes must offer nothing."""

EVICT_AFTER = "gpu.tessera.dev/evict-failed-starts-after"
"""Annotation of the Lease, for commands: the leader's ``controller.evictFailedStartsAfter``, in seconds."""

RENEW_INTERVAL_SECONDS = 10.0
"""Each renewal is an event at every node, so as seldom as three of them fit into SILENCE_TIMEOUT_SECONDS."""

FAILURE_INTERVAL_SECONDS = 0.2
"""Interval between checks whether the failure that stops the heartbeat is over."""

SILENCE_TIMEOUT_SECONDS = 30.0
"""Time without a renewal after which a node runs standalone."""


ALL_LEASES = "/apis/coordination.k8s.io/v1/leases"

NEVER_RENEWED = datetime.min.replace(tzinfo=UTC)


class Heartbeat:
    """Renews the Lease HEARTBEAT of ``namespace``; two leaders for a moment don't disturb one another.

    ``annotations`` are what the leader publishes of its settings.
    """

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        identity: str,
        annotations: Mapping[str, str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._client, self._annotations = client, annotations or {}
        self._namespace, self._identity = namespace, identity
        self._clock = clock or Clock()

    def run(self, stop: threading.Event, failure: Callable[[], str | None] = lambda: None) -> None:
        """Renew every RENEW_INTERVAL_SECONDS until ``stop`` is set, except during a ``failure``.

        ``failure`` returns the reason why nodes must not rely on this controller, or None if they may.
        """
        renewing = False
        while not stop.is_set():
            reason = failure()
            if renewing and reason is not None:
                log.warning("the heartbeat stops: nodes must not rely on the plans", extra={"why": reason})
            elif not renewing and reason is None:
                log.info("the heartbeat is renewed", extra={"lease": HEARTBEAT})
            renewing = reason is None
            try:
                if renewing:
                    self.beat()
            except ApiError as error:
                log.warning("no heartbeat", extra={"lease": HEARTBEAT, "error": str(error)})
            self._clock.wait(stop, RENEW_INTERVAL_SECONDS if renewing else FAILURE_INTERVAL_SECONDS)

    def beat(self) -> None:
        """One renewal, without a precondition. Raises ApiError."""
        spec = LeaseSpec(self._identity, int(SILENCE_TIMEOUT_SECONDS), renew_time=micro_time(self._clock.now()))
        body = lease_object(self._namespace, HEARTBEAT, spec)
        body["metadata"]["annotations"] = dict(self._annotations)
        self._client.create_or_patch(f"{leases(self._namespace)}/{HEARTBEAT}", body)


class HeartbeatWatch:
    """Whether a controller renews the Lease HEARTBEAT of ``namespace``, by this process's own clock.

    A Lease found when the watch begins may have been left by a dead controller; only the next renewal counts.
    ``leaving``: Tessera is being uninstalled, as the Lease said last. ``exists``: whether there is a Lease; None: not
    known yet. ``on_change`` is called when one of the two becomes known or has changed.
    """

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        clock: Clock | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock or Clock()
        self._listed = False
        self._renewed_at = float("-inf")
        self._on_change = on_change
        self.leaving = False
        self.exists: bool | None = None
        selector = {"fieldSelector": f"metadata.name={HEARTBEAT}"}
        self._cache = WatchCache(client, leases(namespace), Lease, lambda lease: lease, self._changed, selector)

    def run(self, stop: threading.Event) -> None:
        self._cache.run(stop)

    def alive(self) -> bool:
        """Whether a renewal was seen within SILENCE_TIMEOUT_SECONDS."""
        return self._clock.monotonic() - self._renewed_at <= SILENCE_TIMEOUT_SECONDS

    def _changed(self, changes: Sequence[Change[Lease]]) -> None:
        if self._listed and any(_is_renewal(change) for change in changes):
            self._renewed_at = self._clock.monotonic()
        self._listed = True
        before = self.leaving, self.exists
        self.exists = bool(self.exists)
        for change in changes:
            self.exists = change.new is not None
            if change.new is not None:
                self.leaving = LEAVING in change.new.metadata.annotations
        if before != (self.leaving, self.exists):
            self._on_change()


def _is_renewal(change: Change[Lease]) -> bool:
    renewed = change.new and change.new.spec.renew_time
    return renewed is not None and (change.old is None or change.old.spec.renew_time != renewed)


@dataclass(frozen=True)
class LastHeartbeat:
    """The heartbeat Lease as a command finds it.

    age          seconds since its renewal; None: there was none
    evict_after  the leader's ``controller.evictFailedStartsAfter``; None: it does not say
    """

    namespace: str
    age: float | None
    evict_after: float | None = None

    @property
    def silent_seconds(self) -> float | None:
        """Seconds since the last heartbeat, if nodes run standalone for lack of one; None otherwise."""
        return self.age if self.age is not None and is_silent(self.age) else None


def is_silent(age: float | None) -> bool:
    """Whether a controller is silent whose last heartbeat is so many seconds old; None: it has sent none."""
    return age is None or age > SILENCE_TIMEOUT_SECONDS


def renewed_at(lease: Mapping[str, Any]) -> datetime | None:
    """Time of a Lease's last renewal by the API server's clock; other writes, such as of annotations, do not count."""
    times = []
    for writer in lease["metadata"].get("managedFields") or ():
        if "f:renewTime" in str(writer.get("fieldsV1")):
            with suppress(ValueError):
                times.append(datetime.fromisoformat(str(writer.get("time"))))
    return max(times, default=None)


def last_heartbeat(client: KubeClient) -> LastHeartbeat | None:
    """The heartbeat Lease of the cluster; None if there is none, or if this account may not list Leases."""
    try:
        selector = {"fieldSelector": f"metadata.name={HEARTBEAT}"}
        heartbeats = list(read_all(client, ALL_LEASES, Object, selector))
        newest = max(heartbeats, key=lambda lease: renewed_at(lease) or NEVER_RENEWED, default=None)
        if newest is None:
            return None
    except (ApiError, msgspec.MsgspecError):
        return None
    renewed = renewed_at(newest)
    age = None if renewed is None else (client.clock.now() - renewed).total_seconds()
    metadata, evict_after = newest["metadata"], None
    with suppress(ValueError):
        evict_after = float((metadata.get("annotations") or {}).get(EVICT_AFTER, ""))
    return LastHeartbeat(str(metadata["namespace"]), age, evict_after)
