"""The node and the devices that the scheduler chooses for a pod (pure)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from controller.demand.feasibility import Nodes
from controller.demand.node_eligibility import Eligibility
from controller.demand.pending_claims import classes_by_resource
from driver.kube.types import Allocation, Claim, DeviceClass, Node, Pod
from tessera.simulate.allocatable_devices import AllocationError, FailureKind
from tessera.simulate.allocator import allocate
from tessera.simulate.capacity import HeldDevices
from tessera.simulate.pools import SliceIndex

SEARCH_TIMEOUT_SECONDS = 60.0
"""Longest search for the devices of a pod on one node. The scheduler, which is much faster, has 10 s."""


@dataclass(frozen=True)
class UnplacedReason:
    """Why a pod is not placed; ``code`` is the controller's, or empty where the scheduler alone knows."""

    claim: str
    code: str
    sentence: str


@dataclass(frozen=True)
class PodPlacement:
    """A pod with the node and the allocations that its claims get, or else the reasons why it is not placed.

    ``elsewhere``: other nodes on which it fits, with devices that are offered or could be.
    """

    pod: Pod
    node: str | None = None
    allocations: tuple[tuple[Claim, Allocation], ...] = ()
    elsewhere: tuple[str, ...] = ()
    reasons: tuple[UnplacedReason, ...] = ()

    @classmethod
    def refused(cls, pod: Pod, sentence: str) -> PodPlacement:
        return cls(pod, reasons=(UnplacedReason(str(pod.metadata.key), "", sentence),))


class Scheduler:
    """Chooses nodes by devices, extended resources and what a pod says of nodes; the emptiest of those that fit."""

    def __init__(
        self,
        nodes: Mapping[str, Node],
        classes: Mapping[str, DeviceClass],
        eligibility: Eligibility,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nodes, self._classes, self._eligibility = nodes, classes, eligibility
        self._clock = clock
        self._of_classes = classes_by_resource(classes.values())
        self._pods_on: Counter[str] = Counter()

    def bind(self, node: str) -> None:
        self._pods_on[node] += 1

    def fork(self) -> Scheduler:
        """A scheduler like this one, which counts further pods by itself."""
        other = Scheduler(self._nodes, self._classes, self._eligibility, self._clock)
        other._pods_on = Counter(self._pods_on)
        return other

    def place(self, pod: Pod, claims: Sequence[Claim], slices: SliceIndex, held: HeldDevices) -> PodPlacement:
        """The pod on the node that suits it best, with devices of ``slices`` of which ``held`` are taken."""
        unknown = {name for claim in claims for name in claim.class_names} - self._classes.keys()
        if unknown:
            return PodPlacement.refused(pod, f"there is no DeviceClass {', '.join(sorted(unknown))}")
        unallocated = [claim for claim in claims if claim.status.allocation is None]
        nodes, resources = self._eligible(pod, claims), self._resources(pod)
        lacking = [name for name in resources if not any(self._has(node, name) for node in nodes)]
        if nodes and lacking:
            sentence = f"no node has {', '.join(lacking)}, and no DeviceClass has it as extendedResourceName"
            return PodPlacement.refused(pod, sentence)
        fitting: dict[str, list[Allocation]] = {}
        for node in sorted(self.nodes_for(pod, claims)):
            try:
                allocated = self._allocate(unallocated, self._nodes[node], slices, held)
            except AllocationError as error:
                if error.failure is FailureKind.INVALID_POOLS:
                    continue
                return PodPlacement.refused(pod, f"the scheduler fails: {error}")
            if allocated is not None:
                fitting[node] = allocated
        if not fitting:
            none = f"none of {len(nodes)} nodes has devices that fit" if nodes else "no node is possible for the pod"
            return PodPlacement.refused(pod, none)
        best = min(fitting, key=lambda node: (_second_choices(unallocated, fitting[node]), self._pods_on[node], node))
        given = tuple(zip(unallocated, fitting[best], strict=True))
        return PodPlacement(pod, best, given, tuple(node for node in fitting if node != best))

    def nodes_for(self, pod: Pod, claims: Sequence[Claim]) -> Nodes:
        """The nodes on which ``pod`` may run, whatever devices are free there."""
        resources = self._resources(pod)
        able = (node for node in self._eligible(pod, claims) if all(self._has(node, name) for name in resources))
        return frozenset(able)

    def _eligible(self, pod: Pod, claims: Sequence[Claim]) -> Nodes:
        allocations = [claim.status.allocation for claim in claims if claim.status.allocation is not None]
        selectors = [allocation.node_selector for allocation in allocations if allocation.node_selector is not None]
        return self._eligibility.nodes_for(pod, selectors)

    def _resources(self, pod: Pod) -> list[str]:
        """The extended resources that ``pod`` requests and no class provides."""
        return sorted(name for name in pod.spec.resource_names if "/" in name and name not in self._of_classes)

    def _has(self, node: str, resource: str) -> bool:
        return resource in self._nodes[node].status.allocatable

    def _allocate(
        self, claims: Sequence[Claim], node: Node, slices: SliceIndex, held: HeldDevices
    ) -> list[Allocation] | None:
        if not claims:
            return []
        deadline = self._clock() + SEARCH_TIMEOUT_SECONDS
        return allocate(claims, node, slices, self._classes, held, lambda: self._clock() > deadline)


def _second_choices(claims: Sequence[Claim], allocations: Sequence[Allocation]) -> int:
    """How far down the lists of alternatives the devices are: the scheduler prefers nodes with first choices."""
    total = 0
    for claim, allocation in zip(claims, allocations, strict=True):
        position_of = {
            f"{request.name}/{alternative.name}": position
            for request in claim.spec.devices.requests
            for position, alternative in enumerate(request.first_available)
        }
        chosen = {result.request for result in allocation.devices.results}
        total += sum(position_of.get(name, 0) for name in chosen)
    return total
