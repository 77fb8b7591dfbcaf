"""The check of ``tessera status`` about pending claims, by the Events of the controller (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import msgspec

from controller.explain.events import UNREADABLE
from controller.explain.reason import ReasonCode
from driver.kube.client import Object
from driver.kube.types import Claim, Pod
from tessera.status.installation import our_classes, requested_classes
from tessera.status.snapshot import CheckOutput, Finding, Listing, StatusSnapshot, condition_of, read_time
from tessera.tables_and_drawings import counted, shortened

SHOWN = 3
"""Claims with a finding of their own."""

READ_EVENTS = "kubectl get events -A --field-selector reportingComponent=tessera-controller"

MESSAGE_CHARACTERS = 300
"""Longest message of an Event that is shown whole."""

PERMANENT: Mapping[str, str] = {
    ReasonCode.NO_SUCH_CLASS: "create the DeviceClass, or correct the claim",
    ReasonCode.SELECTOR_REFUSED: "correct its selector: tessera lint",
    ReasonCode.SELECTOR_FAILS: "correct its selector: tessera lint",
    ReasonCode.NOTHING_MATCHES: "correct the claim, or add GPUs that have it",
    ReasonCode.TOO_MANY: "ask for less",
    ReasonCode.NO_NODE: "change the pod's node selector, affinity or tolerations, or labels and taints of nodes",
    ReasonCode.OTHER_NODES: "change the pod's node selector, affinity or tolerations, or labels and taints of nodes",
    ReasonCode.FAULT: "repair the GPU or uncordon it (docs/health.md), or change the claim",
    ReasonCode.DEDICATED: "change the label of a node or a GPU (docs/controller.md), or the claim",
    ReasonCode.RESET: "reset one of them when it is idle (docs/health.md), or change the claim",
    ReasonCode.FOREIGN: "end the partitions that Tessera did not make, or change the claim",
    ReasonCode.NO_GPUS: "see node plugins",
    ReasonCode.UNUSED: "see docs/controller.md",
}
"""Remedies of reasons that need an operator; others, such as held GPUs, pass by themselves."""

PERMANENT_IF_FREE: Mapping[str, str] = {
    ReasonCode.CONSTRAINT: "change its constraints, or ask for less",
    ReasonCode.NOT_TOGETHER: "ask for less on one node",
    ReasonCode.GANG: "lower the minCount of its PodGroup, or add GPUs",
}
"""Remedies of reasons that are permanent only if the message contains EVEN_IF_FREE."""

EVEN_IF_FREE = "even if nothing were held"

UNEXPLAINED_AFTER_SECONDS = 60.0
"""A claim that is pending for longer without a reason from the controller is a finding."""


def pending(snapshot: StatusSnapshot) -> CheckOutput:
    explained = _explained(snapshot)
    unexplained = _unexplained(snapshot, {claim.metadata.uid for claim, _ in explained})
    if not explained and not unexplained and snapshot.has_read(Listing.LEASES):
        yield (
            "the controller reports no pending claim"
            if snapshot.is_led
            else "no controller reports why claims are pending"
        )
    if explained:
        codes = Counter(str(event["reason"]) for _, event in explained)
        counts = ", ".join(f"{count} {code}" for code, count in sorted(codes.items()))
        yield f"{len(explained)} pending: {counts} ({READ_EVENTS})"
    if unexplained:
        yield f"{counted(len(unexplained), 'claim')} without a reason"
        yield _no_reason(snapshot, unexplained)
    permanent = [(claim, event) for claim, event in explained if _remedy(event) is not None]
    for claim, event in permanent[:SHOWN]:
        message = str(event.get("message", ""))
        shown = message if len(message) <= MESSAGE_CHARACTERS else f"{message[: MESSAGE_CHARACTERS - 1]}…"
        text = f"is pending, and not because GPUs are held: {event['reason']}: {shown}"
        yield Finding(f"claim {claim.metadata.key}", text, _remedy(event) or "")
    if (more := len(permanent) - SHOWN) > 0:
        yield Finding(f"{more} more", "of the same kind", READ_EVENTS)
    yield from _unreadable(snapshot)


def _remedy(event: Object) -> str | None:
    """The remedy of a permanent reason; None for one that passes by itself."""
    code = str(event["reason"])
    if code in PERMANENT_IF_FREE and EVEN_IF_FREE in str(event.get("message")):
        return PERMANENT_IF_FREE[code]
    return PERMANENT.get(code)


def _unexplained(snapshot: StatusSnapshot, explained: Collection[object]) -> list[Claim]:
    """Claims of unschedulable pods for one of our classes, whose uid is not in ``explained``."""
    pods = [msgspec.convert(pod, Pod) for pod in snapshot.pending_pods if _is_unschedulable(snapshot, pod)]
    needed = {key for pod in pods for key in pod.claims}
    ours = set(our_classes(snapshot))
    return [
        claim
        for claim in snapshot.pending
        if claim.metadata.key in needed and claim.metadata.uid not in explained and ours & set(requested_classes(claim))
    ]


def _is_unschedulable(snapshot: StatusSnapshot, pod: Object) -> bool:
    """Whether the scheduler has been unable to place the pod for long enough."""
    scheduled = condition_of(pod, "PodScheduled")
    if scheduled is None or scheduled.get("status") != "False":
        return False
    since = read_time(scheduled.get("lastTransitionTime"))
    return since is None or (snapshot.now - since).total_seconds() > UNEXPLAINED_AFTER_SECONDS


def _no_reason(snapshot: StatusSnapshot, claims: Sequence[Claim]) -> Finding:
    about = shortened([f"claim {claim.metadata.key}" for claim in claims])
    verb = "is" if len(claims) == 1 else "are"
    remedy = f"read the scheduler's reason: kubectl -n {claims[0].metadata.namespace} describe pod"
    start = "" if snapshot.is_led else "; start a controller: it reports reasons"
    return Finding(about, f"{verb} pending, and no controller reports why", f"{remedy}{start}")


def _unreadable(snapshot: StatusSnapshot) -> CheckOutput:
    """Findings about objects that the controller can't read."""
    found = [event for event in snapshot.events if event.get("reason") == UNREADABLE and snapshot.is_recent(event)]
    for event in found[:SHOWN]:
        about = event["involvedObject"]
        where = f"{about['namespace']}/" if about.get("namespace") else ""
        remedy = f"correct or delete it, and report it as a defect: {READ_EVENTS}"
        yield Finding(f"{about.get('kind')} {where}{about.get('name')}", str(event.get("message", "")), remedy)


def _explained(snapshot: StatusSnapshot) -> list[tuple[Claim, Object]]:
    """Pending claims, each with the controller's latest Event about it."""
    pending = {claim.metadata.uid: claim for claim in snapshot.pending}
    latest: dict[str, Object] = {}
    for event in sorted(snapshot.events, key=lambda event: str(event.get("lastTimestamp") or "")):
        uid = event["involvedObject"].get("uid")
        if event.get("reason") in set(ReasonCode) and snapshot.is_recent(event) and uid in pending:
            latest[uid] = event
    found = [(pending[uid], event) for uid, event in latest.items()]
    return sorted(found, key=lambda each: str(each[0].metadata.key))
