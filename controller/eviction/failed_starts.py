"""Eviction of pods whose claim a node can not prepare because of its hardware or of the node itself.

The scheduler does not take back what it has bound, so that such a pod would wait as long as the cause lasts. The node
plugin reports these claims in its plan's status; without a report, as from an older plugin, nobody is evicted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from controller.cluster.claim_index import ClaimIndex
from controller.eviction.evictor import ADMIN_ACCESS, Evictor, Outcome, Trigger, pod_reference
from driver.config.shared_flags import SUBDOMAIN
from driver.errors import CONFLICT, NOT_FOUND, ApiError
from driver.kube.client import KubeClient
from driver.kube.reads import read_claim
from driver.kube.types import Claim, GpuNodePlan, Pod, Reference
from driver.model.plan import FailureCause, UnpreparedClaim
from driver.slices.pool_names import Pool

log = logging.getLogger(__name__)

REASON = "FailedStart"

RETRY_SECONDS = 30.0
"""Time between two attempts to move the pods of one claim."""

PASS_SECONDS = 1.0
"""Time after which a pass leaves other claims to the next one: decisions wait meanwhile."""

BUDGET_SECONDS, BUDGET_SHARE = 60.0, 0.1
"""Of the pods with claims on a node, at most this share and at least one is evicted within this time."""

STOP_SECONDS, STOP_SHARE = 600.0, 0.1
"""If more than this share of the nodes (and more than one) asks within this time, the cause is no single GPU or node,
perhaps a bad release: then nobody is evicted."""


class FailedStart(NamedTuple):
    """A claim that a node can not prepare."""

    node: str
    unprepared: UnpreparedClaim


def starts_to_move(plans: Mapping[str, GpuNodePlan]) -> Iterator[FailedStart]:
    """What nodes report of claims whose pods could start on another GPU or node."""
    for node, plan in plans.items():
        for unprepared in plan.status.unprepared:
            if unprepared.cause is not FailureCause.OTHER:
                yield FailedStart(node, unprepared)


def is_widespread(nodes: int, of: int) -> bool:
    """Whether so many nodes ask for evictions that nobody is evicted."""
    return nodes > max(1.0, STOP_SHARE * of)


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
        self._asked_at: dict[str, float] = {}
        self._evicted_at: dict[str, list[float]] = {}
        self.next_s: float | None = None
        """Seconds from the last update to the next attempt; None: every claim can be prepared."""

    def update(self, plans: Mapping[str, GpuNodePlan], claims: ClaimIndex) -> None:
        """Read which claims the nodes can not prepare, and move the pods of those that have waited. Raises nothing."""
        if not self._after_seconds:
            return
        now = self._clock()
        failed = {(start.node, start.unprepared.uid): start for start in starts_to_move(plans)}
        self._due = {key: self._due.get(key, now + self._after_seconds) for key in failed}
        self._asked_at |= {start.node: now for start in failed.values()}
        self._asked_at = {node: at for node, at in self._asked_at.items() if at > now - STOP_SECONDS and node in plans}
        due = sorted((at, key) for key, at in self._due.items() if at <= now)
        is_stopped = is_widespread(len(self._asked_at), len(plans))
        for _, key in due:
            self._due[key] = self._clock() + RETRY_SECONDS
            if is_stopped:
                continue
            try:
                self._move(failed[key], claims)
            except (ApiError, msgspec.MsgspecError) as error:
                if not isinstance(error, ApiError) or error.status not in (NOT_FOUND, CONFLICT):
                    extra = {"node": key[0], "claim": failed[key].unprepared.claim, "error": str(error)}
                    log.warning("the pods of a claim that can't be prepared can't be evicted now", extra=extra)
            if self._clock() > now + PASS_SECONDS:
                break
        if due and is_stopped:
            log.error(
                "too many nodes can't prepare claims: nobody is evicted for it",
                extra={"count": len(self._asked_at), "plans": len(plans)},
            )
        self.next_s = max(0.0, min(self._due.values()) - self._clock()) if self._due else None

    def _move(self, start: FailedStart, claims: ClaimIndex) -> None:
        """Evict the pods of one claim, all or none. Raises ApiError."""
        unprepared, pool = start.unprepared, Pool(start.node, self._driver).name
        namespace, _, name = unprepared.claim.partition("/")
        if not (SUBDOMAIN.fullmatch(namespace) and SUBDOMAIN.fullmatch(name)):
            return  # no claim has such a name; it could lead elsewhere
        claim = read_claim(self._client, namespace, name)
        devices = claim.results_in(self._driver, pool)
        if claim.metadata.uid != unprepared.uid or not devices or _is_prepared(claim, self._driver, pool):
            return
        pods = [pod for pod in self._evictor.consumers(claim) if not pod.metadata.deletion_timestamp]
        if any(pod.status.phase != "Pending" or not pod.spec.node_name for pod in pods):
            return  # one of them has run: the report is out of date
        if not self._has_budget(start.node, len(pods), claims):
            return
        what = ", ".join(result.device for result in devices)
        cause = f"node {start.node} can't prepare {what} for claim {unprepared.claim}: {unprepared.message}"
        protected = ADMIN_ACCESS if any(result.admin_access for result in devices) else None
        for pod in pods:
            protected = protected or self._evictor.protection(pod)
        if protected is not None:
            self._tell(claim, pods, f"{cause}; its pod is not evicted: {protected}")
            self._evictor.count(Trigger.FAILED_START, Outcome.PROTECTED)
            return
        for pod in pods:
            self._evictor.evict(pod, Trigger.FAILED_START)
            self._evicted_at.setdefault(start.node, []).append(self._clock())
            extra = {"pod": f"{namespace}/{pod.metadata.name}", "node": start.node, "claim": unprepared.claim}
            log.warning("evicted a pod whose claim can't be prepared", extra=extra)
        if pods:
            self._tell(claim, pods, f"{cause}; its pod is evicted, so that its controller replaces it by one elsewhere")

    def _has_budget(self, node: str, count: int, claims: ClaimIndex) -> bool:
        since = self._clock() - BUDGET_SECONDS
        self._evicted_at = {name: [at for at in times if at > since] for name, times in self._evicted_at.items()}
        evicted = len(self._evicted_at.get(node, ()))
        holders = claims.holders(Pool(node, self._driver).name)
        held = len({held.claim for of_device in holders.values() for held in of_device})
        return not evicted or evicted + count <= BUDGET_SHARE * held

    def _tell(self, claim: Claim, pods: list[Pod], message: str) -> None:
        metadata = claim.metadata
        itself = Reference("ResourceClaim", metadata.name, metadata.namespace, metadata.uid, "resource.k8s.io/v1")
        self._evictor.tell([itself, *map(pod_reference, pods)], REASON, message)


def _is_prepared(claim: Claim, driver: str, pool: str) -> bool:
    """Whether the node has reported devices of ``claim`` as ready."""
    return any(
        (status.driver, status.pool) == (driver, pool)
        and any(condition.type == "Ready" and condition.status == "True" for condition in status.conditions)
        for status in claim.status.devices
    )
