"""The controller's sign of life: one Lease, renewed while it leads, watched by every node.

Nodes don't compare clocks: what counts is when they themselves saw it renewed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from driver.errors import NOT_FOUND, ApiError
from driver.kube.clock import Clock, SystemClock, micro_time
from driver.kube.lease import LeaseSpec, lease_object, leases
from driver.kube.objects import ObjectMeta
from driver.kube.transport import KubeClient
from driver.kube.watch_cache import Change, WatchCache

log = logging.getLogger(__name__)

HEARTBEAT = "tessera-controller-heartbeat"

LEAVING = "gpu.tessera.dev/uninstalling"
"""Annotation of the Lease: Tessera is being uninstalled, so that nodes are to offer nothing any more.

Every node watches the Lease anyway, whether a controller renews it or not."""

RENEW_S = 10.0
"""Each renewal is an event at every node, so as seldom as three of them fit into SILENT_S."""

UNWELL_S = 0.2
"""Between two looks at whether there is something to show a sign of life for."""

SILENT_S = 30.0
"""How long without a renewal until a node stands alone."""


class Heartbeat:
    """Renews the Lease ``namespace/name``; two leaders for a moment don't disturb one another."""

    def __init__(
        self, client: KubeClient, namespace: str, identity: str, name: str = HEARTBEAT, clock: Clock | None = None
    ) -> None:
        self._client = client
        self._namespace, self._name, self._identity = namespace, name, identity
        self._clock = clock or SystemClock()

    def run(self, stop: threading.Event, is_well: Callable[[], bool] = lambda: True) -> None:
        """Renew every RENEW_S while ``is_well``, until ``stop`` is set; what fails is tried at the next turn."""
        while not stop.is_set():
            well = is_well()
            try:
                if well:
                    self.beat()
            except ApiError as error:
                log.warning("no heartbeat", extra={"lease": self._name, "error": str(error)})
            self._clock.wait(stop, RENEW_S if well else UNWELL_S)

    def beat(self) -> None:
        """One renewal, without a precondition. Raises ApiError."""
        spec = LeaseSpec(self._identity, int(SILENT_S), renew_time=micro_time(self._clock.now()))
        body, folder = lease_object(self._namespace, self._name, spec), leases(self._namespace)
        try:
            self._client.patch(f"{folder}/{self._name}", body)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            self._client.create(folder, body)


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
        self._clock = clock or SystemClock()
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
