"""A cluster that is only imagined: pods are placed in it one after the other, as scheduler and controller would (pure).

A pod is first tried with the devices that are offered anyway, then with those that the controller offers for it,
finally with all that match. When it is placed, the controller decides again before the next pod comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, product

import msgspec

from controller.cluster.claim_index import ClaimIndex, ClusterState
from controller.cluster.fleet import Fleet, FleetGpu, parts_of
from controller.cluster.node_views import ALL_REPORTED, UnreportedNodes
from controller.curation.counters_planner import CountersPlanner
from controller.curation.disjoint_planner import DisjointPlanner
from controller.demand.demand import demand_of
from controller.demand.device_search import SearchOutcome
from controller.demand.feasibility import Feasibility, Matching, Nodes
from controller.demand.node_eligibility import Eligibility
from controller.demand.pending_claims import Queue, claim_for, classes_by_resource, fleet_without
from controller.demand.requirements import (
    MAX_COMBINATIONS,
    ClaimRequirements,
    RefusedRequest,
    RequirementsReader,
    joined,
)
from controller.demand.selected_devices import Selector
from controller.explain.pipeline import reasons_in
from controller.explain.reason import ReasonCode
from controller.explain.situation import DisjointPlan, Situation
from controller.explain.sources.selected_gpus import untolerated, with_taints
from driver.kube.slice_types import DetailedDevice, DetailedSlice, DetailedSliceSpec
from driver.kube.types import (
    Claim,
    ClaimStatus,
    ClaimTemplate,
    DeviceClass,
    DeviceTaintRule,
    ExactDeviceRequest,
    Key,
    Node,
    ObjectMeta,
    Pod,
)
from driver.model.device import Device, Monitor, merged
from driver.model.offer import OF_SEVERAL, Offer
from driver.model.plan import Held, OfferMode
from driver.model.reported_gpus import FaultKind
from driver.placement.ranking import Ranking
from driver.slices.build import Content, SliceBuilder, slice_spec
from driver.slices.slice_names import Pool
from kubelet_plugin.inventory.published_devices import ForeignPartitions, PublishableGpu, PublishPolicy
from tessera.simulate.capacity import HeldDevices
from tessera.simulate.pools import SliceIndex
from tessera.simulate.scheduler import PodPlacement, Scheduler, UnplacedReason

OFFERS = 2
"""The controller's default for ``--offers``."""

EXTENDED = "extended-resources"


@dataclass(frozen=True)
class ClusterContent:
    """What a cluster has: ``claims`` with and without allocations; ``slices`` of other drivers.

    ``policies``: what the nodes publish that do not follow the controller's plans. ``rules`` taint devices.
    ``offers`` are those of the real controller; None: it would first decide anew. ``unreported`` are nodes whose GPUs
    are not known. ``templates``: what claims are made from sooner or later.
    """

    fleet: Fleet = field(default_factory=Fleet)
    nodes: tuple[Node, ...] = ()
    classes: Mapping[str, DeviceClass] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()
    slices: tuple[DetailedSlice, ...] = ()
    policies: Mapping[str, PublishPolicy] = field(default_factory=dict)
    mode: OfferMode = OfferMode.COUNTERS
    rules: tuple[DeviceTaintRule, ...] = ()
    templates: tuple[ClaimTemplate, ...] = ()
    offers: frozenset[Offer] | None = None
    unreported: UnreportedNodes = ALL_REPORTED


