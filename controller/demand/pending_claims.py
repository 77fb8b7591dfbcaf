"""Pending claims: the unallocated claims of pending pods (pure).

The scheduler allocates claims only for pods that it is about to place, so a claim without such a pod needs no devices.
A pod that requests an extended resource has no claim before it is placed (KEP-5004); its future claim is derived here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product

from controller.cluster.claim_index import ClaimIndex, ClusterState
from controller.cluster.fleet import Fleet, FleetGpu
from controller.demand.device_search import SearchOutcome
from controller.demand.feasibility import Feasibility, Matching, Nodes, NodeSearch
from controller.demand.gangs import Gang, GangRoom, Room, Wanted, gangs_of
from controller.demand.node_eligibility import Eligibility, Excluded, condition_of, exclusion
from controller.demand.pod_requests import requested, total
from controller.demand.requirements import (
    MAX_COMBINATIONS,
    AskedKinds,
    ClaimRequirements,
    DeviceRequest,
    RefusedRequest,
    RequirementsReader,
    joined,
)
from driver.kube.types import (
    Claim,
    ClaimSpec,
    DeviceClaim,
    DeviceClass,
    ExactDeviceRequest,
    Key,
    Metadata,
    NodeSelector,
    Pod,
    Request,
)
from driver.model.device import Device
from driver.model.offer import OF_SEVERAL
from driver.slices.slice_names import Pool

Holders = Mapping[tuple[str, str], tuple[str, ...]]
"""The claims (``namespace/name``) that have a device, by node and name of the device."""


def allocated_on(nodes: Iterable[str], claims: ClaimIndex, driver: str) -> Holders:
    """The claims to which each device of ``nodes`` is allocated."""
    return {
        (node, device): tuple(holding.claim for holding in holdings)
        for node in nodes
        for device, holdings in claims.holders(Pool(node, driver).name).items()
    }


def held_with_claims(gpu: FleetGpu, holders: Holders) -> Iterator[tuple[Device, tuple[str, ...]]]:
    """The held devices with the claims that have them; one of several claims once for each of them."""
    before: Counter[str] = Counter()
    for device in gpu.held:
        claims = holders.get((gpu.node, device.name), ())
        if device.kind in OF_SEVERAL:
            claims = claims[before[device.name] :][:1]
            before[device.name] += 1
        yield device, claims


def without_claims(gpu: FleetGpu, holders: Holders, gone: frozenset[str]) -> FleetGpu:
    """``gpu`` once the claims ``gone`` have ended."""
    return gpu.holding(device for device, of in held_with_claims(gpu, holders) if not of or not gone.issuperset(of))


def holders_of(gpus: Iterable[FleetGpu], holders: Holders) -> list[str]:
    """The claims with devices on ``gpus``, by name."""
    devices = {(gpu.node, device.name) for gpu in gpus for device in gpu.held}
    return sorted({claim for device in devices for claim in holders.get(device, ())})


def fleet_without(fleet: Fleet, gone: frozenset[str], claims: ClaimIndex, driver: str) -> Fleet:
    """``fleet`` once those of ``claims`` that are named in ``gone`` have ended."""
    holders = allocated_on(fleet.nodes, claims, driver)
    changed = [gpu for gpu in fleet if not gone.isdisjoint(holders_of([gpu], holders))]
    return fleet.changed(without_claims(gpu, holders, gone) for gpu in changed)


@dataclass(frozen=True, eq=False)
class PendingClaim:
    """An unallocated claim and its pending pods.

    ``not_created``: there is no such ResourceClaim; this object stands for its one pod, for which the scheduler will
    create the claim, or which is pending for a reason of its own.
    """

    claim: Claim
    pods: tuple[Pod, ...]
    not_created: bool = False

    @cached_property
    def key(self) -> str:
        """``namespace/name`` of the claim; ``Pod/namespace/name`` of the pod that has none yet."""
        return f"Pod/{self.claim.metadata.key}" if self.not_created else str(self.claim.metadata.key)

    @property
    def uid(self) -> str:
        """That of the claim; of the pod that has none yet."""
        return self.pods[0].metadata.uid if self.not_created else self.claim.metadata.uid

    @property
    def uids(self) -> frozenset[str]:
        """Of the claim and its pods: devices that are reserved for one of them are for this claim."""
        return frozenset((self.uid, *(pod.metadata.uid for pod in self.pods)))


def described(pending: PendingClaim) -> str:
    """``claim NAME``, or the extended resources for which its claim will be created."""
    if not pending.not_created:
        return f"claim {pending.claim.metadata.name}"
    return f"extended resource {', '.join(request.name for request in pending.claim.spec.devices.requests)}"


class Queue:
    """The pending claims and their feasibility on the present fleet; ``pods`` has the order of the queue."""

    def __init__(
        self, cluster: ClusterState, fleet: Fleet, matching: Matching, eligibility: Eligibility | None = None
    ) -> None:
        self.cluster = cluster
        self.feasibility = matching.feasibility(fleet)
        self.pending = pending_claims(cluster.claims.unallocated, cluster.classes, cluster.pods)
        self.eligibility = eligibility or Eligibility(cluster.nodes)
        self.eligibility.forget_unused()
        self.reader = RequirementsReader(matching, cluster.classes, fleet)
        read = [(pending, self.reader.read(pending.claim)) for pending in self.pending]
        self._requirements = {pending.key: claim.requirements for pending, claim in read}
        self.requests_for_all = [(pending, request) for pending, claim in read for request in claim.requests_for_all]
        """Pending claims with each request for all devices of a node, which matches held devices, too."""

        self.monitoring: Mapping[str, tuple[DeviceRequest, ...]] = {
            pending.key: claim.monitoring for pending, claim in read if claim.monitoring
        }
        """The requests with adminAccess, for monitor devices, by key of their claim."""

        self._claims_of_pod: dict[str, list[PendingClaim]] = {}
        for pending in self.pending:
            for pod in pending.pods:
                self._claims_of_pod.setdefault(str(pod.metadata.key), []).append(pending)
        groups = cluster.pod_groups
        self.gangs = gangs_of(cluster.pods, self._claims_of_pod.keys(), groups) if groups else []

    def with_feasibility(self, feasibility: Feasibility) -> Queue:
        """The same claims, judged by another ``feasibility``."""
        queue = copy(self)
        queue.feasibility = feasibility
        for cached in ("gangs_without_room", "_gang_room"):
            vars(queue).pop(cached, None)
        return queue

    def on(self, fleet: Fleet) -> Queue:
        """The same claims on another ``fleet``; later decisions do not remember what is found out there."""
        return self.with_feasibility(Feasibility(fleet, self.feasibility.matching, is_hypothetical=True))

    def requirements(self, pending: PendingClaim) -> tuple[ClaimRequirements, ...] | RefusedRequest:
        """The requirements for each combination of alternatives.

        Empty if the claim requests only monitor devices or devices of other drivers.
        """
        return self._requirements[pending.key]

    def alternatives(self, pending: PendingClaim) -> tuple[ClaimRequirements, ...]:
        """The ``requirements``; empty also if a request can't be evaluated."""
        requirements = self._requirements[pending.key]
        return () if isinstance(requirements, RefusedRequest) else requirements

    def requests(self, pending: PendingClaim) -> list[DeviceRequest]:
        """The different requests of all alternatives."""
        alternatives = self.alternatives(pending)
        return list(dict.fromkeys(request for requirements in alternatives for request in requirements.requests))

    @cached_property
    def monitored_nodes(self) -> Nodes:
        """The nodes that must publish their monitor devices, because a pending claim may get them there."""
        return frozenset[str]().union(*map(self.nodes_with_monitors, self.pending))

    def nodes_with_monitors(self, pending: PendingClaim) -> Nodes:
        """Of the nodes where its pods may run, those with enough GPUs for one of its requests with adminAccess."""
        nodes, requests = self.nodes(pending), self.monitoring.get(pending.key, ())
        return frozenset[str]().union(*(self.feasibility.monitors(request).keys() & nodes for request in requests))

    def nodes_for(self, pod: Pod) -> Nodes:
        """The nodes on which ``pod`` may run, given its claims that are allocated."""
        return self.eligibility.nodes_for(pod, self._allocated(pod).values())

    def _allocated(self, pod: Pod) -> dict[str, NodeSelector]:
        """The nodes on which its allocated claims are available, by name of the claim."""
        allocations = {key.name: self.cluster.claims.allocation(key) for key in pod.claims}
        selectors = {name: allocation.node_selector for name, allocation in allocations.items() if allocation}
        return {name: selector for name, selector in selectors.items() if selector}

    def nodes(self, pending: PendingClaim) -> Nodes:
        """The nodes on which any of its pods may run."""
        sets = [self.nodes_for(pod) for pod in pending.pods]
        return sets[0] if len(sets) == 1 else frozenset().union(*sets)

    def exclusion_key(self, pending: PendingClaim) -> tuple[Nodes, bytes]:
        """What decides which nodes are ``excluded``."""
        pod = pending.pods[0]
        return self.nodes(pending), condition_of(pod.spec, self._allocated(pod).items())

    def excluded(self, pending: PendingClaim) -> Mapping[str, Excluded]:
        """The nodes on which none of its pods may run, and what excludes the first one."""
        nodes, pod = self.nodes(pending), pending.pods[0]
        others = (node for node in self.cluster.nodes if node.metadata.name not in nodes)
        exclusions = ((node.metadata.name, exclusion(pod.spec, node, self._allocated(pod))) for node in others)
        return {name: excluded for name, excluded in exclusions if excluded is not None}

    def find_node(self, pending: PendingClaim) -> NodeSearch:
        """A node that satisfies it and the other claims of one of its pods."""
        undecided = False
        for pod in pending.pods:
            nodes = self.nodes_for(pod)
            for requirements in self.combinations(pod):
                search = self.feasibility.find_node(requirements, nodes)
                if search.outcome is SearchOutcome.FITS:
                    return search
                undecided |= search.outcome is SearchOutcome.UNKNOWN
        return NodeSearch(SearchOutcome.UNKNOWN if undecided else SearchOutcome.NO_ROOM)

    def satisfiable(self, pending: PendingClaim) -> bool:
        """Whether free placements would satisfy it; True, too, where the bounded search gave up.

        False for claims for other drivers' devices only.
        """
        return bool(self.alternatives(pending)) and self.find_node(pending).outcome is not SearchOutcome.NO_ROOM

    def preferred_requirements(self, pending: PendingClaim) -> ClaimRequirements | None:
        """The first combination of alternatives that is feasible, or else the first; None if there is none."""
        alternatives = self.alternatives(pending)
        if len(alternatives) < 2:
            return alternatives[0] if alternatives else None
        nodes = self.nodes(pending)
        feasible = (requirements for requirements in alternatives if self.feasibility.may_fit(requirements, nodes))
        return next(feasible, alternatives[0])

    def companions(self, pending: PendingClaim) -> list[PendingClaim]:
        """The claims that must be satisfied on the same node, itself among them."""
        claims = {id(claim): claim for pod in pending.pods for claim in self.of_pod(pod)}
        return [claim for claim in claims.values() if self.requirements(claim)]

    def of_pod(self, pod: Pod) -> list[PendingClaim]:
        return self._claims_of_pod.get(str(pod.metadata.key), [])

    @cached_property
    def asked(self) -> AskedKinds:
        """The kinds that all claims and templates of the cluster ask for, pending or not."""
        memory = self.feasibility.matching.cache.asked
        return memory.update(self.cluster, self.reader, self.feasibility.smallest_first)

    def room(self, gang: Gang) -> Room:
        """How many pods of ``gang`` there is room for at most.

        Missing pods are taken to be like the first one or, if some of the pods share claims, to share them, too.
        """
        seen: set[str] = set()
        alike: Counter[Wanted] = Counter()
        for pod in gang.pods:
            claims = {claim.key for claim in self.of_pod(pod)}
            if not seen & claims:  # pods that share a claim share its devices
                alike[tuple(self.combinations(pod)), self.nodes_for(pod)] += 1
            seen |= claims
        if alike.total() == len(gang.pods):
            alike[next(iter(alike))] += gang.missing
        sharing = len(gang.pods) + gang.missing - alike.total()
        room = self._gang_room.of(alike)
        return Room(room.pods + sharing, room.nodes)

    @cached_property
    def _gang_room(self) -> GangRoom:
        return GangRoom(self.feasibility)

    @cached_property
    def gangs_without_room(self) -> Mapping[str, Gang]:
        """By key of the claim, the gang for which there is no room at present.

        Only claims all of whose pods are in such gangs.
        """
        impossible = [gang for gang in self.gangs if self.room(gang).pods < gang.needed]
        gang_of = {pod.metadata.key: gang for gang in impossible for pod in gang.pods}
        return {
            claim.key: gang_of[claim.pods[0].metadata.key]
            for gang in impossible
            for pod in gang.pods
            for claim in self.of_pod(pod)
            if all(user.metadata.key in gang_of for user in claim.pods)
        }

    @property
    def future_claims(self) -> Iterator[tuple[PendingClaim, int]]:
        """Pending claims of incomplete gangs with room, and how many future claims are like them.

        A tenant chooses the size of a gang, so the number is limited to the devices that the fleet can have at once.
        """
        incomplete = [gang for gang in self.gangs if gang.missing]
        fleet = self.feasibility.fleet if incomplete else ()
        most = sum(max(gpu.gpu.memory_slices, gpu.shares, gpu.state.room) for gpu in fleet)
        for gang in incomplete:
            for claim in self.of_pod(gang.pods[0]):
                if len(claim.pods) == 1 and claim.key not in self.gangs_without_room:
                    yield claim, min(gang.missing, most)

    @cached_property
    def pods(self) -> list[Pod]:
        """The pods with pending claims: those of the highest priority first, among equals the oldest."""
        pods = {str(pod.metadata.key): pod for pending in self.pending for pod in pending.pods}
        by_name = (pod for _, pod in sorted(pods.items()))
        return sorted(by_name, key=lambda pod: (-pod.spec.priority, pod.metadata.creation_timestamp or ""))

    @cached_property
    def holders(self) -> Holders:
        """The claims to which each device is allocated."""
        return allocated_on(self.feasibility.fleet.nodes, self.cluster.claims, self.feasibility.matching.driver)

    def claims_on(self, node: str) -> set[str]:
        """The claims with devices on the GPUs of ``node``, by name."""
        return set(holders_of(self.feasibility.fleet.nodes[node], self.holders))

    def combinations(self, pod: Pod) -> Iterator[ClaimRequirements]:
        """The joint requirements of a pod's claims, for each combination; none where one of them was refused."""
        ours: list[tuple[ClaimRequirements, ...]] = []
        for pending in self.of_pod(pod):
            requirements = self._requirements[pending.key]
            if isinstance(requirements, RefusedRequest):
                return iter(())
            ours += [requirements] if requirements else []
        return (joined(chosen) for chosen in islice(product(*ours), MAX_COMBINATIONS))


