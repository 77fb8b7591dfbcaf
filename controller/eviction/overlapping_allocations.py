"""Eviction of pods whose claim was allocated a device that overlaps one that another claim holds already.

Counters or the fence prevent this, but an allocation may arrive late all the same. The node plugin prepares the first
claim and refuses the other one, whose pods would wait forever: the scheduler does not take back what it has bound.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from controller.cluster.claim_index import ClaimIndex
from controller.cluster.fleet import Fleet, FleetGpu
from controller.eviction.evictor import PASS_SECONDS, Evictor, Outcome, Trigger, pod_reference
from controller.settings import ControllerSettings
from driver.errors import NOT_FOUND, ApiError
from driver.kube.client import KubeClient
from driver.kube.get_and_list import read_claim
from driver.kube.types import Claim, Pod
from driver.model.device import is_shared, is_shared_partition
from driver.model.plan import Held
from driver.slices.slice_names import Pool

log = logging.getLogger(__name__)

REASON = "GpuConflict"

CONFLICT_SECONDS = 15.0
"""Time that a conflict lasts before anything is done: a claim that is deallocated ends it by itself. The time between
two attempts, too."""


class Conflict(NamedTuple):
    """Devices of one node, the same or overlapping ones, that two claims hold.

    ``room``: of a shared device the GiB that its claims, here all of them, can have; they have more.
    """

    node: str
    devices: tuple[Held, ...]
    room: int = 0


class RefusedClaim(NamedTuple):
    """The claim of a conflict that the node can't prepare: ``device`` overlaps ``held``, which another claim has.

    ``conflict`` says the same for people.
    """

    claim: Claim
    device: Held
    held: Held
    conflict: str


def conflicts_on(node: str, gpus: Iterable[FleetGpu], holders: Mapping[str, Sequence[Held]]) -> frozenset[Conflict]:
    """The conflicts on one node; ``holders`` are the claims that hold each device, by name."""
    devices = {(name, name) for name, claims in holders.items() if len(claims) > 1 and not is_shared(name)}
    overdrawn = set[Conflict]()
    for gpu in gpus:
        for first, second in gpu.overlaps:
            if first == second and is_shared(first):
                device = next(held for held in gpu.held if held.name == first)
                overdrawn.add(Conflict(node, tuple(sorted(holders.get(first, ()), key=str)), gpu.capacity(device)))
            else:
                devices.add((first, second))
    pairs = (pair for first, second in devices for pair in product(holders.get(first, ()), holders.get(second, ())))
    conflicts = (Conflict(node, tuple(sorted(pair, key=str))) for pair in pairs if pair[0].claim != pair[1].claim)
    return frozenset(conflicts) | overdrawn


def refused_claim(conflict: Conflict, claims: Sequence[Claim], driver: str) -> RefusedClaim | None:
    """The newest that the node has not prepared, of ``claims``, those of the conflict.

    None unless all have their devices, and the node has prepared some of them and, of two, not both.
    """
    pool = Pool(conflict.node, driver).name
    unprepared, prepared = list[tuple[Claim, Held]](), list[Held]()
    for claim, device in zip(claims, conflict.devices, strict=True):
        place = (driver, pool, device.device)
        results = (result for result in claim.results if not result.admin_access)
        if place not in {(result.driver, result.pool, result.device) for result in results}:
            return None
        statuses = (status for status in claim.status.devices if (status.driver, status.pool, status.device) == place)
        if any(condition.type == "Ready" for status in statuses for condition in status.conditions):
            prepared.append(device)
        else:
            unprepared.append((claim, device))
    if not prepared or not unprepared:
        return None
    claim, device = max(unprepared, key=lambda pair: (pair[0].metadata.creation_timestamp or "", pair[1].claim))
    return RefusedClaim(claim, device, prepared[0], _described(conflict, device, prepared[0]))


def _described(conflict: Conflict, refused: Held, held: Held) -> str:
    """What is wrong with the device ``refused``: the end of a sentence."""
    if conflict.room:
        allocated = sum(device.gib or conflict.room for device in conflict.devices)
        unit = "compute instances" if is_shared_partition(refused.device) else "GiB"
        return f"of whose {conflict.room} {unit} claims have {allocated}"
    overlap = "which" if refused.device == held.device else f"which overlaps {held.device}, which"
    return f"{overlap} claim {held.claim} holds"


def message_of(pod: Pod, refused: RefusedClaim, node: str, owner_limit: str | None = None) -> str:
    cause = f"claim {refused.device.claim} was allocated {refused.device.device} of node {node}, {refused.conflict}"
    if owner_limit is not None:
        return f"{cause}: this pod can not start; it is not evicted, because {owner_limit}"
    if pod.controller is not None:
        return f"{cause}: this pod can not start and is evicted, so that its controller replaces it by one on free GPUs"
    return f"{cause}: this pod can not start; it has no controller that would replace it, so it must be deleted"


class OverlapEvictor:
    """Finds conflicts as decisions are made, and resolves those that last."""

    def __init__(
        self,
        client: KubeClient,
        evictor: Evictor,
        settings: ControllerSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._evictor, self._clock = client, evictor, clock
        self._driver, self._is_enabled = settings.driver_name, settings.evict_conflicting
        self._by_node: dict[str, frozenset[Conflict]] = {}
        self._due: dict[Conflict, float] = {}
        self.next_s: float | None = None
        """Seconds from the last update to the next attempt; None: there is no conflict."""

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
                    extra={"node": conflict.node, "claim": conflict.devices[0].claim, "error": str(error)},
                )
            if self._clock() > began + PASS_SECONDS:
                break
        self.next_s = max(0.0, min(self._due.values()) - self._clock()) if self._due else None

    def _resolve(self, conflict: Conflict, until: float) -> list[ApiError]:
        """Evict the pods of the claim that can't be prepared. Returns the failures that are worth another attempt."""
        try:
            claims = [read_claim(self._client, *device.claim.split("/")) for device in conflict.devices]
        except ApiError as error:
            return [error] if error.status != NOT_FOUND else []
        refused = refused_claim(conflict, claims, self._driver)
        if refused is None:
            return []
        failures: list[ApiError] = []
        try:
            pods = self._evictor.consumers(refused.claim)
        except ApiError as error:
            return [error]
        for pod in pods:
            try:
                self._evict(pod, refused, conflict.node)
            except ApiError as error:
                failures.append(error)
            if self._clock() > until:
                break
        return failures

    def _evict(self, pod: Pod, refused: RefusedClaim, node: str) -> None:
        """Evict the pod if it is stuck and will be replaced, and say so in an Event. Raises ApiError."""
        owner = pod.controller
        if pod.status.phase != "Pending" or not pod.spec.node_name or pod.metadata.deletion_timestamp:
            return
        limit = self._evictor.owner_limit(owner, [pod]) if owner is not None else None
        if owner is None or limit is not None:
            self._evictor.count(Trigger.OVERLAP, Outcome.PROTECTED)
        else:
            if not self._evictor.evict(pod, Trigger.OVERLAP):
                return
            log.warning(
                "evicted a pod whose claim was allocated a device that overlaps one of another claim",
                extra={
                    "pod": str(pod.metadata.key),
                    "node": node,
                    "claim": refused.device.claim,
                    "device": refused.device.device,
                    "holder": refused.held.claim,
                },
            )
        self._evictor.tell([pod_reference(pod)], REASON, message_of(pod, refused, node, limit))
