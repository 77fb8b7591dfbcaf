"""How the pods whose claims hold what a pending claim could have relate to its own pod, and which of them could have
their devices on other nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from controller.demand.node_eligibility import Eligibility
from controller.demand.pending_claims import PendingClaim
from controller.explain.reason import ClaimReason, ReasonCode
from controller.explain.situation import Lookups, Situation
from controller.explain.sources.causes_in_pods_and_claims import MAX_LOOKUPS_ONCE, LookedUp
from controller.explain.sources.moves import HeldDevice, with_moves
from controller.explain.sources.no_free_device import Reasoning
from driver.clock import Clock
from driver.kube.types import Key, Pod, Reference

TEMPLATE_HASH = "pod-template-hash"
"""The label that differs between the pods of a Deployment's ReplicaSets."""

MAX_HOLDERS = 5
"""Holding claims whose pods are looked up for one pending claim."""

MAX_POD_LOOKUPS = 2
"""Pods looked up in one decision, each with its claim: offers are more urgent."""

POD_INTERVAL_SECONDS = 60.0
"""Time after which the pod of a claim is looked up again; a claim rarely changes hands."""


class HoldingPod(NamedTuple):
    """A claim that holds devices, by key, and the first of its pods."""

    claim: str
    pod: Pod

    @property
    def priority(self) -> tuple[int, str]:
        return self.pod.spec.priority, self.claim


class HoldingPods:
    """Looks up the pods of claims that hold devices, a few at a time, and remembers them."""

    def __init__(self, clock: Clock, *, watching: bool = True) -> None:
        """``watching``: as for ``ReasonFinder``."""
        self.looked_up = LookedUp(clock, MAX_POD_LOOKUPS if watching else MAX_LOOKUPS_ONCE, POD_INTERVAL_SECONDS)

    def with_relations(self, reason: ClaimReason, reasoning: Reasoning, situation: Situation) -> ClaimReason:
        """``reason`` and, where that is known, how the pods that hold the devices relate to the pending one, and which
        of them could have theirs on other nodes."""
        pending, at, lookups = reason.pending, reasoning.for_claim(reason.pending), situation.lookups
        if reserved := situation.reserved_for(pending):
            names = ", ".join(gpu.device for gpu in reserved)
            more = [f"{names} of pool {reserved[0].pool} is reserved for it and free once the evicted pods have ended"]
        else:
            more = list(relations(pending.pods[0], self._holders(pending, at, lookups)))
            if reason.code in {ReasonCode.HELD, ReasonCode.FRAGMENTED} and not reason.moves:
                may_go = partial(self._may_go, at.queue.eligibility, lookups)
                reason = with_moves(reason, at.queue, reasoning.moves, may_go)
        return reason._replace(sentence="; ".join((reason.sentence, *more)))

    def _may_go(self, eligibility: Eligibility, lookups: Lookups, item: HeldDevice, node: str) -> bool:
        """Whether the only pod of a claim, which has no other claim, may run on ``node``; False if that is unknown."""
        pods = () if node == item.gpu.node else self._pods(item.claim, lookups)
        is_alone = len(pods) == 1 and len(pods[0].claims) == 1
        return node == item.gpu.node or (is_alone and node in eligibility.nodes_for_successor(pods[0]))

    def _pods(self, claim: str, lookups: Lookups) -> Sequence[Pod]:
        namespace, _, name = claim.partition("/")
        return self.looked_up.get(claim, partial(lookups.pods_of, Key(namespace, name))) or ()

    def _holders(self, pending: PendingClaim, reasoning: Reasoning, lookups: Lookups) -> list[HoldingPod]:
        holders: list[HoldingPod] = []
        for claim in reasoning.holders(pending)[:MAX_HOLDERS]:
            holders += [HoldingPod(claim, pod) for pod in self._pods(claim, lookups)[:1]]
        return holders


def workload_of(pod: Pod) -> Reference | None:
    """The controller of ``pod``, or the Deployment if that is a ReplicaSet of one; None: the pod has none."""
    owner = pod.controller
    if owner is None:
        return None
    ending, namespace = f"-{pod.metadata.labels.get(TEMPLATE_HASH)}", pod.metadata.namespace
    if owner.kind == "ReplicaSet" and owner.name.endswith(ending):
        return Reference("Deployment", owner.name.removesuffix(ending), namespace)
    return Reference(owner.kind, owner.name, namespace)


def _is_replaced_by(holder: Pod, waiting: Pod) -> bool:
    """Whether both are pods of one Deployment, of different pod templates."""
    workload, hashes = workload_of(waiting), {pod.metadata.labels.get(TEMPLATE_HASH) for pod in (holder, waiting)}
    is_of_deployment = workload is not None and workload.kind == "Deployment"
    return is_of_deployment and workload_of(holder) == workload and len(hashes) > 1


def relations(waiting: Pod, holders: Sequence[HoldingPod]) -> Iterator[str]:
    """What ``waiting`` has to do with the pods of ``holders``, and what can be done about it."""
    if any(_is_replaced_by(holder.pod, waiting) for holder in holders):
        yield (
            "older pods of its own Deployment are among the holders: set its strategy to maxSurge 0 and maxUnavailable "
            "1, so that a rolling update ends an old pod first"
        )
    least = min(holders, key=lambda holder: holder.priority, default=None)
    if least is not None and least.pod.spec.priority < waiting.spec.priority:
        metadata = least.pod.metadata
        yield (
            f"pod {metadata.key} has one and a lower priority ({least.pod.spec.priority} < {waiting.spec.priority}), "
            "but Kubernetes does not preempt pods for devices: delete it to make room (or see tessera preempt)"
        )
