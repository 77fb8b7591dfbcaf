"""Why what Kueue's queued Workloads will claim is not free (pure).

Kueue decides by quotas, which the controller does not know: a Workload whose devices are free gets no reason here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from controller.cluster.kueue import QueuedWorkload
from controller.cluster.node_views import UnreportedNodes
from controller.demand.pending_claims import Queue
from controller.explain.reasons import ClaimReason, ReasonCode, reasons_of
from driver.kube.types import Key, Metadata

DECIDED_AT_ADMISSION = {ReasonCode.NO_NODE, ReasonCode.OTHER_NODES}
"""Left out: a ResourceFlavor may change where the pods may run."""


def reasons_of_workloads(
    queue: Queue, workloads: Iterable[QueuedWorkload], unreported: UnreportedNodes
) -> Iterator[tuple[Metadata, ClaimReason]]:
    """The first reason of each Workload, by its metadata; ``queue`` is that of the Workloads."""
    by_key = {each.metadata.key: each for each in workloads}
    done: set[Key] = set()
    for reason in reasons_of(queue, unreported):
        claim = reason.pending.claim.metadata
        name, index, source = claim.name.split("/", 2)
        key = Key(claim.namespace, name)
        if key not in done and reason.code not in DECIDED_AT_ADMISSION:
            done.add(key)
            workload = by_key[key]
            where = f"pod set {workload.pods[int(index)].name}, claim {source}: "
            yield workload.metadata, reason._replace(sentence=where + reason.sentence)
