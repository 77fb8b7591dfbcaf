"""The claims that hold devices of one GPU: their pods, what protects these, and their eviction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

from controller.eviction.evictor import ADMIN_ACCESS, Evictor, ProtectionRule, own_protection
from driver.errors import FORBIDDEN, ApiError
from driver.kube.client import KubeClient
from driver.kube.get_and_list import list_claims
from driver.kube.types import Claim, GpuNodePlan, Pod
from driver.model.plan import PATH
from driver.slices.slice_names import Pool
from tessera.gpu_names_and_faults import GpuName
from tessera.holding_claims import find_claim


class HoldState(StrEnum):
    """What becomes of claims that hold devices of a GPU.

    EVICTABLE: nothing protects their pods. ENDING: their pods end, or their devices are being released. REFUSED: their
    pods can't be evicted at present. PROTECTED: their pods are left alone.
    """

    EVICTABLE = "Evictable"
    ENDING = "Ending"
    REFUSED = "Refused"
    PROTECTED = "Protected"


@dataclass(frozen=True)
class HeldClaims:
    """Claims that hold devices of the GPU and share pods, of which all are evicted or none.

    ``claims`` and ``pods`` are ``namespace/name``; ``devices`` those of the GPU. ``reason``: why the pods stay, or why
    the devices are not released, and ``remedy`` what an administrator can do; "" if there is nothing to say.
    """

    claims: tuple[str, ...]
    devices: tuple[str, ...]
    pods: tuple[str, ...] = ()
    state: HoldState = HoldState.ENDING
    reason: str = ""
    remedy: str = ""


REMEDIES = {
    ProtectionRule.ADMIN_ACCESS: "end it: {delete}",
    ProtectionRule.NO_CONTROLLER: "delete it when it has done its work: {delete}",
    ProtectionRule.BOUND_TO_NODE: "delete it, its next pod gets another GPU or waits for one: {delete}",
    ProtectionRule.OWNER_LIMIT: "drain the GPU again in an hour, or delete it: {delete}",
    ProtectionRule.JOB_RETRIES: "let it end, or delete it, which counts as a failure of the Job: {delete}",
    ProtectionRule.DISRUPTION_BUDGET: "add replicas, wait until more pods are ready, or change the budget: {budgets}",
}
"""What an administrator can do about protected pods."""


class GpuDrain:
    """Moves the pods off one GPU, step by step. ``report`` is called with a line about each evicted pod.

    Methods raise ApiError.
    """

    def __init__(
        self, client: KubeClient, evictor: Evictor, driver: str, name: GpuName, report: Callable[[str], None]
    ) -> None:
        self._client, self._evictor, self._name, self._report = client, evictor, name, report
        self._driver, self._pools = driver, {Pool(name.node, driver).name}
        self.evicted: list[str] = []
        """The pods that were evicted."""
        self._rehearsed: list[Pod] = []
        """The pods that would be evicted: they count for the limits of the others."""

    def sweep(self, *, evicts: bool) -> list[HeldClaims]:
        """The claims that hold devices of the GPU; their pods are evicted if ``evicts`` and nothing protects them."""
        unreleased = self._unreleased()
        swept = []
        for group in self._groups():
            try:
                held = self._handle(group, evicts=evicts)
            except ApiError as error:
                # Time changes nothing about a missing right, or a policy that refuses the eviction.
                state = HoldState.PROTECTED if error.status == FORBIDDEN else HoldState.REFUSED
                held = replace(self._described(group), state=state, reason=str(error))
            if held is not None and held.state is HoldState.ENDING:
                messages = (unreleased[claim] for claim in held.claims if claim in unreleased)
                held = replace(held, reason=next(messages, ""))
            swept += [held] if held is not None else []
        return swept

    def held_devices(self) -> set[str]:
        """The names of the GPU's devices that claims hold."""
        return {device for group in self._groups() for claim in group for device in self._devices(claim)}

    def _groups(self) -> list[list[Claim]]:
        """The claims that hold devices of the GPU; those that share pods are together."""
        groups: list[list[Claim]] = []
        for claim in list_claims(self._client):
            if self._devices(claim):
                uids = set(_consumer_uids([claim]))
                joined = [group for group in groups if not uids.isdisjoint(_consumer_uids(group))]
                groups = [group for group in groups if group not in joined]
                groups.append([*(other for group in joined for other in group), claim])
        return groups

    def _devices(self, claim: Claim) -> list[str]:
        results = claim.results_in(self._driver, self._pools)
        return [result.device for result in results if not result.admin_access and self._name.has(result.device)]

    def _handle(self, group: Sequence[Claim], *, evicts: bool) -> HeldClaims | None:
        """Evict the pods of ``group`` if ``evicts`` and nothing protects them. None: it has been released."""
        current = (find_claim(self._client, claim.metadata.key) for claim in group)
        uids = {claim.metadata.uid for claim in group}
        claims = [claim for claim in current if claim and claim.metadata.uid in uids and self._devices(claim)]
        if not claims:
            return None
        by_uid = {pod.metadata.uid: pod for claim in claims for pod in self._evictor.consumers(claim)}
        pods = [pod for pod in by_uid.values() if pod.status.phase not in {"Succeeded", "Failed"}]
        held = replace(self._described(claims), pods=_names(pods))
        consumers = (consumer for claim in claims for consumer in claim.status.reserved_for)
        if other := next((consumer for consumer in consumers if consumer.resource != "pods"), None):
            reason = f"reserved for {other.resource}/{other.name}, which is no pod"
            return replace(held, state=HoldState.PROTECTED, reason=reason)
        running = [pod for pod in pods if not pod.metadata.deletion_timestamp]
        if not running:
            return held
        has_admin_access = any(claim.has_admin_access for claim in claims)
        others = [pod for pod in self._rehearsed if pod.metadata.namespace == running[0].metadata.namespace]
        protection = ADMIN_ACCESS if has_admin_access else self._evictor.protection([*running, *others])
        if protection is not None:
            is_lasting = protection.rule is not ProtectionRule.DISRUPTION_BUDGET
            state = HoldState.PROTECTED if is_lasting else HoldState.REFUSED
            remedy = _remedy(protection.rule, running)
            return replace(held, state=state, reason=protection.reason, remedy=remedy)
        if not evicts:
            for pod in running:
                self._evictor.evict(pod, None, is_rehearsal=True)
            self._rehearsed += running
            return replace(held, state=HoldState.EVICTABLE)
        for pod in self._evictor.evict_all(running, None):
            self.evicted.append(str(pod.metadata.key))
            self._report(f"evicted pod {pod.metadata.key}, which used {', '.join(held.devices)}")
        return held

    def _described(self, claims: Sequence[Claim]) -> HeldClaims:
        devices = sorted({device for claim in claims for device in self._devices(claim)})
        namespaces = (
            (claim.metadata.namespace, consumer) for claim in claims for consumer in claim.status.reserved_for
        )
        pods = dict.fromkeys(f"{namespace}/{consumer.name}" for namespace, consumer in namespaces)
        return HeldClaims(tuple(str(claim.metadata.key) for claim in claims), tuple(devices), tuple(pods))

    def _unreleased(self) -> dict[str, str]:
        """What the node reports of claims whose devices it can't release, by claim."""
        plan = self._client.find(f"{PATH}/{self._name.node}")
        try:
            reports = msgspec.convert(plan, GpuNodePlan).status.unreleased if plan is not None else ()
        except msgspec.MsgspecError:
            return {}
        return {report.claim: f"node {self._name.node} can't release it: {report.message}" for report in reports}


def _consumer_uids(claims: Sequence[Claim]) -> Iterator[str]:
    return (consumer.uid for claim in claims for consumer in claim.status.reserved_for)


def _names(pods: Sequence[Pod]) -> tuple[str, ...]:
    return tuple(sorted(str(pod.metadata.key) for pod in pods))


def _remedy(rule: ProtectionRule, pods: Sequence[Pod]) -> str:
    namespace = pods[0].metadata.namespace
    concerned = [pod.metadata.name for pod in pods if own_protection(pod)] or [pod.metadata.name for pod in pods]
    delete = f"kubectl delete pod -n {namespace} {' '.join(sorted(concerned))}"
    return REMEDIES[rule].format(delete=delete, budgets=f"kubectl get poddisruptionbudgets -n {namespace}")