def pending_claims(claims: Iterable[Claim], classes: Iterable[DeviceClass], pods: Iterable[Pod]) -> list[PendingClaim]:
    """All pending claims in the order of ``claims``, then of ``pods``.

    A claim of a pod whose status names it no more, or not yet, is known by its owner (``fence_probe.try_again``).
    """
    waiting = (pod for pod in pods if pod.status.phase == "Pending" and not pod.metadata.deletion_timestamp)
    queued = [pod for pod in waiting if not pod.spec.scheduling_gates]
    users: dict[Key, list[Pod]] = {}
    unnamed: dict[tuple[str, str], Pod] = {}
    for pod in queued:
        names = pod.claims
        for key in names:
            users.setdefault(key, []).append(pod)
        if len(names) < len(pod.spec.resource_claims):
            unnamed[pod.metadata.namespace, pod.metadata.uid] = pod
    for metadata in (claim.metadata for claim in claims if unnamed):
        owner = metadata.controller
        if owner is not None and metadata.key not in users and (metadata.namespace, owner.uid) in unnamed:
            users[metadata.key] = [unnamed[metadata.namespace, owner.uid]]
    created = [
        PendingClaim(claim, tuple(users[claim.metadata.key]))
        for claim in claims
        if claim.metadata.key in users and claim.status.allocation is None and not claim.metadata.deletion_timestamp
    ]
    by_resource = classes_by_resource(classes)
    not_created = ((pod, claim_for(pod, by_resource)) for pod in queued)
    return [
        *created,
        *(PendingClaim(claim, (pod,), not_created=True) for pod, claim in not_created if claim is not None),
    ]


