"""Claims that a node can not prepare, by its plan's status: their pods are placed there and do not start (pure)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from controller.cluster.cache import Snapshot
from controller.eviction.evictor import ADMIN_ACCESS, own_protection
from controller.eviction.failed_starts import FailedStart, is_widespread, starts_to_move
from driver.kube.types import Claim, Key, Pod
from driver.model.plan import FailureCause
from driver.slices.pool_names import Pool

CAUSES: Mapping[FailureCause, str] = {
    FailureCause.GPU: ", because of its GPU",
    FailureCause.NODE: ", because of the node itself",
    FailureCause.OTHER: "",
}


def failed_starts(snapshot: Snapshot, driver: str) -> dict[Key, FailedStart]:
    """What nodes report of claims that exist and have a device of the node, by key of the claim."""
    failed: dict[Key, FailedStart] = {}
    for node, plan in snapshot.plans.items():
        pool = Pool(node, driver).name
        for unprepared in plan.status.unprepared:
            namespace, _, name = unprepared.claim.partition("/")
            claim = snapshot.cluster.claims.find(Key(namespace, name))
            if claim is not None and claim.metadata.uid == unprepared.uid and claim.results_in(driver, pool):
                failed[claim.metadata.key] = FailedStart(node, unprepared)
    return failed


def sentence(start: FailedStart) -> str:
    """That the node can not prepare the claim, since when, and what it answers."""
    unprepared = start.unprepared
    cause = CAUSES[unprepared.cause]
    return f"node {start.node} can't prepare it since {unprepared.since}{cause}: {unprepared.message}"


def next_step(start: FailedStart, claim: Claim, pods: Collection[Pod], snapshot: Snapshot) -> str:
    """What happens to the ``pods`` of ``claim``, by what is known without the controller's Event."""
    if start.unprepared.cause is FailureCause.OTHER:
        return "the kubelet tries it again; no pod is evicted for such a cause"
    has_admin_access = any(result.admin_access for result in claim.results)
    protected = [ADMIN_ACCESS] if has_admin_access else [*filter(None, map(own_protection, pods))]
    if protected:
        return f"its pod is not evicted: {protected[0]}"
    nodes = {moved.node for moved in starts_to_move(snapshot.plans)}
    if is_widespread(len(nodes), len(snapshot.plans)):
        return f"no pod is evicted for it, since {len(nodes)} of {len(snapshot.plans)} nodes can't prepare claims"
    return (
        "its pod is evicted after two minutes (controller.evictFailedStartsAfter), so that its controller replaces it "
        "by one elsewhere, unless its Job or a PodDisruptionBudget forbids it"
    )
