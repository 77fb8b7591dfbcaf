"""What Kueue's queued Workloads will claim: a queue of its own, behind all pending claims (pure).

Kueue counts published devices before it admits a Workload, and its pods are created after that. So what their claims
match is to be published, but nothing is offered for them, and nothing kept free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from controller.cluster.claim_index import ClusterState
from controller.cluster.kueue import QueuedWorkload
from controller.demand.feasibility import Group, Kind
from controller.demand.pending_claims import PendingClaim, Queue
from controller.demand.requirements import MAX_DEVICES, RefusedRequest
from controller.demand.selected_devices import Selector
from driver.kube.types import Claim, Metadata, Pod, PodResourceClaim, PodSpec, Toleration

MAX_SELECTIONS = 32
"""Different selectors for which devices are kept published for queued Workloads, those of the first ones."""

EVERY_TAINT = Toleration(operator="Exists")
"""Kueue adds the tolerations of a ResourceFlavor when it admits a Workload: until then no taint rules out a node."""


class Countable(NamedTuple):
    """Devices of which ``needed`` are to be published; the GPUs that have them by kind."""

    kinds: Mapping[Kind, Group]
    needed: int


def cluster_of(cluster: ClusterState, workloads: Iterable[QueuedWorkload]) -> ClusterState:
    """``cluster`` with the pods and claims of ``workloads`` instead of its own: one pod for each pod set.

    Their names have a slash, as no object's name has.
    """
    pods: list[Pod] = []
    claims: list[Claim] = []
    for workload in workloads:
        for index, each in enumerate(workload.pods):
            name = f"{workload.metadata.name}/{index}"
            found = [Claim(_named(workload, f"{name}/{claim}"), spec) for claim, spec in each.claims.items()]
            used = tuple(PodResourceClaim(claim.metadata.name, claim.metadata.name) for claim in found)
            spec = PodSpec(
                node_selector=each.spec.node_selector,
                affinity=each.spec.affinity,
                tolerations=(EVERY_TAINT,),
                resource_claims=used,
            )
            pods.append(Pod(_named(workload, name), spec))
            claims += found
    return replace(cluster, claims=cluster.claims.view(claims), pods=tuple(pods), pod_groups={})


def _named(workload: QueuedWorkload, name: str) -> Metadata:
    return Metadata(name=name, namespace=workload.metadata.namespace, uid=workload.metadata.uid)


def countable(queue: Queue) -> Sequence[Countable]:
    """The devices that must be published so that the claims of ``queue`` find as many as they ask for."""
    needed: dict[Selector, int] = {}
    for pending in queue.pending:
        for selector, count in _requests(queue, pending):
            if selector in needed or len(needed) < MAX_SELECTIONS:
                needed[selector] = max(count, needed.get(selector, 0))
    nodes = frozenset(queue.feasibility.fleet.nodes)
    return [Countable(queue.feasibility.kinds(selector, nodes), count) for selector, count in needed.items()]


def _requests(queue: Queue, pending: PendingClaim) -> Iterable[tuple[Selector, int]]:
    """The selector of each request and how many devices it asks for: Kueue checks each request alone."""
    requirements = queue.requirements(pending)
    if isinstance(requirements, RefusedRequest) or not requirements:
        return
    for request in requirements[0].requests:
        if request.count is not None and request.count <= MAX_DEVICES:
            yield request.selector, request.count
