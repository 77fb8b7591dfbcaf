"""The reason why a gang is pending as a whole, though there may be room for some of its pods (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from controller.demand.gangs import Gang
from controller.demand.pending_claims import Queue
from controller.explain.reason import ClaimReason, Reason, ReasonCode
from controller.explain.sources.scheduler_reports import age_of
from driver.clock import Clock
from driver.kube.types import Pod

GRACE_SECONDS = 2.0
"""Time that the pods of a gang have to be created, one after the other."""


def reason_of_gang(queue: Queue, gang: Gang) -> Reason | None:
    """Why the scheduler can not place ``gang``; None if unknown, or if pods are missing, which it reports itself."""
    if gang.missing:
        return None
    emptied = queue.with_feasibility(queue.feasibility.unheld).room(gang)
    permanent = emptied.pods < gang.needed
    room = emptied if permanent else queue.room(gang)
    free = "even if nothing were held, there would be room for" if permanent else "free devices are enough for"
    nodes = f"{room.nodes} {'node' if room.nodes == 1 else 'nodes'}"
    at_most = f"{free} {f'{room.pods} of them at most, on {nodes}' if room.pods else 'none of them'}"
    sentence = f"PodGroup {gang.group.metadata.name} needs {_needed(queue, gang)} at once; {at_most}"
    return Reason(ReasonCode.GANG, sentence, permanent)


def reasons_of_incomplete_gangs(queue: Queue, clock: Clock) -> Iterator[ClaimReason]:
    """The reasons of gangs whose pods have not all been created a moment after the others."""
    for gang in queue.gangs:
        if not gang.missing or any(age_of(pod, clock) < GRACE_SECONDS for pod in gang.pods):
            continue
        name, more = gang.group.metadata.name, f"{gang.missing} more {'exists' if gang.missing == 1 else 'exist'}"
        sentence = (
            f"PodGroup {name} needs {gang.needed} pods at once, and only {len(gang.pods)} wait: the scheduler "
            f"tries none of them before {more}, without scheduling gates"
        )
        for pending in dict.fromkeys(claim for pod in gang.pods for claim in queue.of_pod(pod)):
            yield ClaimReason(pending, ReasonCode.GANG, sentence, permanent=True, group=gang.group)


def _needed(queue: Queue, gang: Gang) -> str:
    counts = {_devices(queue, pod) for pod in gang.pods}
    if len(counts) > 1 or None in counts:
        return f"{gang.needed} pods with their devices"
    [count] = counts
    return f"{gang.needed} pods with {count} {'device' if count == 1 else 'devices'} each"


def _devices(queue: Queue, pod: Pod) -> int | None:
    """The number of devices of ``pod``; None if that depends on the node or the alternative."""
    counts = {
        None if any(request.count is None for request in requirements.requests) else sum(requirements.counts)
        for requirements in queue.combinations(pod)
    }
    return counts.pop() if len(counts) == 1 else None
