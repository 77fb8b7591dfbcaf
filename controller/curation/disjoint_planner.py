"""Disjoint offers: for clusters whose devices have no counters (``offer_mode.py``), so that no two offers may overlap.

The pods' pending claims come first, by priority and then by age. The claims of one pod are planned together, on one
node, or not at all. Of a gang at least as many pods as it needs are planned, on any nodes, or none, and none while pods
of it are missing. If there is no room for a pod or gang, later ones may take the free memory. After a while one such
pod gets a reservation: nothing new is offered on the GPUs that are kept for it (``controller.curation.reservation``).
What is left is offered for future claims: first ``offers`` full GPUs, then one device of each other kind in turn,
``offers`` times. Published offers are preferred, because what replaces one has to wait until it is fenced and
withdrawn.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from controller.cluster.unheld_devices import UnheldDevices
from controller.curation.offer_draft import STICKINESS, OfferDraft
from controller.curation.overdue_claims import OverdueClaims
from controller.curation.planner import PlannedOffers
from controller.curation.ranked_fleet import FleetPlace, RankedFleet
from controller.curation.reservation import Reservations, without
from controller.curation.shared_offers import SharedRoom
from controller.demand.demand import Eligible
from controller.demand.device_search import Budget, choose_devices
from controller.demand.feasibility import Nodes, SelectedKind
from controller.demand.gangs import Gang
from controller.demand.pending_claims import Queue
from controller.demand.requirements import ClaimRequirements
from driver.clock import soonest
from driver.kube.types import Pod
from driver.model.offer import FULL, SHARE, SHARED, DeviceKind, Offer, OfferKind, Spot
from driver.placement.ranking import Ranking

PodNeed = tuple[ClaimRequirements, Nodes]
"""What one pod requires, and the nodes on which it may run."""


class DisjointPlanner:
    """Plans offers that do not overlap; remembers rankings, overdue claims and the reservation.

    ``offers``: the number of offers of each kind without pending claims.
    """

    def __init__(self, ranking: Ranking, offers: int = 2) -> None:
        self._ranking = ranking
        self._offers = offers
        self._ranked: RankedFleet | None = None
        self._overdue_claims = OverdueClaims()
        self._reservations = Reservations()

    @property
    def next_s(self) -> float | None:
        return soonest(self._overdue_claims.next_s, self._reservations.next_s)

    def plan(self, queue: Queue, devices: UnheldDevices, announced: Collection[Offer]) -> PlannedOffers:
        """Offers for each pending claim that has room, then some of each kind for future claims.

        ``announced`` offers have no advantage: a claim gets a published one if there is one.
        """
        reserved = self._reservations.update(queue)
        return self.curate(queue, devices.offered, self._overdue_claims.node_in_turn(queue), reserved)

    def curate(
        self,
        queue: Queue,
        published: Collection[Offer],
        preferred_nodes: Mapping[str, Nodes],
        reserved: Collection[str] = (),
    ) -> PlannedOffers:
        """The plan, which depends on the arguments only. ``published`` are the present offers.

        ``preferred_nodes``: by key of an overdue claim (``controller.curation.overdue_claims``), the nodes on which to
        plan its devices; ignored if the pod can run on no node that all of its overdue claims prefer.
        """
        fleet = without(queue.feasibility.fleet, reserved)
        ranked = self._ranked
        if ranked is None or ranked.fleet is not fleet:
            ranked = self._ranked = RankedFleet(fleet, self._ranking, ranked)
        places = map(ranked.place, published)
        plan = _Plan(ranked, queue, sorted(place for place in places if place is not None))
        planned: dict[str, tuple[FleetPlace, ...]] = {}
        gang_of = {pod.metadata.key: gang for gang in queue.gangs for pod in gang.pods}
        done: set[Gang] = set()
        for pod in queue.pods:
            gang = gang_of.get(pod.metadata.key)
            if gang is not None:
                if gang not in done and not gang.missing:
                    planned |= plan.serve_gang(gang, planned.keys(), preferred_nodes)
                done.add(gang)
            elif planned.keys().isdisjoint(pending.key for pending in queue.of_pod(pod)):
                planned |= plan.serve_pod(pod, preferred_nodes)
        plan.fill(self._offers, ranked.default_kinds(queue.asked), queue.asked.gib)
        by_claim = {key: tuple(map(ranked.offer, places)) for key, places in planned.items()}
        requested = frozenset(place.spot.kind for places in planned.values() for place in places)
        offers = tuple(map(ranked.offer, sorted(plan.places.union(plan.shared.states, ranked.open_places))))
        return PlannedOffers(offers, requested, by_claim)


class _Plan:
    """Places that are planned one after the other; each fits next to those that were planned before.

    ``published`` are the places of present offers. ``shared``: the shared devices that are offered, for which several
    claims may be planned.
    """

    def __init__(self, fleet: RankedFleet, queue: Queue, published: Iterable[FleetPlace]) -> None:
        self.places: set[FleetPlace] = set()
        self._fleet, self._queue, self._feasibility = fleet, queue, queue.feasibility
        self._published: defaultdict[OfferKind, list[FleetPlace]] = defaultdict(list)
        for place in published:
            self._published[place.spot.kind].append(place)
        self.shared = SharedRoom(fleet, self._published[SHARED], STICKINESS)
        self._left: dict[FleetPlace, int] = {}
        """How many more claims can be planned for each shared partition that is planned already."""
        self._drafts: dict[OfferKind, OfferDraft] = {}
        self._unmet: set[PodNeed] = set()
        """What could not be planned: it can't be planned later either, because the free memory only shrinks."""

        self._nodes_left: dict[PodNeed, deque[str]] = {}
        """The nodes that may still have room for several devices: those that had none before are left out."""

        self._budgets: defaultdict[str, Budget] = defaultdict(Budget)
        """The steps left for the search, by namespace: no tenant keeps others from being planned."""

    def serve_gang(
        self, gang: Gang, planned: Collection[str], preferred_nodes: Mapping[str, Nodes]
    ) -> dict[str, tuple[FleetPlace, ...]]:
        """Plan devices for all pods of ``gang`` that there is room for; for none if they are fewer than it needs.

        Returns the places by key of the claim.

        ``planned`` are the keys of claims that have devices already.
        """
        unmet, places_before, shared_before = self._unmet.copy(), self.places.copy(), self.shared.states.copy()
        left_before = self._left.copy()
        nodes_left = {need: nodes.copy() for need, nodes in self._nodes_left.items()}
        published = {kind: places.copy() for kind, places in self._published.items()}
        of_gang: dict[str, tuple[FleetPlace, ...]] = {}
        served = 0
        for pod in gang.pods:
            keys = {pending.key for pending in self._queue.of_pod(pod)}
            shares_devices = not keys.isdisjoint(of_gang.keys() | planned)
            places = {} if shares_devices else self.serve_pod(pod, preferred_nodes)
            if shares_devices or places:
                served += 1
            of_gang |= places
        if served >= gang.needed:
            return of_gang
        for place in self.places - places_before:
            self._remove(place)
        self._unmet, self._nodes_left, self.shared.states = unmet, nodes_left, shared_before
        self._left = left_before
        self._published.update(published)
        return {}

    def serve_pod(self, pod: Pod, preferred_nodes: Mapping[str, Nodes]) -> dict[str, tuple[FleetPlace, ...]]:
        """Plan devices for all pending claims of ``pod``, or for none; by key of the claim."""
        keys = [pending.key for pending in self._queue.of_pod(pod)]
        nodes = self._queue.nodes_for(pod)
        nodes = nodes.intersection(*(preferred_nodes[key] for key in keys if key in preferred_nodes)) or nodes
        budget = self._budgets[pod.metadata.namespace]
        for requirements in self._queue.combinations(pod):
            need, requests = (requirements, nodes), requirements.requests
            if need in self._unmet or not requests or not self._feasibility.may_fit(*need):
                continue
            needs_one_device = len(requests) == 1 and requests[0].count == 1 and not requirements.constraints
            places = self._place_one(*need) if needs_one_device else self._place_several(*need, budget)
            if places:
                return dict.fromkeys(keys, tuple(map(self._add, places)))
            if needs_one_device or not budget.is_spent:
                self._unmet.add(need)
        return {}

    def fill(self, count: int, default_kinds: Mapping[OfferKind, Eligible], gib: int) -> None:
        """Plan ``count`` more offers of each of ``default_kinds``, if there is room.

        The same of shared devices, while none that is open has ``gib`` left, the most that claims ask for.
        """
        small_to_large = sorted(default_kinds.keys() - {FULL, SHARE}, key=self._fleet.sizes.__getitem__)
        one_of_each = [SHARE, *([SHARED] if self.shared.needs_spare(gib) else []), *small_to_large]
        for kind in [FULL] * count + one_of_each * count:
            if kind == SHARED:
                place = self.shared.next_unheld(self._draft(SHARED), None)
            else:
                place = self._place_for_future_claims(kind, default_kinds.get(kind))
            if place is not None:
                self._add(place)

    def _place_for_future_claims(self, kind: OfferKind, eligible: Eligible) -> FleetPlace | None:
        draft = self._draft(kind)
        best = draft.best(eligible)
        if best is None:
            return None
        there = (place for place in self._published_with_room(kind) if self._fleet.within(place, eligible))
        kept = min(there, key=lambda place: (draft.rank(place), place), default=None)
        if kept is not None and draft.rank(kept).growth <= best.ranked.terms.growth + STICKINESS:
            return kept
        return best.place

    def _place_one(self, requirements: ClaimRequirements, nodes: Nodes) -> list[FleetPlace]:
        """A place for one device of the smallest kind with room.

        A published offer, or else the place that causes the least fragmentation.
        """
        kinds = self._feasibility.kinds(requirements.requests[0].selector, nodes)
        for selected in self._feasibility.smallest_first(requirements.requests[0].selector, nodes):
            group = kinds[selected]
            if selected.kind == SHARED:
                place = self.shared.fullest(selected.gib, group)
                place = place or self.shared.next_unheld(self._draft(SHARED), group)
                if place is not None:
                    return [place._replace(spot=Spot(SHARED, selected.gib))]
                continue
            partly = (place for place, left in self._left.items() if left and place.spot.kind == selected.kind)
            usable = [place for place in partly if selected.has(place.spot) and self._fleet.within(place, group)]
            if usable:
                return [min(usable, key=lambda place: (self._left[place], place))]
            published = [
                place
                for place in self._published_with_room(selected.kind)
                if selected.has(place.spot) and self._fleet.within(place, group)
            ]
            places = published or self._best_of(selected, group)
            if places:
                rank = self._draft(selected.kind).rank
                return [min(places, key=lambda place: (rank(place), place))]
        return []

    def _best_of(self, selected: SelectedKind, group: frozenset[str]) -> Sequence[FleetPlace]:
        """The best place of one kind; all places, where a selector picks single placements."""
        if selected.starts is not None:
            admits = self._draft(selected.kind).admits
            places = self._fleet.places(selected.kind, group)
            return [place for place in places if selected.has(place.spot) and admits(place)]
        eligible: Eligible = None if len(group) == self._feasibility.gpus_with(selected.kind) else group
        best = self._draft(selected.kind).best(eligible)
        return [] if best is None else [best.place]

    def _place_several(self, requirements: ClaimRequirements, nodes: Nodes, budget: Budget) -> list[FleetPlace]:
        """Places on one node: published offers if those of a node suffice, otherwise new ones on the fullest with room.

        Empty if there are none or ``budget`` is spent; then another namespace may still find some.
        """
        if budget.is_spent:
            return []
        spots_by_gpu: defaultdict[str, list[Spot]] = defaultdict(list)
        for kind in self._published:
            for place in self._published_with_room(kind):
                spots_by_gpu[self._fleet.uuid(place)].append(place.spot)
        gpus, needed = self._feasibility.fleet.gpus, sum(requirements.counts)
        published_on = Counter(gpus[uuid].node for uuid, spots in spots_by_gpu.items() for _ in spots)
        for node in sorted(node for node, count in published_on.items() if count >= needed and node in nodes):
            places = self._on_node(requirements, node, budget, spots_by_gpu)
            if places:
                return places
        need = (requirements, nodes)
        if need not in self._nodes_left:
            self._nodes_left[need] = deque(self._feasibility.nodes_that_may_fit(*need))
        nodes_left = self._nodes_left[need]
        while nodes_left:
            places = self._on_node(requirements, nodes_left[0], budget)
            if places or budget.is_spent:
                return places
            nodes_left.popleft()
        return []

    def _on_node(
        self,
        requirements: ClaimRequirements,
        node: str,
        budget: Budget,
        published: Mapping[str, Collection[Spot]] | None = None,
    ) -> list[FleetPlace]:
        """The GPUs with the least free memory come first. ``published``: the only spots to use, by GPU."""
        gpus = sorted(self._feasibility.fleet.nodes[node], key=lambda gpu: gpu.state.free)
        position_of = self._fleet.position_of
        draft = self._draft(FULL)  # any draft will do: each has all planned places
        states = []
        for position in (position_of[gpu.gpu.uuid] for gpu in gpus):
            state, opened = draft.state(*position), self.shared.states.get(FleetPlace(*position, Spot(SHARED)))
            states.append(state if opened is None else state._replace(used=opened.used, clients=opened.clients))
        chosen = choose_devices(gpus, tuple(states), requirements, self._feasibility.matching.value, budget, published)
        return [FleetPlace(*position_of[gpu.gpu.uuid], spot) for gpu, spot in chosen]

    def _published_with_room(self, kind: OfferKind) -> list[FleetPlace]:
        """The published offers of ``kind`` that have room; the others are forgotten: the free memory only shrinks."""
        admits = self._draft(kind).admits
        self._published[kind] = [place for place in self._published[kind] if admits(place)]
        return self._published[kind]

    def _add(self, place: FleetPlace) -> FleetPlace:
        """Plan a place, or a part of a shared device; returns that of the device."""
        device = place._replace(spot=place.spot.device)
        is_open = device in self.shared.states
        if place.spot.kind == SHARED:
            self.shared.open(device)
            if place.spot.at:
                self.shared.take(device, place.spot.at)
        if place.spot.kind.type is DeviceKind.SHARED_PARTITION:
            is_open = device in self._left
            self._left[device] = self._left.get(device, self._fleet.claims(device)) - 1
        if not is_open:
            self.places.add(device)
            for draft in self._drafts.values():
                draft.add(device)
        return device

    def _remove(self, place: FleetPlace) -> None:
        self.places.remove(place)
        for draft in self._drafts.values():
            draft.remove(place)

    def _draft(self, kind: OfferKind) -> OfferDraft:
        """The draft that ranks the free places of ``kind``; it has all planned places, of whatever kind."""
        if kind not in self._drafts:
            draft = self._drafts[kind] = OfferDraft(self._fleet, kind)
            for place in sorted(self.places):
                draft.add(place)
        return self._drafts[kind]
