"""What Kueue's queued Workloads will claim: a queue of its own, behind all pending claims (pure).

Kueue counts published devices before it admits a Workload, and its pods are created after that. So what their claims
match is to be published, but nothing is offered for them, and nothing kept free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from controller.cluster.claim_index import ClusterState
from controller.cluster.fleet import Fleet
from controller.cluster.kueue_workloads import QueuedPod, QueuedWorkload
from controller.demand.feasibility import Group, Matching, SelectedKind
from controller.demand.node_eligibility import Eligibility
from controller.demand.pending_claims import PendingClaim, Queue
from controller.demand.selected_devices import Selector
from driver.kube.types import MAX_DEVICES, Claim, Key, Metadata, Pod, PodResourceClaim, Toleration

MAX_SELECTIONS = 32
"""Different selectors for which devices are kept published for queued Workloads, those of the first ones."""

EVERY_TAINT = Toleration(operator="Exists")
"""Kueue adds the tolerations of a ResourceFlavor when it admits a Workload: until then no taint rules out a node."""


@dataclass(frozen=True)
class QueuedNeed:
    """Devices of which ``count`` are to be published; the GPUs that have them by kind."""

    kinds: Mapping[SelectedKind, Group]
    count: int


class WorkloadClaim(NamedTuple):
    """The claim ``name`` that each pod of ``pod_set`` will have."""

    workload: QueuedWorkload
    pod_set: QueuedPod
    name: str


class WorkloadQueue(Queue):
    """The claims of queued Workloads as if they were pending, with one pod for each pod set."""

    def __init__(
        self,
        workloads: Iterable[QueuedWorkload],
        cluster: ClusterState,
        fleet: Fleet,
        matching: Matching,
        eligibility: Eligibility | None = None,
    ) -> None:
        """``cluster``: without what is pending there."""
        pods: list[Pod] = []
        claims: list[Claim] = []
        self._origins: dict[Key, WorkloadClaim] = {}
        for workload in workloads:
            for index, pod_set in enumerate(workload.pods):
                name = f"{workload.metadata.name}/{index}"  # no object has a slash in its name
                of_pod = {f"{name}/{claim}": claim for claim in pod_set.claims}
                resource_claims = tuple(PodResourceClaim(claim, claim) for claim in of_pod)
                spec = msgspec.structs.replace(
                    pod_set.spec, tolerations=(EVERY_TAINT,), resource_claims=resource_claims
                )
                pods.append(Pod(_metadata(workload, name), spec))
                for unique_name, claim in of_pod.items():
                    claims.append(Claim(_metadata(workload, unique_name), pod_set.claims[claim]))
                    self._origins[claims[-1].metadata.key] = WorkloadClaim(workload, pod_set, claim)
        queued = replace(cluster, claims=cluster.claims.view(claims), pods=tuple(pods), pod_groups={})
        super().__init__(queued, fleet, matching, eligibility)

    def origin(self, pending: PendingClaim) -> WorkloadClaim:
        return self._origins[pending.claim.metadata.key]


def _metadata(workload: QueuedWorkload, name: str) -> Metadata:
    return Metadata(name=name, namespace=workload.metadata.namespace, uid=workload.metadata.uid)


def queued_needs(queue: Queue) -> Sequence[QueuedNeed]:
    """The devices that must be published so that the claims of ``queue`` find as many as they ask for."""
    needed: dict[Selector, int] = {}
    for pending in queue.pending:
        for selector, count in _requests(queue, pending):
            if selector in needed or len(needed) < MAX_SELECTIONS:
                needed[selector] = max(count, needed.get(selector, 0))
    nodes = frozenset(queue.feasibility.fleet.nodes)
    return [QueuedNeed(queue.feasibility.kinds(selector, nodes), count) for selector, count in needed.items()]


def _requests(queue: Queue, pending: PendingClaim) -> Iterable[tuple[Selector, int]]:
    """The selector of each request and how many devices it asks for: Kueue checks each request alone."""
    for requirements in queue.alternatives(pending)[:1]:
        for request in requirements.requests:
            if request.count is not None and request.count <= MAX_DEVICES:
                yield request.selector, request.count
