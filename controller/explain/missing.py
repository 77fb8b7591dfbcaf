"""Pods that refer to claims which do not exist (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from controller.cluster.claim_index import ClusterState
from controller.demand.pending_claims import PendingClaim, is_pending
from controller.explain.reason import ClaimReason, ReasonCode
from driver.kube.types import Claim, ClaimSpec, DeviceClaim, Key, Metadata, Pod


def missing_claims(cluster: ClusterState) -> Iterator[ClaimReason]:
    """One reason for each pending pod that lacks a claim, once a scheduler has reported on it.

    Before that, the watch of claims may only be later than that of pods.
    """
    for pod in cluster.pods:
        if is_pending(pod) and any(each.keeps_from_scheduling for each in pod.status.conditions):
            sentence = _missing(pod, cluster)
            if sentence:
                claim = Claim(Metadata(pod.metadata.name, pod.metadata.namespace), ClaimSpec(DeviceClaim(())))
                pending = PendingClaim(claim, (pod,), not_created=True)
                yield ClaimReason(pending, ReasonCode.NO_SUCH_CLAIM, sentence)


def _missing(pod: Pod, cluster: ClusterState) -> str:
    created = {each.name for each in pod.status.resource_claim_statuses}
    for each in pod.spec.resource_claims:
        if each.resource_claim_name is None:
            if each.name not in created:
                return (
                    f"the claim for {each.name} has not been created from its ResourceClaimTemplate: does the template "
                    "exist, and does kube-controller-manager run? (kubectl describe pod)"
                )
        elif cluster.claims.find(Key(pod.metadata.namespace, each.resource_claim_name)) is None:
            return f"it refers to the ResourceClaim {each.resource_claim_name}, which does not exist"
    return ""
