"""Claims that stay pending although offered devices would satisfy them: the cause lies outside the offers.

A pod is scheduled within a second of a matching offer. If it is not, the scheduler lacks a feature gate, regards the
pool as incomplete, waits for something else, or does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import NamedTuple

from controller.cluster.claim_index import PoolDevice
from controller.cluster.fleet import FleetGpu
from controller.demand.device_search import ValueOf, find_devices
from controller.demand.feasibility import Nodes
from controller.demand.pending_claims import PendingClaim, Queue
from controller.demand.requirements import ClaimRequirements
from controller.explain.availability import listed
from controller.explain.reason import ClaimReason, ReasonCode
from driver.kube.clock import Clock, seconds_time
from driver.kube.types import Pod
from driver.model.device import Device
from driver.model.plan import Offer
from driver.placement.state import Spot, spot_of

GATES = (
    "check that it has the feature gates that the API server has: DynamicResourceAllocation, DRAPartitionableDevices"
)


class Since(NamedTuple):
    """The time when something was first seen: ``at`` by the monotonic clock, ``text`` for messages."""

    at: float
    text: str


class Standing(NamedTuple):
    """A published device that is not allocated."""

    entry: FleetGpu
    device: Device
    name: PoolDevice


def satisfying(
    requirements: ClaimRequirements, standing: Sequence[Standing], value_of: ValueOf
) -> tuple[Standing, ...]:
    """Devices among ``standing``, all of one node, that satisfy ``requirements``, in the order of the requests."""
    published: dict[str, dict[Spot, Standing]] = {}
    for each in standing:
        published.setdefault(each.entry.gpu.uuid, {})[spot_of(each.device)] = each
    gpus = list({each.entry.gpu.uuid: each.entry for each in standing}.values())
    found = find_devices(gpus, published, requirements, value_of)
    return tuple(published[entry.gpu.uuid][spot] for entry, spot in found)


class UnscheduledClaims:
    """Remembers since when claims are pending and devices offered; both must last ``overdue_seconds``."""

    def __init__(self, overdue_seconds: float, clock: Clock) -> None:
        self._overdue_seconds = overdue_seconds
        self._clock = clock
        self._claims: dict[str, Since] = {}
        self._devices: dict[PoolDevice, Since] = {}

    def reasons(
        self, queue: Queue, standing: Mapping[Offer, PoolDevice], incomplete: Mapping[str, str]
    ) -> list[ClaimReason]:
        """One reason for each claim that is pending beside ``standing``, the offered devices."""
        waiting = (each for each in queue.pending if each.key not in queue.held_back)
        claims = {_uid(each) for each in waiting if queue.requirements(each)}
        self._claims = {uid: self._claims.get(uid) or self._now() for uid in claims}
        self._devices = {name: self._devices.get(name) or self._now() for name in standing.values()}
        overdue = [each for each in queue.pending if (since := self._claims.get(_uid(each))) and self._is_over(since)]
        if not overdue:
            return []
        by_node = self._by_node(queue, standing)

        @cache
        def fitting(requirements: ClaimRequirements, nodes: Nodes) -> tuple[Standing, ...]:
            """Devices on one of ``nodes`` that satisfy ``requirements``, of a complete pool if possible."""
            there = by_node.keys() & nodes
            ordered = sorted(there, key=lambda node: (by_node[node][0].name.pool in incomplete, node))
            tried = (satisfying(requirements, by_node[node], queue.feasibility.matching.value) for node in ordered)
            return next(filter(None, tried), ())

        return [
            self._reason(pending, pod, devices, incomplete)
            for pending in overdue
            for pod, devices in islice(_served_pods(queue, pending, fitting), 1)
        ]

    @property
    def next_s(self) -> float | None:
        """Seconds until the next claim or device has been there for long enough; None if there is none."""
        if not self._claims:
            return None
        now = self._clock.monotonic()
        times = (since.at + self._overdue_seconds - now for since in (*self._claims.values(), *self._devices.values()))
        return min((seconds for seconds in times if seconds > 0), default=None)

    def _now(self) -> Since:
        return Since(self._clock.monotonic(), seconds_time(self._clock.now()))

    def _is_over(self, since: Since) -> bool:
        return self._clock.monotonic() >= since.at + self._overdue_seconds

    def _by_node(self, queue: Queue, standing: Mapping[Offer, PoolDevice]) -> dict[str, list[Standing]]:
        found: dict[str, list[Standing]] = {}
        for offer, name in standing.items():
            if self._is_over(self._devices[name]):
                entry = queue.feasibility.fleet.gpus[offer.gpu]
                if (device := entry.device(name.device)) is not None:
                    found.setdefault(entry.node, []).append(Standing(entry, device, name))
        return found

    def _reason(
        self, pending: PendingClaim, pod: Pod, devices: tuple[Standing, ...], incomplete: Mapping[str, str]
    ) -> ClaimReason:
        pool, names = devices[0].name.pool, [each.name.device for each in devices]
        since = max(self._devices[each.name] for each in devices).text
        sentence = (
            f"{listed(names)} of node {devices[0].entry.node} would do and "
            f"{'are' if len(names) > 1 else 'is'} offered since {since}, but nothing is allocated: "
        )
        wrong = incomplete.get(pool)
        cause = f"the scheduler takes nothing from the pool {pool}, which {wrong}" if wrong else cause_of(pod)
        return ClaimReason(pending, ReasonCode.UNUSED, sentence + cause)


def cause_of(pod: Pod) -> str:
    """The known cause why a pod is not scheduled although devices are offered."""
    condition = next((each for each in pod.status.conditions if each.keeps_from_scheduling and each.message), None)
    if condition is None:
        name = pod.spec.scheduler_name or "default-scheduler"
        return f"no scheduler has reported on pod {pod.metadata.name}; does a scheduler named {name} run?"
    said = f"the scheduler reports on pod {pod.metadata.name}: {condition.message}"
    return f"{said.rstrip('. ')}; {GATES}" if condition.lacks_devices else said


def _uid(pending: PendingClaim) -> str:
    return pending.pods[0].metadata.uid if pending.not_created else pending.claim.metadata.uid


def _served_pods(
    queue: Queue, pending: PendingClaim, fitting: Callable[[ClaimRequirements, Nodes], tuple[Standing, ...]]
) -> Iterator[tuple[Pod, tuple[Standing, ...]]]:
    """The pods of a claim for which offered devices would do, with the devices."""
    for pod in pending.pods:
        nodes = queue.nodes_for(pod)
        yield from ((pod, devices) for each in queue.combinations(pod) if (devices := fitting(each, nodes)))
