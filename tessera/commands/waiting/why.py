"""``tessera why``: why a pod or a claim is pending, and what would help."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import NoReturn

import click
import msgspec

from controller.explain.events import ALLOCATED, COMPONENT, NOT_USED, WrittenEvent
from controller.explain.sources.scheduler_reports import report_of
from controller.explain.sources.selected_gpus import listed
from controller.report.claim_explainer import NOT_PREPARED, TERMINATING, Explainer, Explanation, allocated_claim, key_of
from controller.report.cluster_view import read_cluster
from driver.clock import Clock
from driver.errors import FORBIDDEN, ApiError, FatalError, UsageError
from driver.kube.client import KubeClient
from driver.kube.get_and_list import find_pod, read_all
from driver.kube.types import Claim, Key, Metadata, Pod
from kubelet_plugin.status.claim_status import READY_CONDITION, UNHEALTHY_WAY_OUT
from kubelet_plugin.status.events import EventReason
from tessera.cluster_options import access_of, with_driver_name, with_kubeconfig
from tessera.holding_claims import MAX_HOLDERS, HoldingClaim, find_claim, holders_of
from tessera.tables_and_drawings import columns, counted, printable, with_output

POD_KINDS, CLAIM_KINDS = ("pod", "pods", "po"), ("claim", "resourceclaim", "resourceclaims")

PREPARATION_FAILED = {EventReason.PREPARE_FAILED.value, "FailedPrepareDynamicResources"}
"""Events of the node plugin and of the kubelet."""

NOT_REPORTED = "NotReported"
NO_EVENT = "no Event of the controller says why it is pending (tessera status, for its state)"

MAX_REPORTED = 100
"""Events whose objects are looked for, the latest."""


@click.command()
@click.argument("name", required=False)
@click.option(
    "-n", "--namespace", help="Namespace of NAME, or of all claims that are explained.  [default: that of the context]"
)
@click.option("-A", "--all-namespaces", is_flag=True, help="Explain the pending claims of all namespaces.")
@with_kubeconfig
@with_driver_name
@with_output("text", "json")
def why(
    *,
    name: str | None,
    namespace: str | None,
    all_namespaces: bool,
    kubeconfig: Path | None,
    driver_name: str,
    output: str,
) -> None:
    """Explain why a pod or a claim is pending, and what would help.

    NAME is a pod or a claim: NAME, pod/NAME or claim/NAME. Without it, all pending claims of the namespace are
    explained. The command computes the reasons itself from the API server's objects, also without a controller. Each
    change under "it would fit if" was tried. An account that may not read the whole cluster sees what the controller
    reported last, or what the objects of the namespace say.

    Exit code 0: nothing is pending; 1: something is, or NAME does not exist.

    \b
    Examples:
      tessera why my-pod -n team-a
      tessera why claim/my-claim -n team-a -o json
      tessera why -A
    """
    if name is not None and all_namespaces:
        raise UsageError("NAME and --all-namespaces exclude each other: give one of them")
    access = access_of(kubeconfig)
    client, namespace = KubeClient(access, "tessera-why"), namespace or access.namespace
    try:
        view = read_cluster(client, driver_name)
    except FatalError as refusal:
        if not isinstance(refusal.__cause__, ApiError) or refusal.__cause__.status != FORBIDDEN:
            raise
        if not (explanations := _of_namespace(client, driver_name, name, namespace)):
            raise
        click.echo(f"this is what the objects and Events of the namespace say: {refusal}", err=True)
        is_brief = len(explanations) > 1 and output != "json"
        _print(explanations, [() for _ in explanations], output, client.clock, is_brief=is_brief)
    explainer, where = Explainer(view), None if all_namespaces else namespace
    if name is None:
        waiting = chain(explainer.pending(), explainer.unprepared(), explainer.unreleased())
        explanations = [explanation for explanation in waiting if where in {None, _namespace(explanation)}]
    else:
        explanations = _named(client, explainer, name, namespace)
    explanations = [_with_preparation(client, driver_name, explanation) for explanation in explanations]
    is_brief = name is None and len(explanations) > 1 and output != "json"
    holders = [[] if is_brief else holders_of(client, view, explanation) for explanation in explanations]
    _print(explanations, holders, output, client.clock, is_brief=is_brief)


def _print(
    explanations: Sequence[Explanation],
    holders: Sequence[Sequence[HoldingClaim]],
    output: str,
    clock: Clock,
    *,
    is_brief: bool,
) -> NoReturn:
    if output == "json":
        text = json.dumps(list(map(_as_json, explanations, holders)), indent=2)
    elif is_brief:
        text = "\n".join(_as_line(explanation, clock) for explanation in explanations)
    else:
        texts = (_as_text(*explained, clock) for explained in zip(explanations, holders, strict=True))
        text = "\n\n".join(texts) or "no claim is pending"
    click.echo(text)
    sys.exit(1 if any(explanation.is_pending for explanation in explanations) else 0)


def _reported(client: KubeClient, name: str, namespace: str) -> list[Explanation]:
    """What the controller reported last of ``name`` or of the namespace; empty if this account may not read it."""
    kind, key = _kind_and_key(name, namespace)
    try:
        selector = {"fieldSelector": f"reportingComponent={COMPONENT}"}
        events = list(read_all(client, f"/api/v1/namespaces/{key.namespace}/events", WrittenEvent, selector))
    except (ApiError, msgspec.MsgspecError):
        return []
    events.sort(key=lambda event: event.last_timestamp or "")
    latest = {(event.involved_object.kind, event.involved_object.name): event for event in events[-MAX_REPORTED:]}
    latest = {about: event for about, event in latest.items() if _exists(client, key.namespace, event)}
    explanations = [
        _as_reported(Key(key.namespace, of), of_kind, event)
        for (of_kind, of), event in latest.items()
        if (of == key.name if name else of) and (not kind or (of_kind == "Pod") == (kind in POD_KINDS))
    ]
    return [explanation for explanation in explanations if name or explanation.is_pending]


def _of_namespace(client: KubeClient, driver: str, name: str | None, namespace: str) -> list[Explanation]:
    """What a pod or a claim, the claims of the pod, and Events say; without ``name``, what Events say of the namespace.

    Empty if this account may not read any of them. Raises FatalError if there is no pod and no claim ``name``.
    """
    if name is None:
        return _reported(client, "", namespace)
    try:
        subject = _pod_or_claim(client, name, namespace)
        keys = subject.claims if isinstance(subject, Pod) else ()
        claims = [subject] if isinstance(subject, Claim) else [*filter(None, (find_claim(client, key) for key in keys))]
    except (ApiError, msgspec.MsgspecError):
        return _reported(client, name, namespace)
    starting = (subject,) if isinstance(subject, Pod) and subject.spec.node_name else ()
    explanations = [
        _as_prepared(client, driver, allocated_claim(claim, starting), claim)
        for claim in claims
        if claim.status.allocation is not None
    ]
    if explanations and (isinstance(subject, Claim) or starting):
        return explanations
    if not starting and (reported := _reported(client, name, namespace)):
        return [*explanations, *reported]
    if isinstance(subject, Claim):
        return [Explanation(str(subject.metadata.key), (), NOT_REPORTED, NO_EVENT)]
    of_pod = _without_claims(subject)
    is_unreported = subject.spec.resource_claims and of_pod.code == NOT_USED and not starting
    return [*explanations, replace(of_pod, code=NOT_REPORTED, message=NO_EVENT) if is_unreported else of_pod]


def _exists(client: KubeClient, namespace: str, event: WrittenEvent) -> bool:
    """Whether there is still what ``event`` is about; True, too, if this account may not know."""
    about = event.involved_object
    if not about.name:
        return False
    key = Key(namespace, about.name)
    try:
        there = find_claim(client, key) if about.kind == "ResourceClaim" else find_pod(client, key)
    except (ApiError, msgspec.MsgspecError):
        return True
    return there is not None and about.uid in {"", there.metadata.uid}


def _as_reported(key: Key, kind: str, event: WrittenEvent) -> Explanation:
    message = f"{event.message} (reported {event.last_timestamp})"
    if kind == "ResourceClaim":
        return Explanation(str(key), (), event.reason, message)
    return Explanation("", (Pod(Metadata(name=key.name, namespace=key.namespace)),), event.reason, message)


def _namespace(explanation: Explanation) -> str:
    return explanation.claim.partition("/")[0] if explanation.claim else explanation.pods[0].metadata.namespace


def _named(client: KubeClient, explainer: Explainer, name: str, namespace: str) -> list[Explanation]:
    """The explanations of a pod or a claim. Raises FatalError if there is neither."""
    subject = _pod_or_claim(client, name, namespace)
    if isinstance(subject, Claim):
        return [explainer.of_claim(subject)]
    return explainer.of_pod(subject) or [_without_claims(subject)]


def _pod_or_claim(client: KubeClient, name: str, namespace: str) -> Pod | Claim:
    """The pod ``name``, or else the claim. Raises ApiError, and FatalError if there is neither."""
    kind, key = _kind_and_key(name, namespace)
    if kind not in CLAIM_KINDS and (pod := find_pod(client, key)) is not None:
        return pod
    if kind not in POD_KINDS and (claim := find_claim(client, key)) is not None:
        return claim
    raise FatalError(f"namespace {key.namespace} has no {kind or 'pod or ResourceClaim'} named {key.name}")


def _kind_and_key(name: str, namespace: str) -> tuple[str, Key]:
    """The kind of ``pod/NAME`` or ``claim/NAME``, empty for NAME, and the key of the object."""
    kind, slash, rest = name.partition("/")
    if not slash or kind.lower() not in {*POD_KINDS, *CLAIM_KINDS}:
        return "", key_of(name, namespace)
    return kind.lower(), key_of(rest, namespace)


def _with_preparation(client: KubeClient, driver: str, explanation: Explanation) -> Explanation:
    """With what keeps the pod of a claim that is allocated from starting or working."""
    claim = find_claim(client, key_of(explanation.claim, "")) if explanation.code == ALLOCATED else None
    return explanation if claim is None else _as_prepared(client, driver, explanation, claim)


def _as_prepared(client: KubeClient, driver: str, explanation: Explanation, claim: Claim) -> Explanation:
    """With what keeps the pod from starting or working, by what its node reports in the allocated ``claim``."""
    if (unhealthy := _unhealthy(claim, driver)) is not None:
        return replace(explanation, code=EventReason.UNHEALTHY.value, message=f"{explanation.message}; {unhealthy}")
    prepared = {(device.pool, device.device) for device in claim.status.devices if device.driver == driver}
    if not explanation.pods or all(
        (result.pool, result.device) in prepared for result in claim.results if result.driver == driver
    ):
        return explanation
    uids = [claim.metadata.uid, *(pod.metadata.uid for pod in explanation.pods[:MAX_HOLDERS])]
    warnings = [event for uid in uids for event in _warnings(client, claim.metadata.namespace, uid)]
    latest = max(warnings, key=lambda event: event.last_timestamp or "", default=None)
    node = explanation.pods[0].spec.node_name or "its node"
    if latest is None:
        why = "do the kubelet and the node plugin run there? (tessera status)"
    else:
        why = f"{latest.reason}: {latest.message}"
    return replace(explanation, code=NOT_PREPARED, message=f"{explanation.message}; {node} has not prepared it: {why}")


def _unhealthy(claim: Claim, driver: str) -> str | None:
    """Which devices of a prepared claim are unhealthy, since when and why; None: none is."""
    unhealthy = [
        f"{device.device} is unhealthy since {condition.last_transition_time}: {condition.message}"
        for device in claim.status.devices
        for condition in device.conditions
        if device.driver == driver and condition.type == READY_CONDITION and condition.status == "False"
    ]
    return f"{'; '.join(unhealthy)}; {UNHEALTHY_WAY_OUT}" if unhealthy else None


def _warnings(client: KubeClient, namespace: str, uid: str) -> list[WrittenEvent]:
    """Events of the node plugin and the kubelet about an object."""
    selectors = {"fieldSelector": f"involvedObject.uid={uid},type=Warning"}
    try:
        events = list(read_all(client, f"/api/v1/namespaces/{namespace}/events", WrittenEvent, selectors))
    except (ApiError, msgspec.MsgspecError):
        return []
    return [event for event in events if event.reason in PREPARATION_FAILED]


def _without_claims(pod: Pod) -> Explanation:
    report = report_of(pod)
    reports = () if report is None else ((pod.metadata.name, report.message),)
    if pod.metadata.deletion_timestamp:
        message = (
            f"it is being deleted since {pod.metadata.deletion_timestamp}: the scheduler does not place it any more "
            "(kubectl get pod -o yaml shows finalizers and the grace period)"
        )
        return Explanation("", (pod,), TERMINATING, message, permanent=True, reports=reports)
    message = "none of its claims is pending" if pod.spec.resource_claims else "it has no ResourceClaim"
    if not pod.spec.resource_claims and (plugged := sorted(name for name in pod.spec.resource_names if "/" in name)):
        message += (
            f"; {', '.join(plugged)}, which it requests, is the extendedResourceName of no DeviceClass: only a device "
            "plugin can provide it"
        )
    return Explanation("", (pod,), NOT_USED, message, reports=reports)


def _title(explanation: Explanation, clock: Clock) -> str:
    pods = [printable(str(pod.metadata.key)) for pod in explanation.pods]
    what = f"claim {printable(explanation.claim)}" if explanation.claim else f"pod {pods[0]}"
    used = f" of pod {', '.join(pods[:3])}" if explanation.claim and pods else ""
    created = explanation.pods[0].metadata.creation_timestamp if explanation.pods else None
    since = f", pending for {_age(created, clock)}" if created and explanation.is_pending else ""
    return f"{what}{used}{since}"


def _as_line(explanation: Explanation, clock: Clock) -> str:
    code = click.style(explanation.code, bold=True)
    return f"{_title(explanation, clock)}\n  {code}: {printable(explanation.message)}"


def _as_text(explanation: Explanation, holders: Sequence[HoldingClaim], clock: Clock) -> str:
    lines = [_as_line(explanation, clock)]
    rows = [
        [
            printable(request.name),
            request.needs,
            product.product,
            *map(str, (product.gpus, product.free, product.held)),
            ", ".join(f"{count} {cause}" for cause, count in product.closed.items()) or "0",
        ]
        for request in explanation.requests
        for product in request.products
    ]
    if rows:
        lines += ["", columns(["REQUEST", "NEEDS", "PRODUCT", "GPUS", "FREE", "HELD", "CLOSED"], rows)]
    if holders:
        table = [
            [
                printable(holder.claim),
                ", ".join(holder.devices[:3]) + (" ..." if len(holder.devices) > 3 else ""),
                (printable(", ".join(holder.pods[:2])) or "-") + (" (being deleted)" if holder.terminating else ""),
                "-" if holder.priority is None else str(holder.priority),
                _age(holder.created, clock) if holder.created else "-",
            ]
            for holder in holders
        ]
        lines += ["", columns(["HELD BY", "DEVICES", "POD", "PRIORITY", "AGE"], table)]
    if explanation.changes:
        lines += ["", "it would fit if", *(f"  - {printable(change.text)}" for change in explanation.changes)]
    reports: dict[str, list[str]] = {}
    for pod, message in (report for report in explanation.reports if report[1] not in explanation.message):
        reports.setdefault(message, []).append(printable(pod))
    for message, pods in reports.items():
        which = "pod" if len(pods) == 1 else "pods"
        lines += ["", f"the scheduler reports on {which} {listed(pods)}: {printable(message)}"]
    return "\n".join(lines)


def _age(created: str, clock: Clock) -> str:
    seconds = max(0, int(clock.seconds_since(created)))
    for size, name in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= 2 * size:
            return counted(seconds // size, name)
    return counted(seconds, "second")


def _as_json(explanation: Explanation, holders: Sequence[HoldingClaim]) -> dict[str, object]:
    return {
        "claim": explanation.claim or None,
        "pods": [str(pod.metadata.key) for pod in explanation.pods],
        "reason": explanation.code,
        "message": explanation.message,
        "requests": msgspec.to_builtins(explanation.requests),
        "holders": [asdict(holder) for holder in holders],
        "changes": msgspec.to_builtins(explanation.changes),
        "schedulerReports": [{"pod": pod, "message": message} for pod, message in explanation.reports],
    }
