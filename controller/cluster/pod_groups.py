"""The PodGroups of scheduling.k8s.io, where the API server serves them (Kubernetes 1.37, gate GenericWorkload)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from driver.errors import FORBIDDEN, NOT_FOUND, ApiError
from driver.kube.client import KubeClient
from driver.kube.types import Condition, Key, Metadata, PodGroup, PodGroupStatus
from driver.kube.watch_cache import WatchCache
from driver.kube.work_loop import Backoff

log = logging.getLogger(__name__)

POD_GROUP_VERSION = "scheduling.k8s.io/v1beta1"
PATH = f"/apis/{POD_GROUP_VERSION}/podgroups"

FIRST_PROBE_INTERVAL_SECONDS, MAX_PROBE_INTERVAL_SECONDS = 1.0, 300.0
"""Time until an API server without PodGroups is asked again: it knows new roles after a moment, and its feature gates
change when it is restarted."""


class PodGroups:
    """A cache of PodGroups, empty while the API server does not serve them or this account may not read them."""

    def __init__(self, client: KubeClient, on_change: Callable[[], None]) -> None:
        self._client = client
        self._on_change = on_change
        self.cache = WatchCache(client, PATH, PodGroup, _kept, lambda _: on_change())
        self._unavailable: str | None = None

    def run(self, stop: threading.Event) -> None:
        """Watch until ``stop`` is set, once the API server serves PodGroups. For a daemon thread."""
        backoff = Backoff(FIRST_PROBE_INTERVAL_SECONDS, MAX_PROBE_INTERVAL_SECONDS)
        while not stop.is_set():
            if self._is_served():
                self.cache.run(stop)
            else:
                stop.wait(backoff.next_s())

    def load(self) -> None:
        """List the PodGroups once, if the API server serves them. Raises ApiError."""
        if self._is_served():
            self.cache.load()

    @property
    def synced(self) -> bool:
        """Whether the PodGroups have been listed, or can not be."""
        return self._unavailable is not None or self.cache.synced

    def snapshot(self) -> Mapping[Key, PodGroup]:
        return self.cache.snapshot() if self.cache.synced else {}

    def _is_served(self) -> bool:
        """Whether PodGroups can be listed. Other errors than a refusal are left to the watch, which retries."""
        try:
            self._client.get(PATH, {"limit": "1"})
        except ApiError as error:
            if error.status not in {NOT_FOUND, FORBIDDEN}:
                return True
            why = "not served" if error.status == NOT_FOUND else "no right to list them"
            if why != self._unavailable:
                log.info("PodGroups are not read: gangs are planned pod by pod", extra={"why": why})
                self._unavailable = why
                self._on_change()
            return False
        self._unavailable = None
        return True


def _kept(found: PodGroup) -> PodGroup:
    """A PodGroup without labels, and of its conditions only the types and values."""
    at = found.metadata
    kept = Metadata(name=at.name, namespace=at.namespace, uid=at.uid)
    conditions = tuple(Condition(each.type, each.status) for each in found.status.conditions)
    return PodGroup(kept, found.spec, PodGroupStatus(conditions))
