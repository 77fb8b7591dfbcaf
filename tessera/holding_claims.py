"""The claims that hold what a pending one could have: their devices and pods, and how these relate to its own pod."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from controller.report.claim_explainer import Explanation, key_of, workload_of
from controller.report.cluster_view import ClusterView
from driver.errors import NOT_FOUND, ApiError, accepted_status
from driver.kube.client import KubeClient
from driver.kube.typed_reads import read_claim, read_object
from driver.kube.types import Claim, Key, Pod

MAX_HOLDERS = 20

POD_READER = msgspec.json.Decoder(Pod)


@dataclass(frozen=True)
class HoldingClaim:
    """A claim that holds devices; ``created`` as the API server writes it.

    ``terminating``: its first pod, or the claim itself, is being deleted. ``deployment``: that of the first pod.
    """

    claim: str
    devices: tuple[str, ...]
    pods: tuple[str, ...] = ()
    priority: int | None = None
    created: str | None = None
    terminating: bool = False
    deployment: str | None = None


def find_pod(client: KubeClient, key: Key) -> Pod | None:
    """The pod; None if there is none. Raises ApiError."""
    with accepted_status(NOT_FOUND):
        return read_object(client, f"/api/v1/namespaces/{key.namespace}/pods/{key.name}", POD_READER)
    return None


def find_claim(client: KubeClient, key: Key) -> Claim | None:
    """The claim; None if there is none. Raises ApiError."""
    with accepted_status(NOT_FOUND):
        return read_claim(client, key.namespace, key.name)
    return None


def holders_of(client: KubeClient, view: ClusterView, explanation: Explanation) -> list[HoldingClaim]:
    """The claims that hold what the pending one could have, those that would have to end first."""
    devices: dict[str, list[str]] = {}
    for (node, device), claim in view.queue.holders.items():
        devices.setdefault(claim, []).append(f"{node}/{device}")
    first = [claim for change in explanation.changes for claim in change.claims]
    names = list(dict.fromkeys([*first, *explanation.holders]))
    return [_holder(client, claim, tuple(sorted(devices.get(claim, ())))) for claim in names[:MAX_HOLDERS]]


def _holder(client: KubeClient, name: str, devices: tuple[str, ...]) -> HoldingClaim:
    """The claim, without what this account may not read or what has ended meanwhile."""
    key, claim, pod = key_of(name, ""), None, None
    pods: tuple[str, ...] = ()
    with suppress(ApiError):
        claim = find_claim(client, key)
        pods = tuple(user.name for user in claim.status.reserved_for if user.resource == "pods") if claim else ()
        pod = find_pod(client, Key(key.namespace, pods[0])) if pods else None
    deleted = any(known is not None and known.metadata.deletion_timestamp for known in (claim, pod))
    created = claim.metadata.creation_timestamp if claim is not None else None
    priority, deployment = (pod.spec.priority, deployment_of(pod)) if pod is not None else (None, None)
    return HoldingClaim(name, devices, pods, priority, created, bool(deleted), deployment)


def deployment_of(pod: Pod) -> str | None:
    """``namespace/name`` of the Deployment whose ReplicaSet made ``pod``; None: none did."""
    workload = workload_of(pod)
    return f"{workload.namespace}/{workload.name}" if workload and workload.kind == "Deployment" else None


def relations(waiting: Pod, holders: Sequence[HoldingClaim]) -> Iterator[str]:
    """What ``waiting`` has to do with the pods of ``holders``, and what can be done about it."""
    deployment = deployment_of(waiting)
    same = [holder for holder in holders if deployment is not None and holder.deployment == deployment]
    if same and deployment is not None:
        what = f"{len(same)} of these are" if len(same) > 1 else "one of these is"
        namespace, _, name = deployment.partition("/")
        patch = '{"spec":{"strategy":{"rollingUpdate":{"maxSurge":0,"maxUnavailable":1}}}}'
        yield (
            f"{what} held by other pods of the same Deployment {name}: if this is a rolling update, it waits for what "
            "its own old pods have. Let it end an old pod first: "
            f"kubectl patch deployment -n {namespace} {name} -p '{patch}'"
        )
    lower = [holder for holder in holders if holder.priority is not None and holder.priority < waiting.spec.priority]
    if lower:
        least = min(lower, key=lambda holder: (holder.priority or 0, holder.claim))
        namespace, pod = least.claim.partition("/")[0], least.pods[0]
        what = "all of these have" if len(lower) == len(holders) else f"{len(lower)} of these have"
        yield (
            f"{what} a lower priority than pod {waiting.metadata.name} ({waiting.spec.priority}), but Kubernetes does "
            f"not preempt pods for devices: end one yourself, such as kubectl delete pod -n {namespace} {pod}"
        )
