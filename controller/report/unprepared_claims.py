"""Claims that a node can not prepare or release, by its plan's status: their pods do not start or end (pure)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from controller.cluster.cache import Snapshot
from controller.eviction.evictor import ADMIN_ACCESS, own_protection
from controller.eviction.failed_starts import FailedStart, asking_nodes, claim_of, is_widespread, starts_to_move
from driver.kube.types import Claim, Key, Pod
from driver.model.plan import FailedClaim, FailureCause, PlanStatus
from driver.slices.slice_names import Pool

CAUSES: Mapping[FailureCause, str] = {
    FailureCause.GPU: ", because of its GPU",
    FailureCause.NODE: ", because of the node itself",
    FailureCause.OTHER: "",
}


class FailedRelease(NamedTuple):
    """A claim whose devices a node can not release, so that its pod stays in Terminating."""

    node: str
    unreleased: FailedClaim

    def __str__(self) -> str:
        return f"node {self.node} can't release it since {self.unreleased.since}: {self.unreleased.message}"


STAYS = "its pod stays in Terminating and its devices stay held until that succeeds; it is tried again every 10 s"
"""What happens to the pod of a claim that can not be released."""


def failed_starts(snapshot: Snapshot, driver: str) -> dict[Key, FailedStart]:
    """What nodes report of claims that exist, have a device of the node and can't be prepared, by key of the claim."""
    unprepared = _reported(snapshot, driver, lambda status: status.unprepared)
    return {key: FailedStart(node, claim) for key, node, claim in unprepared}


def failed_releases(snapshot: Snapshot, driver: str) -> dict[Key, FailedRelease]:
    """The same of claims that can't be released."""
    unreleased = _reported(snapshot, driver, lambda status: status.unreleased)
    return {key: FailedRelease(node, claim) for key, node, claim in unreleased}


def _reported(
    snapshot: Snapshot, driver: str, claims_in: Callable[[PlanStatus], Iterable[FailedClaim]]
) -> Iterator[tuple[Key, str, FailedClaim]]:
    for node, plan in snapshot.plans.items():
        pools = Pool(node, driver).names
        for reported in claims_in(plan.status):
            claim = snapshot.cluster.claims.find(claim_of(reported))
            if claim is not None and claim.metadata.uid == reported.uid and claim.results_in(driver, pools):
                yield claim.metadata.key, node, reported


def sentence(start: FailedStart) -> str:
    """That the node can not prepare the claim, since when, and what it answers."""
    unprepared = start.unprepared
    cause = CAUSES[unprepared.cause]
    return f"node {start.node} can't prepare it since {unprepared.since}{cause}: {unprepared.message}"


def next_step(
    start: FailedStart,
    claim: Claim,
    pods: Collection[Pod],
    snapshot: Snapshot,
    evicts_after: float | None,
    controller_silent: float | None,
) -> str:
    """What happens to the ``pods`` of ``claim``, by what is known without the controller's Event.

    ``evicts_after`` and ``controller_silent``: as ClusterReads has them.
    """
    if start.unprepared.cause is FailureCause.OTHER:
        return "the kubelet tries it again; no pod is evicted for such a cause"
    if evicts_after == 0:
        return "the kubelet tries it again; no pod is evicted for it: controller.evictFailedStartsAfter is 0"
    if controller_silent is not None:
        return f"no pod is evicted while the controller sends no heartbeat, as for {controller_silent:.0f} s now"
    protected = [ADMIN_ACCESS] if claim.has_admin_access else [*filter(None, map(own_protection, pods))]
    if protected:
        return f"its pod is not evicted: {protected[0].reason}"
    nodes = asking_nodes(starts_to_move(snapshot.plans), snapshot.cluster.claims)
    if is_widespread(len(nodes), len(snapshot.plans)):
        return f"no pod is evicted for it, since {len(nodes)} of {len(snapshot.plans)} nodes can't prepare claims"
    after = "controller.evictFailedStartsAfter seconds (unknown here; 0: never)"
    if evicts_after is not None:
        after = f"{evicts_after:g} s (controller.evictFailedStartsAfter)"
    return (
        f"its pod is evicted after {after}, so that its controller replaces it by one elsewhere, unless its Job or a "
        "PodDisruptionBudget forbids it"
    )
