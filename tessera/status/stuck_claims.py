"""The checks of ``tessera status`` about claims that are pending, or can not be prepared or released, and about evicted
pods (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from controller.eviction.failed_starts import is_widespread, starts_to_move
from controller.explain.events import UNREADABLE
from controller.explain.reason import ReasonCode
from controller.explain.sources.selected_gpus import listed
from controller.report.claim_explainer import OTHER_DRIVERS, Explanation
from controller.report.slice_states import SliceState
from driver.model.plan import FailureCause
from tessera.status.snapshot import CheckOutput, Problem, StatusSnapshot
from tessera.tables_and_drawings import counted

MAX_FINDINGS = 3
"""Claims with a finding of their own."""

READ_EVENTS = "kubectl get events -A --field-selector reportingComponent=tessera-controller"

MESSAGE_CHARACTERS = 300
"""Longest message that is shown whole."""

ADVICE: Mapping[str, str] = {
    ReasonCode.NO_SUCH_CLAIM: "create the claim or its template, or correct the pod",
    ReasonCode.OVER_QUOTA: "delete claims of the namespace, or raise its ResourceQuota",
    ReasonCode.NOT_MAPPED: "give a class that resource (values: extendedResourceNames), or the pod a claim",
    ReasonCode.NODE_NAME: "create the pod with a nodeSelector instead of spec.nodeName",
    ReasonCode.GATED: "remove the gates, or see the queue that has set them",
    ReasonCode.NOT_PLACED: "give the pod what the scheduler reports, or a claim of its own",
    ReasonCode.NO_SUCH_CLASS: "create the DeviceClass, or correct the claim",
    ReasonCode.SELECTOR_REFUSED: "correct its selector: tessera lint",
    ReasonCode.SELECTOR_FAILS: "correct its selector: tessera lint",
    ReasonCode.NOTHING_MATCHES: "correct the claim, or add GPUs that have it",
    ReasonCode.TOO_MANY: "ask for less",
    ReasonCode.NO_NODE: "change the pod's node selector, affinity or tolerations, or labels and taints of nodes",
    ReasonCode.OTHER_NODES: "change the pod's node selector, affinity or tolerations, or labels and taints of nodes",
    ReasonCode.NOT_READY: "repair the node: kubectl describe node",
    ReasonCode.CLOSED: "admit pods to the node again: kubectl uncordon; or annotate its plan as no longer paused",
    ReasonCode.CONSTRAINT: "change its constraints, or ask for less",
    ReasonCode.NOT_TOGETHER: "ask for less on one node",
    ReasonCode.DEDICATED: "change a label, end the node's other driver (docs/troubleshooting.md), or change the claim",
    ReasonCode.CORDONED: "uncordon the GPU: tessera uncordon",
    ReasonCode.FAULT: "repair the GPU or uncordon it (docs/health.md), or change the claim",
    ReasonCode.RESET: "reset one of them when it is idle (docs/health.md), reboot its node, or change the claim",
    ReasonCode.FOREIGN: "remove the partitions that Tessera did not make, or offer them as they are "
    "(--existing-partitions publish), or change the claim",
    ReasonCode.NO_GPUS: "see node plugins",
    ReasonCode.NOT_PUBLISHED: "start its plugin again, or read the log; its kubelet if a claim still has a device",
    ReasonCode.TAINTED: "delete the DeviceTaintRule, or tolerate its taint in the claim",
    ReasonCode.UNUSED: "give the pod what the message names (docs/troubleshooting.md)",
    ReasonCode.GANG: "create its missing pods, lower the minCount (Volcano: minMember) of its PodGroup, or add GPUs",
}
"""General advice by reason, where no single change was found that helps."""


def pending(snapshot: StatusSnapshot) -> CheckOutput:
    if snapshot.plans is None:
        yield "unknown without the CustomResourceDefinition"
        return
    ours = [explanation for explanation in snapshot.pending if explanation.code != OTHER_DRIVERS]
    lasting = [explanation for explanation in ours if explanation.permanent]
    passing = [explanation for explanation in ours if not explanation.permanent]
    parts = [f"{len(passing)} wait{_counts(passing)}"] if passing else []
    if lasting:
        verb = "does not resolve by itself" if len(lasting) == 1 else "do not resolve by themselves"
        parts.append(f"{len(lasting)} {verb}{_counts(lasting)}")
    yield f"{counted(len(ours), 'claim')} pending: {', '.join(parts)}" if ours else "no claim is pending"
    for explanation in lasting[:MAX_FINDINGS]:
        message = explanation.message
        shown = message if len(message) <= MESSAGE_CHARACTERS else f"{message[: MESSAGE_CHARACTERS - 1]}…"
        yield Problem(
            _about(explanation),
            f"is pending, and will not resolve by itself: {explanation.code}: {shown}",
            _remedy(explanation),
        )
    if others := lasting[MAX_FINDINGS:]:
        is_same = len({explanation.code for explanation in lasting}) == 1
        kinds = "of the same kind" if is_same else f"of other kinds, too{_counts(others)}"
        yield Problem(f"{len(others)} more", kinds, "tessera why -A")
    yield from _unreadable(snapshot)


def room(snapshot: StatusSnapshot) -> CheckOutput:
    """Memory that is free and of no use; never a finding."""
    slices = snapshot.capacity.slices.items()
    stranded = sum(count for (_, state), count in slices if state is SliceState.STRANDED)
    yield f"{counted(round(stranded), 'memory slice')} stranded"
    yield f"{counted(sum(snapshot.capacity.scattered.values()), 'whole GPU')} lost to scatter"
    helped = [explanation for explanation in snapshot.pending if explanation.moves]
    yield from (f"for {_about(explanation)} {explanation.moves}" for explanation in helped[:MAX_FINDINGS])


ADVICE_BY_CAUSE: Mapping[FailureCause, str] = {
    FailureCause.GPU: "if new pods get this GPU, too: tessera cordon {node}/gpu-N, and docs/health.md",
    FailureCause.NODE: "mend what the message names on node {node}; until then kubectl cordon {node}",
    FailureCause.OTHER: "correct what the message names; the kubelet tries again about once a minute",
}


def starts(snapshot: StatusSnapshot) -> CheckOutput:
    """Claims that are allocated and that their nodes can not prepare."""
    failed = [(claim, claim.start) for claim in snapshot.unprepared if claim.start is not None]
    causes = Counter(str(start.unprepared.cause) for _, start in failed)
    counts = ", ".join(f"{count} {cause}" for cause, count in sorted(causes.items()))
    yield f"{counted(len(failed), 'claim')} can't be prepared (cause: {counts})" if failed else "no failed preparation"
    for explanation, start in failed[:MAX_FINDINGS]:
        namespace, _, name = explanation.claim.partition("/")
        advice = ADVICE_BY_CAUSE[start.unprepared.cause].format(node=start.node)
        yield Problem(
            _about(explanation), explanation.message, f"{advice}; details: tessera why claim/{name} -n {namespace}"
        )
    if (more := len(failed) - MAX_FINDINGS) > 0:
        yield Problem(f"{more} more", "can't be prepared", "tessera why -A")
    plans = snapshot.plans or {}
    nodes = {start.node for start in starts_to_move(plans)}
    if is_widespread(len(nodes), len(plans)):
        common = "the cause may be everywhere, and no pod is evicted for it"
        message = f"can't prepare claims ({listed(sorted(nodes))}): {common}"
        remedy = "compare what they answer: tessera why -A; if node plugins were upgraded, roll back (docs/failures.md)"
        yield Problem(f"{len(nodes)} of {len(plans)} nodes", message, remedy)


def releases(snapshot: StatusSnapshot) -> CheckOutput:
    """Claims whose pods have ended and that their nodes can not release."""
    unreleased = snapshot.unreleased
    yield f"{counted(len(unreleased), 'claim')} can't be released" if unreleased else "no failed release"
    for explanation in unreleased[:MAX_FINDINGS]:
        namespace, _, name = explanation.claim.partition("/")
        remedy = f"remove what the message names; details: tessera why claim/{name} -n {namespace}"
        yield Problem(_about(explanation), explanation.message, remedy)
    if (more := len(unreleased) - MAX_FINDINGS) > 0:
        yield Problem(f"{more} more", "can't be released", "tessera why -A")


def evictions(snapshot: StatusSnapshot) -> CheckOutput:
    """The pods that were evicted within a day."""
    hours = sum(eviction.gpu_hours for eviction in snapshot.evictions)
    cost = f", {hours:.1f} GPU hours lost" if hours else ""
    yield f"{counted(len(snapshot.evictions), 'pod')} evicted within a day{cost}"
    yield from snapshot.evictions


def _counts(claims: Iterable[Explanation]) -> str:
    codes = Counter(explanation.code for explanation in claims)
    return f" ({', '.join(f'{count} {code}' for code, count in sorted(codes.items()))})"


def _about(found: Explanation) -> str:
    return f"claim {found.claim}" if found.claim else f"pod {found.pods[0].metadata.key}"


def _remedy(found: Explanation) -> str:
    """The changes that were tried and help, or general advice; and the command that explains the claim."""
    kind, _, key = _about(found).partition(" ")
    namespace, _, name = key.partition("/")
    helps = "; or ".join(change.text for change in found.changes[:MAX_FINDINGS])
    advice = f"it would fit if {helps}" if helps else ADVICE.get(found.code, "change the claim, or add GPUs")
    return f"{advice}; details: tessera why {kind}/{name} -n {namespace}"


def _unreadable(snapshot: StatusSnapshot) -> CheckOutput:
    """Findings about objects that the controller can't read."""
    unreadable = [event for event in snapshot.events if event.reason == UNREADABLE and snapshot.is_recent(event)]
    for event in unreadable[:MAX_FINDINGS]:
        about = event.involved_object
        where = f"{about.namespace}/" if about.namespace else ""
        remedy = f"correct or delete it, and report it as a defect: {READ_EVENTS}"
        yield Problem(f"{about.kind} {where}{about.name}", event.message, remedy)
