"""What the scheduler reports on pods, and whether it does (pure)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from controller.demand.pending_claims import Queue
from controller.demand.pod_requests import requested
from controller.explain.reason import OF_THE_POD, ClaimReason, ReasonCode
from driver.clock import Clock
from driver.kube.types import Condition, Pod

SILENT_SECONDS = 2.0
"""Age of a pod at which a scheduler that handles no other pod is taken to be absent."""

NO_REPORT, REPORTS = "no scheduler has reported", "the scheduler reports"

EXPECTED = re.compile(
    r"cannot allocate all claims|resourceclaim not available on the node|taint|node affinity/selector"
    r"|were unschedulable|requested node name|minAvailable is satisfied",
    re.IGNORECASE,
)
"""Parts of a report about what Tessera knows itself: devices, gangs, and the nodes that exclude the pod."""

NODES = re.compile(r"\d+/\d+ nodes are (?:un)?available: (?P<parts>.*)", re.DOTALL)
"""As kube-scheduler reports, and Volcano, which may say first what it says of the gang."""
END = re.compile(r"\. (?:still not schedulable|no new claims to deallocate|preemption)", re.IGNORECASE)

GENERATED = re.compile(r'^\(combined from similar events\): |(?<=\w) "[^"]*"(?= is forbidden)')
"""Parts of a refusal that differ from try to try: the name that the claim would have got."""

INSUFFICIENT = re.compile(r"Insufficient ([\w./-]+\w)")


def report_of(pod: Pod) -> Condition | None:
    """What the scheduler reports on ``pod``; None if it has not reported."""
    return next(
        (condition for condition in pod.status.conditions if condition.keeps_from_scheduling and condition.message),
        None,
    )


def names_obstacle(report: Condition) -> bool:
    """Whether it names something besides devices and excluded nodes: CPU, ports, volumes, other pods, an error."""
    return any(not EXPECTED.search(part) for part in _parts(report))


def _parts(report: Condition) -> list[str]:
    """What it says of nodes, for each cause; or the whole message."""
    match = NODES.search(report.message)
    return END.split(match["parts"])[0].rstrip(".").split(", ") if match else [report.message]


def reported(pod: Pod, report: Condition) -> str:
    """The report, and how much the pod requests of each resource that it says is insufficient."""
    lacking = dict.fromkeys(INSUFFICIENT.findall(report.message))
    amounts = [f"{name} {' + '.join(map(str, parts))}" for name in lacking if (parts := requested(pod.spec, name))]
    requests = f" (the pod requests {', '.join(amounts)})" if amounts else ""
    return f"{REPORTS} on pod {pod.metadata.name}: {refusal(report.message).rstrip('. ')}{requests}"


def refusal(message: str) -> str:
    """Why a claim could not be created, the same for each try."""
    return GENERATED.sub("", message)


COMPLETE = {*OF_THE_POD, ReasonCode.NO_SUCH_CLASS, ReasonCode.WAITS}
"""Reasons to which the scheduler's view adds nothing."""


class SchedulerActivity:
    """When each scheduler handled a pod for the last time."""

    def __init__(self, queue: Queue, clock: Clock) -> None:
        self._clock = clock
        self._untried = {pod.metadata.key for gang in queue.gangs if gang.missing for pod in gang.pods}
        """Pods of which no scheduler reports anything, because others of their gang are missing."""
        latest: dict[str, str] = {}
        for pod in queue.cluster.pods:
            name = pod.spec.scheduler_name
            times = (
                condition.last_transition_time or ""
                for condition in pod.status.conditions
                if condition.type == "PodScheduled"
            )
            latest[name] = max((latest.get(name, ""), *times))
        self._latest: Mapping[str, str] = latest

    def is_absent(self, pod: Pod) -> bool:
        """Whether no pod of the scheduler of ``pod`` has been handled since that was created, a moment ago at least."""
        created = pod.metadata.creation_timestamp
        if created is None or age_of(pod, self._clock) < SILENT_SECONDS or pod.metadata.key in self._untried:
            return False
        return self._latest.get(pod.spec.scheduler_name, "") < created


def with_scheduler(reason: ClaimReason, activity: SchedulerActivity) -> ClaimReason:
    """``reason``, with what else keeps the scheduler from placing the first pod, on whatever node."""
    pod = reason.pending.pods[0]
    report = report_of(pod)
    besides = ""
    if report is None and activity.is_absent(pod) and NO_REPORT not in reason.sentence:
        besides = no_report(pod)
    elif report is not None and not any(map(EXPECTED.search, _parts(report))) and REPORTS not in reason.sentence:
        besides = reported(pod, report)
    if not besides or reason.code in COMPLETE:
        return reason
    return reason._replace(sentence=f"{reason.sentence}; besides, {besides}")


def age_of(pod: Pod, clock: Clock) -> float:
    """Seconds since ``pod`` was created; infinite if that is unknown."""
    return clock.seconds_since(pod.metadata.creation_timestamp)


def no_report(pod: Pod) -> str:
    """The cause where no scheduler has reported on ``pod``."""
    name = pod.spec.scheduler_name
    group = "" if pod.pod_group is None else f"does its PodGroup {pod.pod_group.name} exist, and "
    return f"{NO_REPORT} on pod {pod.metadata.name}; {group}does a scheduler named {name} run?"
