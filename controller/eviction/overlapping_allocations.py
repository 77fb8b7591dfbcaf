"""Eviction of pods whose claim was allocated a device that overlaps one that another claim holds already.

Counters or the fence prevent this, but an allocation may arrive late all the same. The node plugin prepares the first
claim and refuses the other one, whose pods would wait forever: the scheduler does not take back what it has bound.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple, Protocol

import msgspec

from controller.cluster.claim_index import ClaimIndex
from controller.cluster.fleet import Fleet, FleetGpu
from controller.settings import ControllerSettings
from driver.config.shared_flags import SUBDOMAIN
from driver.errors import CONFLICT, NOT_FOUND, ApiError
from driver.kube.client import KubeClient, Object
from driver.kube.events import Recorder
from driver.kube.reads import read_claim, read_object
from driver.kube.types import Claim, Pod, Reference
from driver.model.plan import Held
from driver.slices.pool_names import Pool

log = logging.getLogger(__name__)

REASON = "GpuConflict"

CONFLICT_SECONDS = 15.0
"""Time that a conflict lasts before anything is done: a claim that is deallocated ends it by itself. The time between
two attempts, too."""

PASS_SECONDS = 1.0
"""Time after which a pass leaves other conflicts to the next one: decisions wait meanwhile."""

POD = msgspec.json.Decoder(Pod)


class Conflict(NamedTuple):
    """Devices of one node, the same or overlapping ones, that two claims hold."""

    node: str
    one: Held
    other: Held


class RefusedClaim(NamedTuple):
    """The claim of a conflict that the node can't prepare: ``own`` overlaps ``held``, which another claim has."""

    claim: Claim
    own: Held
    held: Held


def conflicts_on(node: str, gpus: Iterable[FleetGpu], holders: Mapping[str, Sequence[Held]]) -> frozenset[Conflict]:
    """The conflicts on one node; ``holders`` are the claims that hold each device, by name."""
    devices = {(name, name) for name, claims in holders.items() if len(claims) > 1}
    devices |= {pair for gpu in gpus for pair in gpu.overlaps}
    pairs = (pair for first, second in devices for pair in product(holders.get(first, ()), holders.get(second, ())))
    return frozenset(Conflict(node, *sorted(pair, key=str)) for pair in pairs if pair[0].claim != pair[1].claim)


def refused_claim(conflict: Conflict, one: Claim, other: Claim, driver: str) -> RefusedClaim | None:
    """None unless both claims still have their devices, and the node has prepared exactly one of them."""
    pool = Pool(conflict.node, driver).name
    sides = ((one, conflict.one, conflict.other), (other, conflict.other, conflict.one))
    for claim, own, _ in sides:
        if not any(
            (result.driver, result.pool, result.device) == (driver, pool, own.device) and not result.admin_access
            for result in claim.results
        ):
            return None
    unprepared = [side for side in sides if not _prepared(side[0], driver, pool, side[1].device)]
    return RefusedClaim(*unprepared[0]) if len(unprepared) == 1 else None


def _prepared(claim: Claim, driver: str, pool: str, device: str) -> bool:
    """Whether the node plugin reports that device of the claim, healthy or not."""
    place = (driver, pool, device)
    statuses = (status for status in claim.status.devices if (status.driver, status.pool, status.device) == place)
    return any(condition.type == "Ready" for status in statuses for condition in status.conditions)


def pod_names(claim: Claim) -> list[str]:
    """The pods that the claim is reserved for. A name that no pod can have is left out: it could lead elsewhere."""
    pods = (consumer.name for consumer in claim.status.reserved_for if consumer.resource == "pods")
    return [name for name in pods if SUBDOMAIN.fullmatch(name)]


def is_stuck(pod: Pod, claim: Claim) -> bool:
    """Whether the pod waits on its node for ``claim`` to be prepared."""
    waits = pod.status.phase == "Pending" and pod.spec.node_name and pod.metadata.deletion_timestamp is None
    return bool(waits) and claim.metadata.key in pod.claims


def is_replaced(pod: Pod) -> bool:
    """Whether a controller, such as that of a Job, creates another pod after this one."""
    return any(owner.controller for owner in pod.metadata.owner_references)


def eviction_of(pod: Pod) -> Object:
    """The body of a request that evicts this pod, and no other of its name."""
    metadata = {"name": pod.metadata.name, "namespace": pod.metadata.namespace}
    options = {"preconditions": {"uid": pod.metadata.uid}}
    return {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata, "deleteOptions": options}


