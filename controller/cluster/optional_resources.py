"""Resources that may be missing: the API server may not serve them, or this account not read them.

PodGroups of Kubernetes (1.37, gate GenericWorkload) and of Volcano, DeviceTaintRules (1.37), ResourceClaimTemplates.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from driver.errors import FORBIDDEN, NOT_FOUND, ApiError
from driver.kube.client import KubeClient
from driver.kube.get_and_list import RESOURCE_GROUP
from driver.kube.types import (
    ClaimTemplate,
    Condition,
    DeviceTaintRule,
    Key,
    KubeObject,
    Metadata,
    PodGroup,
    PodGroupStatus,
)
from driver.kube.watch_cache import WatchCache
from driver.kube.work_loop import Backoff

log = logging.getLogger(__name__)

T = TypeVar("T", bound=KubeObject)

FIRST_PROBE_INTERVAL_SECONDS, MAX_PROBE_INTERVAL_SECONDS = 1.0, 300.0
"""Time until an API server without the resource is asked again: it knows new roles after a moment, and its feature
gates change when it is restarted."""


class OptionalCache(Generic[T]):
    """A cache of one resource, empty while the API server does not serve it or this account may not read it."""

    def __init__(
        self,
        client: KubeClient,
        path: str,
        kind: type[T],
        project: Callable[[Any], T],
        on_change: Callable[[], None],
        without: str,
    ) -> None:
        """``without`` is logged, with the reason, while the resource can't be read."""
        self._client = client
        self._path = path
        self._on_change = on_change
        self._without = without
        self.kind = kind.__name__
        self.cache: WatchCache[T, T] = WatchCache(client, path, kind, project, lambda _: on_change())
        self._unavailable: str | None = None

    def run(self, stop: threading.Event) -> None:
        """Watch until ``stop`` is set, once the API server serves the resource. For a daemon thread."""
        backoff = Backoff(FIRST_PROBE_INTERVAL_SECONDS, MAX_PROBE_INTERVAL_SECONDS)
        while not stop.is_set():
            if self._check_availability():
                self.cache.run(stop)
            else:
                stop.wait(backoff.next_s())

    def load(self) -> None:
        """List the objects once, if the API server serves them. Raises ApiError."""
        if self._check_availability():
            self.cache.load()

    @property
    def synced(self) -> bool:
        """Whether the objects have been listed, or can not be."""
        return self._unavailable is not None or self.cache.synced

    def snapshot(self) -> Mapping[Key, T]:
        return self.cache.snapshot() if self.cache.synced else {}

    def _check_availability(self) -> bool:
        """Whether the resource can be listed. Other errors than a refusal are left to the watch, which retries."""
        error = listing_error(self._client, self._path)
        if error is None:
            self._unavailable = None
            return True
        if error.status not in {NOT_FOUND, FORBIDDEN}:
            return True
        why = "not served" if error.status == NOT_FOUND else "no right to list them"
        if why != self._unavailable:
            log.info(self._without, extra={"why": why})
            self._unavailable = why
            self._on_change()
        return False


def listing_error(client: KubeClient, path: str) -> ApiError | None:
    """Why the resource of ``path`` can't be listed at present; None if it can."""
    try:
        client.get(path, {"limit": "1"})
    except ApiError as error:
        return error
    return None


def pod_groups(client: KubeClient, on_change: Callable[[], None], version: str) -> OptionalCache[PodGroup]:
    """A cache of the PodGroups of one API without labels, and of their conditions only the types and values."""
    without = f"PodGroups of {version} are not read: their gangs are planned pod by pod"
    return OptionalCache(client, f"/apis/{version}/podgroups", PodGroup, _kept_pod_group, on_change, without)


def device_taint_rules(client: KubeClient, on_change: Callable[[], None]) -> OptionalCache[DeviceTaintRule]:
    without = "DeviceTaintRules are not read: reasons of pending claims do not name them"
    path = "/apis/resource.k8s.io/v1/devicetaintrules"
    return OptionalCache(client, path, DeviceTaintRule, _kept_rule, on_change, without)


def claim_templates(
    client: KubeClient, project: Callable[[ClaimTemplate], ClaimTemplate], on_change: Callable[[], None]
) -> OptionalCache[ClaimTemplate]:
    without = "ResourceClaimTemplates are not read: larger profiles are offered only once a claim asks for them"
    return OptionalCache(client, f"{RESOURCE_GROUP}/resourceclaimtemplates", ClaimTemplate, project, on_change, without)


def _kept_pod_group(found: PodGroup) -> PodGroup:
    at = found.metadata
    kept = Metadata(name=at.name, namespace=at.namespace, uid=at.uid)
    conditions = tuple(Condition(condition.type, condition.status) for condition in found.status.conditions)
    return PodGroup(kept, found.spec, PodGroupStatus(conditions, found.status.phase))


def _kept_rule(found: DeviceTaintRule) -> DeviceTaintRule:
    return DeviceTaintRule(Metadata(name=found.metadata.name, uid=found.metadata.uid), found.spec)
