"""Whom the controller would evict, as GpuPolicies allow it, for pods that found no place in a simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import msgspec

from controller.demand.pending_claims import Queue
from controller.eviction.evictor import MOST_OF_OWNER, Evictor, Job
from controller.eviction.gpu_policy import GpuPolicies, GpuPolicy, parse_policy
from controller.eviction.preemption import PODS, Preemption, PreemptionSearch, RunningPods
from controller.eviction.preemption_preview import BOUND, JOBS, Preview, preview_of, read_idle_since, search_in_rounds
from controller.eviction.recent_evictions import RecentEvictions
from deviceclasses.lint.documents import Document, read_documents
from driver.clock import Clock
from driver.errors import UsageError
from driver.kube.client import KubeClient
from driver.kube.get_and_list import read_all
from driver.kube.types import Allocation, Claim, ClaimStatus, Consumer, ExtendedClaimStatus, Node, NodeStatus, Pod
from tessera.simulate.imagined_cluster import ClusterContent, ImaginedCluster
from tessera.simulate.scheduler import PodPlacement

MAX_PODS = 100
"""Pods without a place for which victims are looked for."""

ENOUGH = "1E"
"""Of each resource of a simulated node: simulations place pods by their devices only."""


def policies_of_files(paths: Sequence[str]) -> Iterator[GpuPolicy]:
    """The policies of the option ``--policy``. Raises UsageError."""
    for path in paths:
        for document in read_documents(path):
            if not isinstance(document, Document):
                raise UsageError(f"--policy {path}: {document.message}")
            yield parse_policy(document.content, f"--policy {document.file}, document {document.number}")


class VictimFinder:
    """``content`` is what the simulation began with, ``jobs`` are those of its files.

    ``client``: that of the cluster, if there is one.
    """

    def __init__(
        self, policies: GpuPolicies, content: ClusterContent, jobs: Iterable[Job], client: KubeClient | None
    ) -> None:
        self._policies, self._client, self._nodes = policies, client, content.nodes
        self._claims = {claim.metadata.key: claim for claim in content.claims}
        running = read_all(client, "/api/v1/pods", Pod, BOUND) if client is not None else ()
        self._running = {pod.metadata.key: pod for pod in running}
        self._jobs = [*jobs, *(read_all(client, JOBS, Job) if client is not None else ())]
        self._idle_since = read_idle_since(client) if client is not None else {}

    def find(self, cluster: ImaginedCluster, placements: Iterable[PodPlacement]) -> list[Preview]:
        """The victims for each pod without a place, those of the highest priority first.

        What the victims of a pod had belongs to it before the next one is looked at.
        """
        waiting, previews = list[Pod](), list[Preview]()
        for placement in placements:
            self._bind(placement)
            # The scheduler alone refuses the others, or an admission policy.
            if placement.node is None and any(reason.code for reason in placement.reasons):
                waiting.append(placement.pod)
        cluster.expect(waiting)  # pods of a gang, too
        for pod in sorted(waiting, key=lambda pod: -pod.spec.priority)[:MAX_PODS]:
            nodes = [_with_resources(node, pod) for node in self._nodes]
            running = RunningPods(self._running.values(), self._claims.values(), nodes, self._jobs, self._idle_since)
            preview = self._preview(cluster.queue(), pod, running)
            previews.append(preview)
            if preview.preemption is not None:
                cluster = self._after(cluster, preview.preemption, pod, running)
        return previews

    def _after(
        self, cluster: ImaginedCluster, preemption: Preemption, pod: Pod, running: RunningPods
    ) -> ImaginedCluster:
        """The cluster once the victims have ended and ``pod`` is bound."""
        units = preemption.victims.units
        for victim in running.of_units(units):
            del self._running[victim.metadata.key]
        gone = frozenset[str]().union(*(unit.claims for unit in units))
        self._claims = {key: claim for key, claim in self._claims.items() if str(key) not in gone}
        later = cluster.fork(gone)
        later.settle()
        self._bind(later.place(pod))
        return later

    def _bind(self, placement: PodPlacement) -> None:
        """Keep a pod that has a place, and the claims that it uses."""
        if placement.node is None:
            return
        pod = placement.pod
        allocated = {claim.metadata.key: (claim, allocation) for claim, allocation in placement.allocations}
        extended = next((key.name for key in allocated if key not in pod.claims), None)
        status = msgspec.structs.replace(pod.status, phase="Running")
        if extended is not None:
            status = msgspec.structs.replace(status, extended_resource_claim_status=ExtendedClaimStatus(extended))
        bound = Pod(pod.metadata, msgspec.structs.replace(pod.spec, node_name=placement.node), status)
        self._running[pod.metadata.key] = bound
        for key in bound.claims:
            claim, allocation = allocated.get(key, (self._claims.get(key), None))
            if claim is not None:
                self._claims[key] = _used(claim, allocation or claim.status.allocation, pod)

    def _preview(self, queue: Queue, pod: Pod, running: RunningPods) -> Preview:
        clock = Clock() if self._client is None else self._client.clock
        search = PreemptionSearch(queue, pod, running, self._policies, clock)
        if self._client is not None:
            evictor = Evictor(self._client, None, RecentEvictions(self._client, ""))
            return preview_of(self._client, search, evictor)
        return search_in_rounds(search, partial(_spare_owners, search))


def _with_resources(node: Node, pod: Pod) -> Node:
    """A node that has enough of what ``pod`` requests, if nothing is known of what it has."""
    enough = dict.fromkeys((PODS, *pod.spec.resource_names), ENOUGH)
    return node if node.status.allocatable else Node(node.metadata, node.spec, NodeStatus(allocatable=enough))


def _spare_owners(search: PreemptionSearch, preemption: Preemption) -> bool:
    """Leave out a unit of an owner that would lose more pods than the evictor takes. Returns whether there is one."""
    running = search.running
    units = sorted(preemption.victims.units, key=lambda unit: unit.cost, reverse=True)
    lost = Counter(pod.controller for pod in running.of_units(units))
    for unit in units:
        for owner in (pod.controller for pod in running.of_units([unit])):
            if owner is not None and lost[owner] > MOST_OF_OWNER:
                reason = f"{owner.kind} {owner.name} loses at most {MOST_OF_OWNER} pods an hour in this way"
                search.protected[unit.pods] = reason
                return True
    return False


def _used(claim: Claim, allocation: Allocation | None, pod: Pod) -> Claim:
    """``claim`` with ``allocation``, as ``pod`` uses it."""
    consumer = Consumer("pods", pod.metadata.name, pod.metadata.uid)
    status = ClaimStatus(allocation, claim.status.devices, (*claim.status.reserved_for, consumer))
    return msgspec.structs.replace(claim, status=status)
