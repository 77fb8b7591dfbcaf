"""A cluster that is only imagined: pods are placed in it one after the other, as scheduler and controller would (pure).

A pod is first tried with the devices that are offered anyway, then with those that the controller offers for it, at
last with all that match. When it is placed, the controller decides again before the next pod comes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import msgspec

from controller.cluster.claim_index import ClaimIndex, ClusterState
from controller.cluster.fleet import Fleet, FleetGpu
from controller.cluster.node_views import ALL_REPORTED, UnreportedNodes
from controller.curation.curator import Curator
from controller.curation.disjoint import DisjointCurator
from controller.demand.demand import demand_of
from controller.demand.eligibility import Eligibility
from controller.demand.feasibility import Matching, Nodes
from controller.demand.pending_claims import Queue, claim_for, classes_by_resource
from controller.demand.requirements import RequirementsReader
from controller.demand.selected_devices import Selector
from controller.explain.pipeline import reasons_in
from controller.explain.reason import ReasonCode
from controller.explain.situation import DisjointPlan, Situation
from driver.kube.slice_types import DetailedSlice, DeviceTaintRule
from driver.kube.types import Allocation, Claim, ClaimStatus, DeviceClass, ExactDeviceRequest, Key, Node, Pod
from driver.model.offer import Offer
from driver.model.plan import OfferMode
from driver.placement.ranking import Ranking
from driver.slices.pool_names import Pool
from kubelet_plugin.inventory.published_devices import PublishPolicy
from tessera.simulate.allocator import allocate
from tessera.simulate.capacity import Allocated
from tessera.simulate.failures import AllocationError, Failure
from tessera.simulate.pools import SliceIndex
from tessera.simulate.published import PublishedSlices
from tessera.simulate.slices import tainted

OFFERS = 2
"""The controller's default for ``--offers``."""

SEARCH_SECONDS = 60.0
"""Longest search for the devices of a pod on one node. The scheduler, which is much faster, has 10 s."""

EXTENDED = "extended-resources"


@dataclass(frozen=True)
class Reason:
    """Why a pod is not placed; ``code`` is the controller's, or empty where the scheduler alone knows."""

    claim: str
    code: str
    sentence: str


@dataclass(frozen=True)
class Placement:
    """A pod with the node and the allocations that its claims get, or else the reasons why it is not placed.

    ``elsewhere``: other nodes on which it fits.
    """

    pod: Pod
    node: str | None = None
    allocations: tuple[tuple[Claim, Allocation], ...] = ()
    elsewhere: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True)
class Content:
    """What a cluster has: ``claims`` with and without allocations; ``slices`` of other drivers.

    ``policies``: what the nodes publish that do not follow the controller's plans. ``rules`` taint devices.
    ``offers`` are those of the real controller; None: it would first decide anew. ``unreported`` are nodes whose GPUs
    are not known.
    """

    fleet: Fleet = field(default_factory=Fleet)
    nodes: tuple[Node, ...] = ()
    classes: Mapping[str, DeviceClass] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()
    slices: tuple[DetailedSlice, ...] = ()
    policies: Mapping[str, PublishPolicy] = field(default_factory=dict)
    mode: OfferMode = OfferMode.COUNTERS
    rules: tuple[DeviceTaintRule, ...] = ()
    offers: frozenset[Offer] | None = None
    unreported: UnreportedNodes = ALL_REPORTED


