"""The claims that hold what a pending one could have, their devices and pods."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from controller.report.claim_explainer import Explanation, key_of
from controller.report.cluster_view import ClusterView
from driver.errors import NOT_FOUND, ApiError, accepted_status
from driver.kube.client import KubeClient
from driver.kube.get_and_list import find_pod, read_claim
from driver.kube.types import Claim, Key

MAX_HOLDERS = 20


@dataclass(frozen=True)
class HoldingClaim:
    """A claim that holds devices; ``created`` as the API server writes it.

    ``terminating``: its first pod, or the claim itself, is being deleted.
    """

    claim: str
    devices: tuple[str, ...]
    pods: tuple[str, ...] = ()
    priority: int | None = None
    created: str | None = None
    terminating: bool = False


def find_claim(client: KubeClient, key: Key) -> Claim | None:
    """The claim; None if there is none. Raises ApiError."""
    with accepted_status(NOT_FOUND):
        return read_claim(client, key.namespace, key.name)
    return None


def holders_of(client: KubeClient, view: ClusterView, explanation: Explanation) -> list[HoldingClaim]:
    """The claims that hold what the pending one could have, those that would have to end first."""
    devices: dict[str, list[str]] = {}
    for (node, device), claims in view.queue.holders.items():
        for claim in claims:
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
        pods = tuple(consumer.name for consumer in claim.pod_consumers) if claim else ()
        pod = find_pod(client, Key(key.namespace, pods[0])) if pods else None
    deleted = any(known is not None and known.metadata.deletion_timestamp for known in (claim, pod))
    created = claim.metadata.creation_timestamp if claim is not None else None
    priority = pod.spec.priority if pod is not None else None
    return HoldingClaim(name, devices, pods, priority, created, bool(deleted))
