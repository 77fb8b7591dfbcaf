"""The Workloads of Kueue that are not admitted yet, with what the ResourceClaimTemplates that their pods name say."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from controller.cluster.optional_resources import OptionalCache, listing_error
from driver.errors import NOT_FOUND
from driver.kube.client import KubeClient
from driver.kube.types import (
    ClaimSpec,
    ClaimTemplate,
    Key,
    KueueWorkload,
    Metadata,
    PodSet,
    PodSpec,
    WorkloadPodTemplate,
    WorkloadSpec,
)
from driver.kube.watch_cache import WatchCache

log = logging.getLogger(__name__)

WORKLOAD_VERSION = "kueue.x-k8s.io/v1beta2"
"""Served by Kueue 0.15 and newer."""

WORKLOADS = f"/apis/{WORKLOAD_VERSION}/workloads"

PROBE_INTERVAL_SECONDS = 60.0
"""Time until an API server without Workloads is asked again: Kueue may be installed at any time."""

MAX_WORKLOADS = 200
"""Workloads that are considered, by priority and age: those that Kueue may admit next."""

MAX_POD_SETS, MAX_CLAIMS = 18, 16
"""Limits of what is read of one Workload (Kueue's) and of one pod (about what fits together with its other volumes)."""


class QueuedPod(NamedTuple):
    """The pods of one pod set, which are alike: the name of the set, their spec and their claims by name."""

    name: str
    spec: PodSpec
    claims: Mapping[str, ClaimSpec]


class QueuedWorkload(NamedTuple):
    """A Workload that is not admitted yet."""

    metadata: Metadata
    pods: tuple[QueuedPod, ...]


class KueueQueue:
    """A cache of the queue, empty while the API server does not serve Workloads or this account may not read them.

    Decisions do not wait for it: it adds to what is published, and to nothing else.
    """

    def __init__(
        self, client: KubeClient, templates: OptionalCache[ClaimTemplate], on_change: Callable[[], None]
    ) -> None:
        self._client, self._templates = client, templates.cache
        self._workloads = WatchCache(client, WORKLOADS, KueueWorkload, kept_workload, lambda _: on_change())

    def run(self, stop: threading.Event) -> None:
        """Watch until ``stop`` is set, as soon as Workloads are served. For a daemon thread."""
        while not stop.is_set() and self._are_unknown():
            stop.wait(PROBE_INTERVAL_SECONDS)
        if not stop.is_set():
            self._workloads.run(stop)

    def snapshot(self) -> list[QueuedWorkload]:
        """The Workloads that are queued and whose claims this account can read, in about the order of the queue."""
        if not self._workloads.synced or not self._templates.synced:
            return []
        first = sorted(self._workloads.snapshot().values(), key=_order)[:MAX_WORKLOADS]
        queued = (
            QueuedWorkload(workload.metadata, tuple(self._pod(workload, pods) for pods in workload.spec.pod_sets))
            for workload in first
        )
        return [workload for workload in queued if any(pod.claims for pod in workload.pods)]

    def _pod(self, workload: KueueWorkload, pods: PodSet) -> QueuedPod:
        spec, namespace = pods.template.spec, workload.metadata.namespace
        templates = ((claim.name, claim.resource_claim_template_name or "") for claim in spec.resource_claims)
        of_pod = ((name, self._templates.get(Key(namespace, template))) for name, template in templates)
        return QueuedPod(pods.name, spec, {name: template.spec.spec for name, template in of_pod if template})

    def _are_unknown(self) -> bool:
        """Whether the API server serves no Workloads. Other errors are left to the watch, which retries."""
        error = listing_error(self._client, WORKLOADS)
        if error is None or error.status != NOT_FOUND:
            return False
        log.debug("Kueue's Workloads are not served")
        return True


def _order(workload: KueueWorkload) -> tuple[int, str, Key]:
    return -(workload.spec.priority or 0), workload.metadata.creation_timestamp or "", workload.metadata.key


def kept_workload(found: KueueWorkload) -> KueueWorkload | None:
    """What decides which devices a queued Workload needs; None for one that is not queued or needs no template."""
    sets = tuple(
        PodSet(pods.name, WorkloadPodTemplate(_kept_spec(pods.template.spec)))
        for pods in found.spec.pod_sets[:MAX_POD_SETS]
        if any(claim.resource_claim_template_name for claim in pods.template.spec.resource_claims)
    )
    if not found.is_queued or not sets:
        return None
    at = found.metadata
    kept = Metadata(name=at.name, namespace=at.namespace, uid=at.uid, creation_timestamp=at.creation_timestamp)
    return KueueWorkload(kept, WorkloadSpec(sets, found.spec.priority))


def _kept_spec(spec: PodSpec) -> PodSpec:
    """What decides where such a pod may run. Tolerations are left out: Kueue adds those of a ResourceFlavor."""
    return PodSpec(
        node_selector=spec.node_selector, affinity=spec.affinity, resource_claims=spec.resource_claims[:MAX_CLAIMS]
    )