IMPLICIT = "deviceclass.resource.kubernetes.io/"
"""The prefix of the extended resource that every class has, before its name."""


def classes_by_resource(classes: Iterable[DeviceClass]) -> dict[str, str]:
    """Class names by extended resource. Of several classes the newest counts, then the first by name."""
    ordered = sorted(classes, key=lambda device_class: device_class.metadata.name, reverse=True)
    ordered.sort(key=lambda device_class: device_class.metadata.creation_timestamp or "")
    explicit = {device_class.spec.extended_resource_name: device_class.metadata.name for device_class in ordered}
    implicit = {IMPLICIT + device_class.metadata.name: device_class.metadata.name for device_class in ordered}
    return implicit | {resource: name for resource, name in explicit.items() if resource}


def claim_for(pod: Pod, by_resource: Mapping[str, str]) -> Claim | None:
    """The claim that the scheduler will create for the pod's extended resources, if it requests any and has none."""
    if pod.status.extended_resource_claim_status is not None or pod.spec.node_name:
        return None
    names = {name for name in pod.spec.resource_names if name in by_resource or name.startswith(IMPLICIT)}
    counts = {name: int(total(requested(pod.spec, name))) for name in sorted(names)}
    requests = tuple(
        Request(name, ExactDeviceRequest(by_resource.get(name, name.removeprefix(IMPLICIT)), count=count))
        for name, count in counts.items()
        if count
    )
    if not requests:
        return None
    return Claim(Metadata(name=pod.metadata.name, namespace=pod.metadata.namespace), ClaimSpec(DeviceClaim(requests)))