def message_of(pod: Pod, refused: RefusedClaim, node: str) -> str:
    """What happened to the pod, in an Event."""
    own, held = refused.own, refused.held
    overlap = "which" if own.device == held.device else f"which overlaps {held.device}, which"
    cause = f"claim {own.claim} was allocated {own.device} of node {node}, {overlap} claim {held.claim} holds"
    if is_replaced(pod):
        return f"{cause}: this pod can not start and is evicted, so that its controller replaces it by one on free GPUs"
    return f"{cause}: this pod can not start; it has no controller that would replace it, so it must be deleted"


class EvictionCounter(Protocol):
    """Counts evicted pods."""

    def pod_evicted(self) -> None: ...


class OverlapEvictor:
    """Finds conflicts as decisions are made, and resolves those that last."""

    def __init__(
        self,
        client: KubeClient,
        recorder: Recorder,
        settings: ControllerSettings,
        counter: EvictionCounter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._recorder, self._counter, self._clock = client, recorder, counter, clock
        self._driver, self._is_enabled = settings.driver_name, settings.evict_conflicting
        self._by_node: dict[str, frozenset[Conflict]] = {}
        self._due: dict[Conflict, float] = {}

    @property
    def next_s(self) -> float | None:
        """Seconds until the next attempt; None: there is no conflict."""
        return max(0.0, min(self._due.values()) - self._clock()) if self._due else None

    def update(self, claims: ClaimIndex, fleet: Fleet, changed: Iterable[str]) -> None:
        """Find the conflicts on the nodes that changed, and resolve those that are due. Raises nothing."""
        if not self._is_enabled:
            return
        for node in changed:
            holders = claims.holders(Pool(node, self._driver).name)
            self._by_node[node] = conflicts_on(node, fleet.nodes.get(node, ()), holders)
            if not self._by_node[node]:
                del self._by_node[node]
        began = self._clock()
        lasting = frozenset[Conflict]().union(*self._by_node.values())
        self._due = {conflict: self._due.get(conflict, began + CONFLICT_SECONDS) for conflict in lasting}
        due = [conflict for conflict, at in self._due.items() if at <= began]
        for conflict in sorted(due, key=self._due.__getitem__):
            self._due[conflict] = self._clock() + CONFLICT_SECONDS
            for error in self._resolve(conflict, began + PASS_SECONDS):
                log.warning(
                    "the pods of one of two claims with overlapping devices cannot be evicted now, trying again",
                    extra={"node": conflict.node, "claim": conflict.one.claim, "error": str(error)},
                )
            if self._clock() > began + PASS_SECONDS:
                break

    def _resolve(self, conflict: Conflict, until: float) -> list[ApiError]:
        """Evict the pods of the claim that can't be prepared. Returns the failures that are worth another attempt."""
        try:
            one, other = (read_claim(self._client, *held.claim.split("/")) for held in (conflict.one, conflict.other))
        except ApiError as error:
            return [error] if error.status != NOT_FOUND else []
        refused = refused_claim(conflict, one, other, self._driver)
        if refused is None:
            return []
        failures: list[ApiError] = []
        for name in pod_names(refused.claim):
            try:
                self._evict(name, refused, conflict.node)
            except ApiError as error:
                failures += [error] if error.status not in (NOT_FOUND, CONFLICT) else []
            if self._clock() > until:
                break
        return failures

    def _evict(self, name: str, refused: RefusedClaim, node: str) -> None:
        """Evict the pod if it is stuck and will be replaced, and say so in an Event. Raises ApiError."""
        namespace = refused.claim.metadata.namespace
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        pod = read_object(self._client, path, POD)
        if not is_stuck(pod, refused.claim):
            return
        if is_replaced(pod):
            self._client.create(f"{path}/eviction", eviction_of(pod))
            if self._counter is not None:
                self._counter.pod_evicted()
            log.warning(
                "evicted a pod whose claim was allocated a device that overlaps one of another claim",
                extra={
                    "pod": f"{namespace}/{name}",
                    "node": node,
                    "claim": refused.own.claim,
                    "device": refused.own.device,
                    "holder": refused.held.claim,
                },
            )
        about = Reference("Pod", name, namespace, pod.metadata.uid)
        self._recorder.event(about, REASON, message_of(pod, refused, node), "Warning")
