"""The situation in which claims are pending: everything from which their reasons follow (pure).

The leader, a standby, ``tessera why``, ``tessera status`` and ``tessera simulate`` each make this value from what they
know, and ``controller.explain.pipeline`` finds the reasons in it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from controller.cluster.claim_index import PoolDevice
from controller.cluster.node_views import ALL_REPORTED, UnreportedNodes
from controller.demand.pending_claims import PendingClaim, Queue
from driver.kube.slice_types import DetailedSlice
from driver.kube.types import Key, Pod
from driver.model.offer import Offer


class Lookups:
    """Reads of what some reasons need and no cache has. None: not known.

    The methods of this class return None, as for an imagined cluster; ``ClusterReads`` reads from the API server.
    """

    def template_exists(self, template: Key) -> bool | None:
        """Whether there is such a ResourceClaimTemplate."""

    def creation_failure(self, pod: Pod) -> str | None:
        """What kube-controller-manager reports on a pod whose claim it can not create."""

    def pods_of(self, claim: Key) -> Sequence[Pod] | None:
        """The pods for which an allocated claim is reserved, two of them at most."""

    def slices_of(self, driver: str) -> Sequence[DetailedSlice] | None:
        """The ResourceSlices of another driver."""


@dataclass(frozen=True)
class DisjointPlan:
    """What is planned for pending claims where no two offers overlap.

    offers          by key of the claim
    obstructed      those offers that other offers of their GPU keep waiting
    settle_seconds  seconds until a fence has reached all API servers, a flag of the leader; None: not known
    """

    offers: Mapping[str, Collection[Offer]]
    obstructed: Collection[Offer]
    settle_seconds: float | None = None


@dataclass(frozen=True)
class Situation:
    """One moment of the cluster.

    queue               the pending claims and the fleet
    offered             the published devices that can be allocated to new claims, without those known to be fenced
    reserved            by reserved GPU (``gpu-N`` of a pool) the UIDs of the claims and pods that may have any of it
    is_fence_known      whether the fenced devices are known; if not, ``offered`` may have some of them
    unpublished         planned offers of nodes that follow their plans but have not published them yet
    silent              nodes that publish nothing that the scheduler takes, and why
    refusing            nodes that do not publish all offers of their plans, and why
    unreported          nodes that have not reported their GPUs
    plan                what is planned for the claims; None where offers may overlap, or if nobody plans
    controller_silent   seconds since the controller's last heartbeat, if it is overdue; None: it is not, or unknown
    lookups             reads for some of the reasons
    """

    queue: Queue
    offered: Mapping[Offer, PoolDevice] = field(default_factory=dict)
    reserved: Mapping[PoolDevice, frozenset[str]] = field(default_factory=dict)
    is_fence_known: bool = True
    unpublished: Collection[Offer] = ()
    silent: Mapping[str, str] = field(default_factory=dict)
    refusing: Mapping[str, str] = field(default_factory=dict)
    unreported: UnreportedNodes = ALL_REPORTED
    plan: DisjointPlan | None = None
    controller_silent: float | None = None
    lookups: Lookups = field(default_factory=Lookups)

    def reserved_for(self, pending: PendingClaim) -> list[PoolDevice]:
        """The GPUs that are reserved for a claim or its pod."""
        return sorted(gpu for gpu, of in self.reserved.items() if not of.isdisjoint(pending.uids))
