"""Eviction of pods whose claim a node can not prepare because of its hardware or of the node itself.

The scheduler does not take back what it has bound, so that such a pod would wait as long as the cause lasts. The node
plugin reports these claims in its plan's status; without a report, as from an older plugin, nobody is evicted.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from controller.cluster.claim_index import ClaimIndex
from controller.eviction.evictor import (
    ADMIN_ACCESS,
    PASS_SECONDS,
    Evictor,
    Outcome,
    Trigger,
    pod_reference,
)
from driver.config.flag_values import SUBDOMAIN
from driver.errors import NOT_FOUND, ApiError
from driver.kube.client import KubeClient
from driver.kube.get_and_list import read_claim
from driver.kube.types import Claim, GpuNodePlan, Key, Pod, Reference
from driver.model.plan import MOST_UNPREPARED, FailedClaim, FailureCause
from driver.slices.slice_names import Pool

log = logging.getLogger(__name__)

REASON = "FailedStart"

RETRY_SECONDS, PROTECTED_RETRY_SECONDS = 30.0, 300.0
"""Time between two attempts to move the pods of one claim; after an attempt that found them protected."""

MOST_PODS = 32
"""Most pods of one claim: each is read before any is evicted."""

BUDGET_SECONDS, BUDGET_SHARE = 60.0, 0.1
"""Of the pods with claims on a node, at most this share and at least one is evicted within this time."""

STOP_SECONDS, STOP_SHARE = 600.0, 0.1
"""If more than this share of the nodes (and more than one) asks within this time, the cause is no single GPU or node,
perhaps a bad release: then nobody is evicted."""


class FailedStart(NamedTuple):
    """A claim that a node can not prepare."""

    node: str
    unprepared: FailedClaim

    @property
    def key(self) -> tuple[str, str]:
        """Node and UID of the claim."""
        return self.node, self.unprepared.uid


def claim_of(reported: FailedClaim) -> Key:
    """The claim as the node names it: hostile input."""
    namespace, _, name = reported.claim.partition("/")
    return Key(namespace, name)


def reported_starts(plans: Mapping[str, GpuNodePlan]) -> Iterator[FailedStart]:
    """What nodes report of claims that they can not prepare; of each node no more than it may report."""
    for node, plan in plans.items():
        for unprepared in plan.status.unprepared[:MOST_UNPREPARED]:
            yield FailedStart(node, unprepared)


def starts_to_move(plans: Mapping[str, GpuNodePlan]) -> Iterator[FailedStart]:
    """Those of ``reported_starts`` whose pods could start on another GPU or node."""
    return (start for start in reported_starts(plans) if start.unprepared.cause is not FailureCause.OTHER)


def asking_nodes(starts: Iterable[FailedStart], claims: ClaimIndex) -> set[str]:
    """The nodes that ask for evictions by ``starts``; claims with adminAccess, whose pods are never evicted, do not."""
    of_claims = ((start.node, claims.find(claim_of(start.unprepared))) for start in starts)
    return {node for node, claim in of_claims if claim is None or not claim.has_admin_access}


def is_widespread(nodes: int, of: int) -> bool:
    """Whether so many nodes ask for evictions that nobody is evicted."""
    return nodes > max(1.0, STOP_SHARE * of)


def in_turn(due: Mapping[tuple[str, str], float]) -> list[tuple[str, str]]:
    """The keys (node, claim), the longest due first; a node that has many keeps the others waiting no longer."""
    turns: Counter[str] = Counter()
    order: list[tuple[int, float, tuple[str, str]]] = []
    for key, at in sorted(due.items(), key=lambda item: (item[1], item[0])):
        order.append((turns[key[0]], at, key))
        turns[key[0]] += 1
    return [key for _, _, key in sorted(order)]


class FailedStarts:
    """For one thread. ``after_seconds``: how long a claim must have failed; 0: nobody is evicted."""

    def __init__(
        self,
        client: KubeClient,
        evictor: Evictor,
        driver: str,
        after_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._evictor, self._driver = client, evictor, driver
        self._after_seconds, self._clock = after_seconds, clock
        self._due: dict[tuple[str, str], float] = {}
        self._begun: set[tuple[str, str]] = set()
        """Claims of which pods were evicted: for the others no budget is asked again."""
        self.next_s: float | None = None
        """Seconds from the last update to the next attempt; None: every claim can be prepared."""

    def update(self, plans: Mapping[str, GpuNodePlan], claims: ClaimIndex) -> None:
        """Read which claims the nodes can not prepare, and move the pods of those that have waited. Raises nothing."""
        if not self._after_seconds:
            return
        now = self._clock()
        reported = {start.key for start in reported_starts(plans)}
        failed = {start.key: start for start in starts_to_move(plans)}
        # Another cause for a moment, such as an API server that does not answer, ends no wait.
        self._due = {
            key: self._due.get(key, now + self._after_seconds) for key in reported if key in failed or key in self._due
        }
        self._begun &= reported
        due = in_turn({key: at for key, at in self._due.items() if at <= now and key in failed})
        pause = self._pause(asking_nodes((failed[key] for key in due), claims), plans) if due else None
        for key in due:
            self._due[key] = now + (self._attempt(failed[key], claims) if pause is None else pause)
            if self._clock() > now + PASS_SECONDS:
                break
        # Decisions do not wait for the rest of a pass that was cut off.
        waiting = [self._due[key] for key in failed]
        waits = [max(at - self._clock(), PASS_SECONDS if at <= now else 0.0) for at in waiting]
        self.next_s = min(waits, default=None)

    def _pause(self, nodes: Collection[str], plans: Mapping[str, GpuNodePlan]) -> float | None:
        """Seconds for which nobody is evicted, since too many nodes ask for it or it is not known how many; or None.

        ``nodes`` are those that ask now.
        """
        try:
            asking = self._evictor.recent.asking(nodes, STOP_SECONDS) & plans.keys()
        except ApiError as error:
            log.warning("nobody is evicted now: the record of evictions can't be had", extra={"error": str(error)})
            return RETRY_SECONDS
        if not is_widespread(len(asking), len(plans)):
            return None
        extra: dict[str, object] = {"count": len(asking), "plans": len(plans)}
        log.error("too many nodes can't prepare claims: nobody is evicted for it", extra=extra)
        return PROTECTED_RETRY_SECONDS

    def _attempt(self, start: FailedStart, claims: ClaimIndex) -> float:
        """Move the pods of one claim. Return the number of seconds until the next attempt."""
        try:
            return RETRY_SECONDS if self._move(start, claims) else PROTECTED_RETRY_SECONDS
        except (ApiError, msgspec.MsgspecError) as error:
            if not isinstance(error, ApiError) or error.status != NOT_FOUND:
                extra = {"node": start.node, "claim": start.unprepared.claim, "error": str(error)}
                log.warning("the pods of a claim that can't be prepared can't be evicted now", extra=extra)
            return RETRY_SECONDS

    def _move(self, start: FailedStart, claims: ClaimIndex) -> bool:
        """Evict the pods of one claim, all or none; False if they are protected. Raises ApiError."""
        unprepared, pools = start.unprepared, Pool(start.node, self._driver).names
        namespace, name = claim_of(start.unprepared)
        if not (SUBDOMAIN.fullmatch(namespace) and SUBDOMAIN.fullmatch(name)):
            return False  # no claim has such a name; it could lead elsewhere
        claim = read_claim(self._client, namespace, name)
        devices = claim.results_in(self._driver, pools)
        if claim.metadata.uid != unprepared.uid or not devices or _is_prepared(claim, self._driver, pools):
            return True
        cause = f"node {start.node} can't prepare {', '.join(result.device for result in devices)} "
        cause += f"for claim {unprepared.claim}: {unprepared.message}"
        if len(claim.status.reserved_for) > MOST_PODS:
            self._tell(claim, [], f"{cause}; its pods are not evicted: more than {MOST_PODS} share it")
            return False
        pods = [pod for pod in self._evictor.consumers(claim) if not pod.metadata.deletion_timestamp]
        if any(pod.status.phase != "Pending" or pod.spec.node_name != start.node for pod in pods):
            return True  # one of them has run, or is not bound yet: the report is out of date
        if start.key not in self._begun and not self._has_budget(start.node, len(pods), claims):
            return True
        protected = ADMIN_ACCESS if claim.has_admin_access else self._evictor.protection(pods)
        if protected is not None:
            self._tell(claim, pods, f"{cause}; its pod is not evicted: {protected.reason}")
            for _ in pods:
                self._evictor.count(Trigger.FAILED_START, Outcome.PROTECTED)
            return False
        self._evict(
            start, claim, pods, f"{cause}; its pod is evicted, so that its controller replaces it by one elsewhere"
        )
        return True

    def _evict(self, start: FailedStart, claim: Claim, pods: list[Pod], message: str) -> None:
        """Evict ``pods`` after the API server has agreed to each. Raises ApiError; a later attempt evicts the rest."""
        for pod in self._evictor.evict_all(pods, Trigger.FAILED_START):
            self._begun.add(start.key)
            self._tell(claim, [pod], message)
            extra = {"pod": str(pod.metadata.key), "node": start.node, "claim": start.unprepared.claim}
            log.warning("evicted a pod whose claim can't be prepared", extra=extra)

    def _has_budget(self, node: str, count: int, claims: ClaimIndex) -> bool:
        evicted = self._evictor.recent.on_node(node, BUDGET_SECONDS)
        holders = claims.holders(Pool(node, self._driver).name)
        held = len({held.claim for of_device in holders.values() for held in of_device})
        return not evicted or evicted + count <= BUDGET_SHARE * held

    def _tell(self, claim: Claim, pods: list[Pod], message: str) -> None:
        metadata = claim.metadata
        itself = Reference("ResourceClaim", metadata.name, metadata.namespace, metadata.uid, "resource.k8s.io/v1")
        self._evictor.tell([itself, *map(pod_reference, pods)], REASON, message)


def _is_prepared(claim: Claim, driver: str, pools: Collection[str]) -> bool:
    """Whether the node has reported devices of ``claim`` as ready."""
    return any(
        status.driver == driver
        and status.pool in pools
        and any(condition.type == "Ready" and condition.status == "True" for condition in status.conditions)
        for status in claim.status.devices
    )