class ImaginedCluster:
    """``offers``: how many devices of each kind are offered without need, as the controller's flag of that name."""

    def __init__(
        self, driver: str, content: ClusterContent, offers: int = OFFERS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.fleet, self.driver = content.fleet, driver
        self._content, self._offer_count, self._clock = content, offers, clock
        self._nodes = {node.metadata.name: node for node in content.nodes}
        self._claims = {claim.metadata.key: claim for claim in content.claims}
        self._index = ClaimIndex(driver, content.claims)
        self._matching = Matching(driver)
        self._eligibility = Eligibility(content.nodes)
        self._curator, self._disjoint = CountersPlanner(Ranking(), offers), DisjointPlanner(Ranking(), offers)
        self._published = PublishedSlices(driver, content.mode, content.policies)
        self._scheduler = Scheduler(self._nodes, content.classes, self._eligibility, clock)
        self._waiting: list[Pod] = []
        """Pods that could not be placed; the controller knows them."""
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

    def place(self, pod: Pod) -> PodPlacement:
        """Place ``pod``, or remember it as pending."""
        missing = [key for key in pod.claims if key not in self._claims]
        if missing:
            sentence = "it does not exist, so the pod waits for it"
            return PodPlacement(pod, reasons=tuple(UnplacedReason(str(key), "", sentence) for key in missing))
        needed = [self._claims[key] for key in pod.claims] + self._extended(pod)
        if pod.spec.node_name and any(claim.status.allocation is None for claim in needed):
            self._waiting.append(pod)
            return PodPlacement(pod, reasons=tuple(self._reasons(pod)))
        placement = self._scheduler.place(pod, needed, self._slices, self._held)
        for offer_more in (self.expect, self._widen):
            if placement.node is None:
                offer_more([pod])
                placement = self._scheduler.place(pod, needed, self._slices, self._held)
        if placement.node is None:
            return replace(placement, reasons=tuple(self._reasons(pod)) or placement.reasons)
        others = {*placement.elsewhere, *self._could_fit(pod, needed)} - {placement.node}
        self._bind(placement, placement.node)
        return replace(placement, elsewhere=tuple(sorted(others)))

    def expect(self, pods: Iterable[Pod]) -> None:
        """Let the controller offer devices for pending ``pods``."""
        self._waiting += [pod for pod in pods if pod not in self._waiting]
        self._decide()

    def settle(self) -> None:
        """Let the controller decide what is offered from now on."""
        self._decide(keep=False)

    def fork(self, gone: frozenset[str] = frozenset()) -> ImaginedCluster:
        """A cluster like this one, without the claims ``gone``: what is placed in it changes nothing here."""
        claims = tuple(claim for key, claim in self._claims.items() if str(key) not in gone)
        fleet = fleet_without(self.fleet, gone, self._index, self.driver) if gone else self.fleet
        content = replace(self._content, fleet=fleet, claims=claims, offers=self._offers)
        other = ImaginedCluster(self.driver, content, self._offer_count, self._clock)
        other._matching, other._waiting = self._matching, list(self._waiting)
        other._scheduler = self._scheduler.fork()
        return other

    def holders(self, node: str) -> Mapping[str, Sequence[Held]]:
        """The claims by the names of the devices that they have on ``node``."""
        return self._index.holders(Pool(node, self.driver).name)

    def selector(self, device_class: str) -> Selector | None:
        """What a class selects; None if that may be devices of other drivers."""
        reader = RequirementsReader(self._matching, self._content.classes.values(), self.fleet)
        selected = reader.selector_of(ExactDeviceRequest(device_class), "")
        return selected if selected is not None and selected.reads_our_attributes else None

    def likeness(self, node: str, selector: Selector) -> Hashable:
        """Equal for nodes on which claims for one device of ``selector`` get the same devices until none fits."""
        if self._content.rules or node in self._content.policies:
            return node
        gpus = []
        for gpu in self.fleet.nodes[node]:
            held = gpu.state, tuple(device.name for device in gpu.held)
            usable = gpu.fault, gpu.why_no_offers, gpu.uses, gpu.shares_only, gpu.foreign, gpu.gpu.mig_mode
            gpus.append((gpu.number, selector.on(gpu), held, usable))
        return self._nodes[node].spec, tuple(gpus)

    def alone(self, node: str) -> ImaginedCluster:
        """A cluster of one node, with what is held and offered on it."""
        gpus = self.fleet.nodes[node]
        names = {gpu.gpu.uuid for gpu in gpus}
        held = {holding.claim for holdings in self.holders(node).values() for holding in holdings}
        content = replace(
            self._content,
            fleet=Fleet.of(gpus),
            nodes=(self._nodes[node],),
            claims=tuple(self._claims[Key(*key.split("/"))] for key in sorted(held)),
            slices=(),
            offers=frozenset(offer for offer in self._offers if offer.gpu in names),
        )
        return ImaginedCluster(self.driver, content, self._offer_count, self._clock)

    def give(self, node: str, claims: Iterable[Claim]) -> None:
        """Add claims that are allocated on ``node``."""
        for claim in claims:
            self.add(claim)
        self.fleet = self.fleet.changed(self._held_on(node))

    def _extended(self, pod: Pod) -> list[Claim]:
        """The claim that the scheduler creates for the extended resources of a pod, if it requests any."""
        claim = claim_for(pod, classes_by_resource(self._content.classes.values()))
        if claim is None:
            return []
        metadata = msgspec.structs.replace(claim.metadata, name=f"{pod.metadata.name}-{EXTENDED}")
        return [Claim(metadata, claim.spec)]

    def _could_fit(self, pod: Pod, claims: Sequence[Claim]) -> Iterable[str]:
        """The nodes for whose free devices the controller could make all offers that ``pod`` needs.

        None for a pod that needs devices of other drivers, too: whether those are free is not looked at.
        """
        needed = [claim for claim in claims if claim.status.allocation is None]
        nodes = self._scheduler.nodes_for(pod, claims) - self._content.policies.keys()
        if not needed or len(nodes) < 2:
            return ()
        reader = RequirementsReader(self._matching, self._content.classes.values(), self.fleet)
        read = [reader.read(claim).requirements for claim in needed]
        alternatives = [requirements for requirements in read if not isinstance(requirements, RefusedRequest)]
        if len(alternatives) < len(read):
            return ()
        count = sum(len(claim.spec.devices.requests) for claim in needed)
        joint = map(joined, islice(product(*alternatives), MAX_COMBINATIONS))
        return {
            node
            for requirements in joint
            if len(requirements.requests) == count
            for node, outcome in self._untainted(requirements).outcomes(requirements, nodes)
            if outcome is SearchOutcome.FITS
        }

    def _untainted(self, requirements: ClaimRequirements) -> Feasibility:
        """Of the devices without taints of DeviceTaintRules that a request does not tolerate."""
        rules = untolerated(self._content.rules, requirements.requests)
        if not rules:
            return self._matching.feasibility(self.fleet)
        selectors = {request.selector for request in requirements.requests}
        fleet = with_taints(self.fleet, self.driver, rules, selectors)
        return Feasibility(fleet, self._matching, is_hypothetical=True)

    def _bind(self, placement: PodPlacement, node: str) -> None:
        """Store the allocations of a pod that is placed."""
        self._waiting = [pod for pod in self._waiting if pod is not placement.pod]
        for claim, allocation in placement.allocations:
            self.add(msgspec.structs.replace(claim, status=ClaimStatus(allocation)))
        self._scheduler.bind(node)
        self.fleet = self.fleet.changed(self._held_on(node))
        self._publish(self._possible())

    def _held_on(self, node: str) -> Iterator[FleetGpu]:
        """The GPUs of ``node`` of which more is held than before."""
        holders = self.holders(node)
        for gpu in self.fleet.nodes.get(node, ()):
            held = {device.name for device in gpu.held}
            devices = (device for name in holders if (device := gpu.device_named(name)) is not None)
            new = [device for device in devices if device.name not in held or device.kind in OF_SEVERAL]
            parts = [part for device in new for part in _parts(device, holders[device.name])]
            others = [device for device in gpu.held if device.kind not in OF_SEVERAL]
            if len(others) + len(parts) > len(gpu.held):
                yield gpu.holding((*others, *parts))

    # The controller

    def queue(self) -> Queue:
        """The claims of pods that could not be placed, as the controller sees them."""
        needed = {key for pod in self._waiting for key in pod.claims}
        pending = (claim for key, claim in self._claims.items() if key in needed and claim.status.allocation is None)
        nodes, classes = tuple(self._nodes.values()), tuple(self._content.classes.values())
        claims, pods = self._index.view(pending), tuple(self._waiting)
        content = self._content
        state = ClusterState(claims, classes, pods, nodes, taint_rules=content.rules, templates=content.templates)
        return Queue(state, self.fleet, self._matching, self._eligibility)

    def _decide(self, *, keep: bool = True, widened: Mapping[str, Nodes] | None = None) -> None:
        """Publish what the controller offers; ``keep``: together with the present offers, which are withdrawn later."""
        queue, wide = self.queue(), widened or {}
        current = self._possible()
        if self._content.mode is OfferMode.DISJOINT:
            chosen = self._disjoint.curate(queue, current, wide)
            self._planned = chosen.by_claim or {}
            self._publish(chosen.offers)
            return
        offers = self._curator.curate(self.fleet, demand_of(queue, wide), current, asked=queue.asked)
        self._publish({*offers, *(current if keep else ())})

    def _widen(self, pods: Collection[Pod]) -> None:
        """Publish all devices that match, as the controller does for claims that regular offers do not help."""
        queue, wide = self.queue(), dict[str, Nodes]()
        for pending in queue.pending:
            if not any(pod in pods for pod in pending.pods) or not queue.satisfiable(pending):
                continue
            node = queue.find_node(pending).node
            if self._content.mode is OfferMode.COUNTERS:
                wide[pending.key] = queue.nodes(pending)
            elif node is not None:
                wide[pending.key] = frozenset({node})
        if wide:
            self._decide(widened=wide)

    def _possible(self) -> set[Offer]:
        """The offers that still fit next to what is held."""
        return {offer for offer in self._offers if self.fleet.gpus[offer.gpu].state.admits(offer.spot)}

    def _publish(self, offers: Collection[Offer]) -> None:
        self._offers = frozenset(offers)
        requests = (request for claim in self._claims.values() for request in claim.spec.devices.requests)
        monitored = any(alternative.admin_access for request in requests for alternative in request.alternatives)
        monitors = self._published.monitors(self.fleet) if monitored else ()
        slices = chain(self._published.of(self.fleet, self._offers), monitors, self._content.slices)
        self._slices = SliceIndex(tainted(item, self._content.rules) for item in slices)
        self._held = HeldDevices.of(result for claim in self._claims.values() for result in claim.results)

    def _reasons(self, pod: Pod) -> Iterable[UnplacedReason]:
        plan = DisjointPlan(self._planned, ()) if self._content.mode is OfferMode.DISJOINT else None
        for key, reason in reasons_in(Situation(self.queue(), unreported=self._content.unreported, plan=plan)).items():
            if pod in reason.pending.pods and reason.code is not ReasonCode.WAITS:
                yield UnplacedReason(key, reason.code.value, reason.sentence)


class PublishedSlices:
    """The slices that node plugins would publish; those of a node of which nothing changed are not built again.

    ``policies`` are those of the nodes that do not follow the controller's plans.
    """

    def __init__(self, driver: str, mode: OfferMode, policies: Mapping[str, PublishPolicy]) -> None:
        self._driver, self._mode, self._policies = driver, mode, policies
        self._built: dict[str, tuple[tuple[FleetGpu, ...], frozenset[Offer], tuple[DetailedSlice, ...]]] = {}

    def of(self, fleet: Fleet, offers: Iterable[Offer]) -> Iterator[DetailedSlice]:
        """The slices of the nodes of ``fleet``."""
        offers_of = fleet.by_node(offers)
        for node, gpus in fleet.nodes.items():
            offered, built = frozenset(offers_of.get(node, ())), self._built.get(node)
            if built is None or built[0] is not gpus or built[1] != offered:
                self._built[node] = (gpus, offered, tuple(self._slices(node, gpus, offered)))
            yield from self._built[node][2]

    def monitors(self, fleet: Fleet) -> Iterator[DetailedSlice]:
        """The slices of the monitor devices, which nodes publish while a claim has adminAccess."""
        for node, gpus in fleet.nodes.items():
            pool = Pool(node, self._driver)
            content = SliceBuilder(pool).monitors(Monitor.of(gpu.gpu, gpu.number) for gpu in gpus if gpu.has_monitor)
            yield from _detailed(content, pool.of_monitors)

    def _slices(self, node: str, gpus: tuple[FleetGpu, ...], offers: frozenset[Offer]) -> Iterator[DetailedSlice]:
        policy = self._policies.get(node) or PublishPolicy(offers=offers, closing=True)
        policy, pool = replace(policy, mode=self._mode), Pool(node, self._driver)
        built = SliceBuilder(pool).build(_publishable(gpu).published(policy) for gpu in gpus)
        yield from _detailed(built, pool)


def _detailed(contents: Mapping[str, Content], pool: Pool) -> Iterator[DetailedSlice]:
    for name, content in contents.items():
        spec = msgspec.convert(slice_spec(content, pool, 1, len(contents)), DetailedSliceSpec)
        yield DetailedSlice(ObjectMeta(name, "0"), spec)


def _parts(device: Device, claims: Sequence[Held]) -> list[Device]:
    """The device, or of one that several claims can have what each of ``claims`` has."""
    return parts_of(device, claims) if device.kind in OF_SEVERAL else [device]


def _publishable(gpu: FleetGpu) -> PublishableGpu:
    return PublishableGpu(
        gpu.gpu,
        gpu.number,
        gpu.devices,
        prepared=tuple(merged(gpu.held)),
        allocated=(),
        shares_only=gpu.shares_only,
        foreign=ForeignPartitions(gpu.foreign),
        reserved=False,
        fault=gpu.fault,
        conditions=(),
        adopted=gpu.fault_kind is FaultKind.ADOPTED,
    )


def tainted(written: DetailedSlice, rules: Collection[DeviceTaintRule]) -> DetailedSlice:
    """The slice as the scheduler sees it: with the taints of the rules."""
    spec = written.spec
    if not rules:
        return written

    def changed(device: DetailedDevice) -> DetailedDevice:
        selecting = (rule for rule in rules if rule.selects(spec.driver, spec.pool.name, device.name))
        taints = tuple(rule.spec.taint for rule in selecting)
        return msgspec.structs.replace(device, taints=device.taints + taints) if taints else device

    devices = tuple(map(changed, spec.devices))
    return msgspec.structs.replace(written, spec=msgspec.structs.replace(spec, written_devices=devices))
