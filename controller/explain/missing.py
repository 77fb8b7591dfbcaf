"""Pods that refer to claims which do not exist (pure)."""

from __future__ import annotations

from datetime import datetime

from controller.cluster.claim_index import ClusterState
from controller.demand.pending_claims import PendingClaim, is_pending
from controller.explain.reason import ClaimReason, ReasonCode
from driver.kube.clock import Clock
from driver.kube.types import Claim, ClaimSpec, DeviceClaim, Key, Metadata, Pod

GRACE_SECONDS = 2.0


class MissingClaims:
    """Finds pods that lack a claim, once they are a moment old: the watch of claims may be later than that of pods."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.next_s: float | None = None
        """Seconds until a pod that lacks a claim is old enough."""

    def reasons(self, cluster: ClusterState) -> list[ClaimReason]:
        """One reason for each pending pod that lacks a claim."""
        found, young = [], []
        for pod in cluster.pods:
            sentence = _missing(pod, cluster) if is_pending(pod) else ""
            if not sentence:
                continue
            left = GRACE_SECONDS - self._age_of(pod)
            if left > 0:
                young.append(left)
                continue
            claim = Claim(
                Metadata(name=pod.metadata.name, namespace=pod.metadata.namespace), ClaimSpec(DeviceClaim(()))
            )
            pending = PendingClaim(claim, (pod,), not_created=True)
            found.append(ClaimReason(pending, ReasonCode.NO_SUCH_CLAIM, sentence, permanent=True))
        self.next_s = min(young, default=None)
        return found

    def _age_of(self, pod: Pod) -> float:
        created = pod.metadata.creation_timestamp
        if created is None:
            return GRACE_SECONDS
        return (self._clock.now() - datetime.fromisoformat(created)).total_seconds()


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
