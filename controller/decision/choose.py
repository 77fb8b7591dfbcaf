"""The second stage of a decision: choose what is to be offered, and what is published in any case."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from controller.cluster.claim_index import PoolDevice
from controller.curation.counters_planner import CountersPlanner
from controller.curation.disjoint_planner import DisjointPlanner
from controller.curation.listed_devices import ListedDevices
from controller.curation.planner import OfferPlanner, PlannedOffers
from controller.curation.reservation import apart, devices_for, reserved_gpus, without
from controller.decision.read import DecisionInput, NodeStates
from controller.demand.pending_claims import Queue
from controller.demand.queued_workload_claims import queued_needs
from controller.fence.fenced_devices import FencedDevices
from controller.settings import ControllerSettings
from driver.clock import soonest
from driver.kube.types import Pod
from driver.model.offer import Offer
from driver.model.plan import OfferMode
from driver.placement.measure import Measure
from driver.placement.ranking import Ranking

NOMINATED_SECONDS = 600.0
"""Longest time for which a nominated node protects offers: the scheduler gives up binding volumes after that."""

RESERVED_INTERVAL_SECONDS = 1.0
"""Between two decisions while GPUs are reserved: no watch reports the end of a reservation."""


class WaitsFor(Enum):
    """What an offer waits for before it may be written into a plan."""

    OVERLAPPING_DEVICES = "published devices that overlap it leave the slices first"
    FENCE = "its device is fenced, and that could not be lifted"
    CLAIMS = "the cache of claims has not processed every change of what is held on its GPU"


@dataclass(frozen=True)
class ChosenOffers:
    """What is to be offered, from the choice to the plans.

    ``wanted``: every offer that is to be made; ``waiting``: those of them that can not be made now, with the cause.
    ``listed``: what is published whether it is offered or not. ``withdrawn``: the devices that leave the slices now.
    ``planned`` is what the planner of the offer mode answered.
    """

    planned: PlannedOffers
    wanted: frozenset[Offer]
    listed: frozenset[Offer]
    withdrawn: frozenset[PoolDevice] = frozenset()
    waiting: Mapping[Offer, WaitsFor] = field(default_factory=dict)

    @property
    def possible(self) -> frozenset[Offer]:
        return self.wanted - self.waiting.keys()

    def waiting_for(self, cause: WaitsFor) -> set[Offer]:
        return {offer for offer, waits_for in self.waiting.items() if waits_for is cause}

    def let_wait(self, offers: Iterable[Offer], cause: WaitsFor) -> ChosenOffers:
        """The same, with ``offers`` waiting, too."""
        return replace(self, waiting={**self.waiting, **dict.fromkeys(offers, cause)})


class NominatedPods:
    """The offers that the scheduler may have chosen for a pod without having written the allocation yet.

    Kubernetes 1.35 and newer write ``nominatedNodeName`` before they allocate claims, which takes long where a volume
    is provisioned first (KEP-5278). These offers need not be withdrawn: the fence would refuse the allocation.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[tuple[str, str], float] = {}

    def update(self, queue: Queue, offered: Iterable[Offer]) -> frozenset[Offer]:
        """Those of ``offered`` that may be chosen already."""
        now = self._clock()
        nominated = [pod for pod in queue.pods if pod.status.nominated_node_name]
        nominations = {(pod.metadata.uid, pod.status.nominated_node_name): pod for pod in nominated}
        self._since = {nomination: self._since.get(nomination, now) for nomination in nominations}
        recent = [pod for key, pod in nominations.items() if now - self._since[key] < NOMINATED_SECONDS]
        by_gpu: dict[str, list[Offer]] = {}
        for offer in offered if recent else ():
            by_gpu.setdefault(offer.gpu, []).append(offer)
        return frozenset(offer for pod in recent for offer in _matching(queue, pod, by_gpu))


def _matching(queue: Queue, pod: Pod, by_gpu: Mapping[str, Iterable[Offer]]) -> Iterator[Offer]:
    """The offers on the node for which ``pod`` is nominated that match one of its requests."""
    node = frozenset({pod.status.nominated_node_name}) & queue.nodes_for(pod)
    for requirements in queue.combinations(pod):
        for request in requirements.requests:
            for kind, gpus in queue.feasibility.kinds(request.selector, node).items():
                for gpu in gpus & by_gpu.keys():
                    yield from (offer for offer in by_gpu[gpu] if kind.has(offer.spot))


class ChooseStage:
    """Asks the planner of the cluster's offer mode."""

    def __init__(self, settings: ControllerSettings, fenced: FencedDevices) -> None:
        self._fenced, self._is_reserved = fenced, False
        ranking = Ranking(Measure(settings.weights))
        self._planners: Mapping[OfferMode, OfferPlanner] = {
            OfferMode.COUNTERS: CountersPlanner(ranking, settings.offers),
            OfferMode.DISJOINT: DisjointPlanner(ranking, settings.offers),
        }
        self._planner = self._planners[OfferMode.COUNTERS]
        self._listed_devices = ListedDevices(settings.min_published, settings.offers)
        self._listed_for: NodeStates | None = None
        """For what ``_listed`` was chosen; None: queued Workloads mattered, too."""
        self._listed: frozenset[Offer] = frozenset()
        self._nominated = NominatedPods()

    @property
    def next_s(self) -> float | None:
        return soonest(self._planner.next_s, RESERVED_INTERVAL_SECONDS if self._is_reserved else None)

    def choose(self, seen: DecisionInput) -> ChosenOffers:
        """What to offer, whether it is possible at once or not."""
        self._planner = self._planners[seen.mode]
        plans, devices = seen.snapshot.plans, seen.devices
        refusing, gpus = seen.nodes.refusing, seen.fleet.gpus
        announced = {offer for offer in devices.unpublished(plans) if gpus[offer.gpu].node not in refusing}
        reservations, queue, kept = self._fenced.reservations, seen.queue, dict[str, list[Offer]]()
        reserved = reserved_gpus(queue, reservations) if reservations else {}
        self._is_reserved = bool(reserved)
        if reserved:
            kept = devices_for(queue, reserved)
            kept = kept if seen.mode is OfferMode.COUNTERS else apart(queue, kept, devices.offered)
            queue = queue.on(without(seen.fleet, reserved))
        planned = self._planner.plan(queue, devices, announced)
        planned = planned.including(kept) if kept else planned
        nominated = self._nominated.update(seen.queue, devices.offered)
        listed: Collection[Offer] = ()
        if seen.mode is OfferMode.COUNTERS:  # listed devices would keep disjoint offers that overlap them waiting
            needed = () if seen.queued is None else queued_needs(seen.queued)
            if needed or self._listed_for is not seen.nodes:
                self._listed = self._listed_devices.update(seen.fleet, seen.nodes.following, needed)
                self._listed_for = None if needed else seen.nodes
            listed = self._listed
        return ChosenOffers(
            planned,
            wanted=frozenset(devices.offerable({*planned.offers, *nominated}, plans)),
            listed=frozenset(devices.offerable(listed, plans)),
        )
