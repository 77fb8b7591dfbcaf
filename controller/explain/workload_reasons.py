"""Why what Kueue's queued Workloads will claim is not free (pure).

Kueue decides by quotas, which the controller does not know: a Workload whose devices are free gets no reason here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from controller.cluster.node_views import UnreportedNodes
from controller.demand.queued_workloads import WorkloadQueue
from controller.explain.reason import ClaimReason, ReasonCode
from controller.explain.sources.lacking_devices import Reasoning, reason_of
from driver.kube.types import Key, Metadata

DECIDED_AT_ADMISSION = {ReasonCode.NO_NODE, ReasonCode.OTHER_NODES}
"""Left out: a ResourceFlavor may change where the pods may run."""


INTERVAL_SECONDS, EXPLAIN_SECONDS = 5.0, 0.25
"""Time between two explanations, and about how long one may take: pods wait for it meanwhile."""


class WorkloadReasons:
    """Explains the Workloads in turn, as many at a time as there is time for."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due_at = -math.inf
        self._explained = 0
        """How many claims of the queue have had their turn."""

    def of(self, queue: WorkloadQueue, unreported: UnreportedNodes) -> Iterator[tuple[Metadata, ClaimReason]]:
        """One reason of each Workload, by its metadata."""
        began = self._clock()
        if began < self._due_at:
            return
        self._due_at = began + INTERVAL_SECONDS
        done: set[Key] = set()
        reasoning, first = Reasoning(queue), self._explained % max(1, len(queue.pending))
        for pending in (*queue.pending[first:], *queue.pending[:first]):
            self._explained += 1
            origin = queue.origin(pending)
            workload = origin.workload.metadata
            reason = None if workload.key in done else reason_of(pending, reasoning, unreported)
            if reason is not None and reason.code not in DECIDED_AT_ADMISSION:
                done.add(workload.key)
                where = f"pod set {origin.pod_set.name}, claim {origin.name}: "
                yield workload, reason._replace(sentence=where + reason.sentence)
            if self._clock() - began > EXPLAIN_SECONDS:
                return
