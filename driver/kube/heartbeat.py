"""Heartbeat of the controller: a Lease that the leader renews and that every node watches.

Clocks are not compared: each node measures the time since it saw the last renewal.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from driver.errors import ApiError
from driver.kube.client import KubeClient
from driver.kube.clock import Clock, micro_time
from driver.kube.lease import LeaseSpec, lease_object, leases
from driver.kube.types import ObjectMeta
from driver.kube.watch_cache import Change, WatchCache

log = logging.getLogger(__name__)

HEARTBEAT = "tessera-controller-heartbeat"

LEAVING = "gpu.tessera.dev/uninstalling"
"""Annotation of the Lease: Tessera is being uninstalled, so that nodes are to offer nothing any more.

Every node watches the Lease anyway, whether a controller renews it or not."""

RENEW_INTERVAL_SECONDS = 10.0
"""Each renewal is an event at every node, so as seldom as three of them fit into SILENT_S."""

FAILURE_INTERVAL_SECONDS = 0.2
"""Interval between checks whether the failure that stops the heartbeat is over."""

SILENT_S = 30.0
"""Time without a renewal after which a node runs standalone."""


class Heartbeat:
    """Renews the Lease ``namespace/name``; two leaders for a moment don't disturb one another."""

    def __init__(
        self, client: KubeClient, namespace: str, identity: str, name: str = HEARTBEAT, clock: Clock | None = None
    ) -> None:
        self._client = client
        self._namespace, self._name, self._identity = namespace, name, identity
        self._clock = clock or Clock()

    def run(self, stop: threading.Event, failure: Callable[[], str | None] = lambda: None) -> None:
        """Renew every RENEW_INTERVAL_SECONDS until ``stop`` is set, except during a ``failure``.

        ``failure`` returns the reason why nodes must not rely on this controller, or None if they may.
        """
        renewing = False
        while not stop.is_set():
            why = failure()
            if renewing and why is not None:
                log.warning("the heartbeat stops: nodes must not rely on the plans", extra={"why": why})
            elif not renewing and why is None:
                log.info("the heartbeat is renewed", extra={"lease": self._name})
            renewing = why is None
            try:
                if renewing:
                    self.beat()
            except ApiError as error:
                log.warning("no heartbeat", extra={"lease": self._name, "error": str(error)})
            self._clock.wait(stop, RENEW_INTERVAL_SECONDS if renewing else FAILURE_INTERVAL_SECONDS)

    def beat(self) -> None:
        """One renewal, without a precondition. Raises ApiError."""
        spec = LeaseSpec(self._identity, int(SILENT_S), renew_time=micro_time(self._clock.now()))
        body = lease_object(self._namespace, self._name, spec)
        self._client.create_or_patch(f"{leases(self._namespace)}/{self._name}", body)


class Annotated(ObjectMeta, frozen=True, rename="camel"):
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)


class Seen(msgspec.Struct, frozen=True):
    """The Lease, as far as nodes look at it."""

    metadata: Annotated
    spec: LeaseSpec = LeaseSpec()


class Said(NamedTuple):
    """What the Lease says: when it was renewed, and whether Tessera is being uninstalled."""

    renewed: str | None
    leaving: bool


class HeartbeatWatch:
    """Whether a controller renews the Lease ``namespace/name``, by this process's own clock.

    A Lease found when the watch begins is no sign of life: it may have been left. The next renewal is. ``leaving``
    says whether Tessera is being uninstalled, also when the Lease is gone in the course of that; ``on_leaving`` is
    called when that has changed.
    """

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        name: str = HEARTBEAT,
        clock: Clock | None = None,
        on_leaving: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock or Clock()
        self._looked = False
        self._renewed_at = float("-inf")
        self._on_leaving = on_leaving
        self.leaving = False
        selector = {"fieldSelector": f"metadata.name={name}"}
        self._cache = WatchCache(client, leases(namespace), Seen, _said, self._changed, selector)

    def run(self, stop: threading.Event) -> None:
        """Watch until ``stop`` is set."""
        self._cache.run(stop)

    def alive(self) -> bool:
        """Whether a renewal was seen within SILENT_S."""
        return self._clock.monotonic() - self._renewed_at <= SILENT_S

    def _changed(self, changes: Sequence[Change[Said]]) -> None:
        if self._looked and any(_is_renewal(change) for change in changes):
            self._renewed_at = self._clock.monotonic()
        self._looked = True
        for change in changes:
            if change.new is not None and change.new.leaving != self.leaving:
                self.leaving = change.new.leaving
                self._on_leaving()


def _is_renewal(change: Change[Said]) -> bool:
    if change.new is None or change.new.renewed is None:
        return False
    return change.old is None or change.old.renewed != change.new.renewed


def _said(lease: Seen) -> Said:
    return Said(lease.spec.renew_time, LEAVING in lease.metadata.annotations)
