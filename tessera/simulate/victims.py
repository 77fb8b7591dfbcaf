"""Whom the controller would evict, as GpuPolicies allow it, for pods that found no place in a simulation."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from controller.demand.pending_claims import Queue
from controller.eviction.evictor import Evictor, Job
from controller.eviction.gpu_policy import GpuPolicies
from controller.eviction.preemption import PODS, PreemptionSearch, RunningPods
from controller.eviction.preemption_preview import BOUND, JOBS, Preview, preview_of, read_idle_since
from controller.eviction.recent_evictions import RecentEvictions
from driver.clock import Clock
from driver.kube.client import KubeClient
from driver.kube.get_and_list import read_all
from driver.kube.types import ClaimStatus, Consumer, ExtendedClaimStatus, Key, Node, NodeStatus, Pod
from tessera.simulate.imagined_cluster import ClusterContent, ImaginedCluster
from tessera.simulate.scheduler import PodPlacement

MAX_PODS = 100
"""Pods without a place for which victims are looked for."""

ENOUGH = "1E"
"""Of each resource of a simulated node: simulations place pods by their devices only."""


class VictimFinder:
    """``content`` is what the simulation began with, ``jobs`` are those of its files.

    ``client``: that of the cluster, if there is one.
    """

    def __init__(
        self, policies: GpuPolicies, content: ClusterContent, jobs: Iterable[Job], client: KubeClient | None
    ) -> None:
        self._policies, self._client, self._nodes = policies, client, content.nodes
        self._claims = {claim.metadata.key: claim for claim in content.claims}
        self._running, self._jobs, self._idle_since = dict[Key, Pod](), list(jobs), dict[tuple[str, str], int]()
        if client is not None:
            self._running = {pod.metadata.key: pod for pod in read_all(client, "/api/v1/pods", Pod, BOUND)}
            self._jobs += read_all(client, JOBS, Job)
            self._idle_since = read_idle_since(client)

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
            preview = self._preview(cluster.queue(), pod)
            previews.append(preview)
            if preview.preemption is not None:
                units = preview.preemption.units
                for victim in preview.search.running.of_units(units):
                    del self._running[victim.metadata.key]
                cluster = cluster.fork(frozenset[str]().union(*(unit.claims for unit in units)))
                cluster.settle()
                self._bind(cluster.place(pod))
        return previews

    def _bind(self, placement: PodPlacement) -> None:
        """Keep a pod that has a place, and the claims that it uses."""
        if placement.node is None:
            return
        pod, status = placement.pod, replace(placement.pod.status, phase="Running")
        for claim, allocation in placement.allocations:
            self._claims[claim.metadata.key] = replace(claim, status=ClaimStatus(allocation))
            if claim.metadata.key not in pod.claims:
                status = replace(status, extended_resource_claim_status=ExtendedClaimStatus(claim.metadata.name))
        bound = Pod(pod.metadata, replace(pod.spec, node_name=placement.node), status)
        self._running[pod.metadata.key] = bound
        for claim in (self._claims[key] for key in bound.claims):
            users = (*claim.status.reserved_for, Consumer("pods", pod.metadata.name, pod.metadata.uid))
            self._claims[claim.metadata.key] = replace(claim, status=replace(claim.status, reserved_for=users))

    def _preview(self, queue: Queue, pod: Pod) -> Preview:
        client, nodes = self._client, [_with_resources(node, pod) for node in self._nodes]
        running = RunningPods(self._running.values(), self._claims.values(), nodes, self._jobs, self._idle_since)
        clock = Clock() if client is None else client.clock
        search = PreemptionSearch(queue, pod, running, self._policies, clock)
        return preview_of(search, None if client is None else Evictor(client, None, RecentEvictions(client, "")))


def _with_resources(node: Node, pod: Pod) -> Node:
    """A node that has enough of what ``pod`` requests, if nothing is known of what it has."""
    enough = dict.fromkeys((PODS, *pod.spec.resource_names), ENOUGH)
    return node if node.status.allocatable else Node(node.metadata, node.spec, NodeStatus(allocatable=enough))