class ImaginedCluster:
    """``offers``: how many devices of each kind are offered without need, as the controller's flag of that name."""

    def __init__(
        self, driver: str, content: Content, offers: int = OFFERS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.fleet, self.driver = content.fleet, driver
        self._content, self._offer_count = content, offers
        self._nodes = {node.metadata.name: node for node in content.nodes}
        self._classes, self._mode = content.classes, content.mode
        self._claims = {claim.metadata.key: claim for claim in content.claims}
        self._index = ClaimIndex(driver, content.claims)
        self._others, self._rules = content.slices, content.rules
        self._matching = Matching(driver)
        self._eligibility = Eligibility(content.nodes)
        self._curator, self._disjoint = Curator(Ranking(), offers), DisjointCurator(Ranking(), offers)
        self._published = PublishedSlices(driver, content.mode, content.policies)
        self._clock = clock
        self._waiting: list[Pod] = []
        """Pods that could not be placed; the controller knows them."""
        self._pods_on: Counter[str] = Counter()
        self._planned: Mapping[str, Collection[Offer]] = {}
        """With disjoint offers, what is planned for pending claims, by their keys."""
        self._offers = content.offers or frozenset()
        if content.offers is None:
            self._decide()
        else:
            self._publish(self._possible())

    def add(self, claim: Claim) -> None:
        """Add a claim, or replace it."""
        self._claims[claim.metadata.key] = claim
        self._index.put(claim.metadata.key, claim)

    def place(self, pod: Pod) -> Placement:
        """Place ``pod``, or remember it as pending."""
        missing = [key for key in pod.claims if key not in self._claims]
        if missing:
            sentence = "it does not exist, so the pod waits for it"
            return Placement(pod, reasons=tuple(Reason(str(key), "", sentence) for key in missing))
        needed = [self._claims[key] for key in pod.claims] + self._extended(pod)
        if pod.spec.node_name and any(claim.status.allocation is None for claim in needed):
            self._waiting.append(pod)
            return Placement(pod, reasons=tuple(self._reasons(pod)))
        found = self._try(pod, needed)
        for attempt in (self._offer_for, self._widen):
            if found.node is None:
                attempt(pod)
                found = self._try(pod, needed)
        if found.node is None:
            return replace(found, reasons=tuple(self._reasons(pod)) or found.reasons)
        self._bind(found)
        return found

    def expect(self, pods: Iterable[Pod]) -> None:
        """Let the controller offer devices for pending ``pods``."""
        self._waiting += [pod for pod in pods if pod not in self._waiting]
        self._decide()

    def _offer_for(self, pod: Pod) -> None:
        self.expect([pod])

    def settle(self) -> None:
        """Let the controller decide what is offered from now on."""
        self._decide(keep=False)

    def holders(self, node: str) -> Mapping[str, str]:
        """The claims by the names of the devices that they have on ``node``."""
        held = self._index.held(Pool(node, self.driver).name)
        return {device: each.claim for device, each in held.items()}

    def selector(self, device_class: str) -> Selector | None:
        """What a class selects; None if that may be devices of other drivers."""
        reader = RequirementsReader(self._matching, self._classes.values(), self.fleet)
        found = reader.selector_of(ExactDeviceRequest(device_class), "")
        return found if found is not None and found.is_about_us else None

    def likeness(self, node: str, selector: Selector) -> Hashable:
        """Equal for nodes on which claims for one device of ``selector`` get the same devices until none fits."""
        if self._rules or node in self._content.policies:
            return node
        gpus = (
            (
                (entry.number, selector.on(entry), entry.state, tuple(device.name for device in entry.held)),
                (entry.fault, entry.closed, entry.uses, entry.shares_only, entry.foreign, entry.gpu.mig_mode),
            )
            for entry in self.fleet.nodes[node]
        )
        return self._nodes[node].spec, tuple(gpus)

    def alone(self, node: str) -> ImaginedCluster:
        """A cluster of one node, with what is held and offered on it."""
        gpus = self.fleet.nodes[node]
        names = {entry.gpu.uuid for entry in gpus}
        held = {each.claim for each in self._index.held(Pool(node, self.driver).name).values()}
        content = replace(
            self._content,
            fleet=Fleet.of(gpus),
            nodes=(self._nodes[node],),
            claims=tuple(self._claims[Key(*each.split("/"))] for each in sorted(held)),
            slices=(),
            offers=frozenset(each for each in self._offers if each.gpu in names),
        )
        return ImaginedCluster(self.driver, content, self._offer_count, self._clock)

    def give(self, node: str, claims: Iterable[Claim]) -> None:
        """Add claims that are allocated on ``node``."""
        for claim in claims:
            self.add(claim)
        self.fleet = self.fleet.changed(self._held_on(node))

    def _extended(self, pod: Pod) -> list[Claim]:
        """The claim that the scheduler creates for the extended resources of a pod, if it requests any."""
        found = claim_for(pod, classes_by_resource(self._classes.values()))
        if found is None:
            return []
        metadata = msgspec.structs.replace(found.metadata, name=f"{pod.metadata.name}-{EXTENDED}")
        return [Claim(metadata, found.spec)]

    # The scheduler

    def _try(self, pod: Pod, claims: Sequence[Claim]) -> Placement:
        """The pod on the node that suits it best, with the present offers."""
        unknown = _classes_of(claims) - self._classes.keys()
        if unknown:
            sentence = f"there is no DeviceClass {', '.join(sorted(unknown))}"
            return Placement(pod, reasons=(Reason(str(pod.metadata.key), "", sentence),))
        wanted = [claim for claim in claims if claim.status.allocation is None]
        allocations = [claim.status.allocation for claim in claims if claim.status.allocation is not None]
        selectors = [each.node_selector for each in allocations if each.node_selector is not None]
        nodes = self._eligibility.nodes_for(pod, selectors)
        lacking = [name for name in self._plain_resources(pod) if not any(self._has(node, name) for node in nodes)]
        if nodes and lacking:
            sentence = f"no node has {', '.join(lacking)}, and no DeviceClass has it as extendedResourceName"
            return Placement(pod, reasons=(Reason(str(pod.metadata.key), "", sentence),))
        fitting: dict[str, list[Allocation]] = {}
        for name in sorted(nodes):
            if not all(self._has(name, each) for each in self._plain_resources(pod)):
                continue
            try:
                found = self._allocate(wanted, self._nodes[name]) if wanted else []
            except AllocationError as error:
                if error.failure is Failure.INVALID_POOLS:
                    continue
                return Placement(pod, reasons=(Reason(str(pod.metadata.key), "", f"the scheduler fails: {error}"),))
            if found is not None:
                fitting[name] = found
        if not fitting:
            where = f"none of {len(nodes)} nodes has devices that fit" if nodes else "no node is possible for the pod"
            return Placement(pod, reasons=(Reason(str(pod.metadata.key), "", where),))
        best = min(fitting, key=lambda name: (_second_choices(wanted, fitting[name]), self._pods_on[name], name))
        given = tuple(zip(wanted, fitting[best], strict=True))
        return Placement(pod, best, given, tuple(name for name in fitting if name != best))

    def _plain_resources(self, pod: Pod) -> list[str]:
        """The extended resources that the pod requests of device plugins: no class stands for them."""
        containers = (*pod.spec.init_containers, *pod.spec.containers)
        names = {name for each in containers for name in (*each.resources.requests, *each.resources.limits)}
        of_classes = classes_by_resource(self._classes.values())
        return sorted(name for name in names if "/" in name and name not in of_classes)

    def _has(self, node: str, resource: str) -> bool:
        return resource in self._nodes[node].status.allocatable

    def _allocate(self, claims: Sequence[Claim], node: Node) -> list[Allocation] | None:
        ends = self._clock() + SEARCH_SECONDS
        return allocate(claims, node, self._slices, self._classes, self._allocated, lambda: self._clock() > ends)

    def _bind(self, found: Placement) -> None:
        """Store the allocations of a pod that is placed."""
        self._waiting = [pod for pod in self._waiting if pod is not found.pod]
        for claim, allocation in found.allocations:
            self.add(msgspec.structs.replace(claim, status=ClaimStatus(allocation)))
        if found.node is not None:
            self._pods_on[found.node] += 1
            self.fleet = self.fleet.changed(self._held_on(found.node))
        self._publish(self._possible())

    def _held_on(self, node: str) -> Iterator[FleetGpu]:
        """The GPUs of ``node`` of which more is held than before."""
        names = self._index.held(Pool(node, self.driver).name)
        for entry in self.fleet.nodes.get(node, ()):
            known = {device.name for device in entry.held}
            new = [device for name in names if name not in known and (device := entry.device_named(name)) is not None]
            if new:
                yield entry.holding((*entry.held, *new))

    # The controller

    def _queue(self) -> Queue:
        needed = {key for pod in self._waiting for key in pod.claims}
        unallocated = (each for key, each in self._claims.items() if key in needed and each.status.allocation is None)
        nodes, classes = tuple(self._nodes.values()), tuple(self._classes.values())
        claims, pods = self._index.view(unallocated), tuple(self._waiting)
        state = ClusterState(claims, classes, pods, nodes, taint_rules=self._rules)
        return Queue(state, self.fleet, self._matching, self._eligibility)

    def _decide(self, *, keep: bool = True, widened: Mapping[str, Nodes] | None = None) -> None:
        """Publish what the controller offers; ``keep``: beside what is offered now, which is withdrawn later."""
        queue, wide = self._queue(), widened or {}
        standing = self._possible()
        if self._mode is OfferMode.DISJOINT:
            chosen = self._disjoint.curate(queue, standing, wide)
            self._planned = chosen.by_claim or {}
            self._publish(chosen.offers)
            return
        offers = self._curator.curate(self.fleet, demand_of(queue, wide), standing)
        self._publish({*offers, *(standing if keep else ())})

    def _widen(self, pod: Pod) -> None:
        """Publish everything that matches, as the controller does for a claim that regular offers do not help."""
        queue = self._queue()
        own = [each for each in queue.pending if pod in each.pods and queue.satisfiable(each)]
        nodes = {each.key: queue.found(each).node for each in own}
        wide = {each.key: queue.nodes(each) for each in own}
        if self._mode is OfferMode.DISJOINT:
            wide = {key: frozenset({node}) for key, node in nodes.items() if node is not None}
        if wide:
            self._decide(widened=wide)

    def _possible(self) -> set[Offer]:
        """The offers that still fit beside what is held."""
        return {each for each in self._offers if self.fleet.gpus[each.gpu].state.admits(each.spot)}

    def _publish(self, offers: Collection[Offer]) -> None:
        self._offers = frozenset(offers)
        slices = chain(self._published.of(self.fleet, self._offers), self._others)
        self._slices = SliceIndex(tainted(each, self._rules) for each in slices)
        results = (result for claim in self._claims.values() for result in claim.results)
        self._allocated = Allocated.of(results)

    def _reasons(self, pod: Pod) -> Iterable[Reason]:
        """The controller's reasons why the claims of ``pod`` are pending."""
        plan = DisjointPlan(self._planned, ()) if self._mode is OfferMode.DISJOINT else None
        for key, reason in reasons_in(Situation(self._queue(), unreported=self._content.unreported, plan=plan)).items():
            if pod in reason.pending.pods and reason.code is not ReasonCode.WAITS:
                yield Reason(key, reason.code.value, reason.sentence)


def _classes_of(claims: Iterable[Claim]) -> set[str]:
    requests = (request for claim in claims for request in claim.spec.devices.requests)
    return {each.device_class_name for request in requests for each in request.alternatives}


def _second_choices(claims: Sequence[Claim], allocations: Sequence[Allocation]) -> int:
    """How far down the lists of alternatives the devices are: the scheduler prefers nodes with first choices."""
    total = 0
    for claim, allocation in zip(claims, allocations, strict=True):
        order = {
            f"{request.name}/{each.name}": place
            for request in claim.spec.devices.requests
            for place, each in enumerate(request.first_available)
        }
        total += sum(order.get(name, 0) for name in {result.request for result in allocation.devices.results})
    return total
