"""Disjoint offers: for clusters whose scheduler does not subtract counters, so that no two offers may overlap (pure).

The pods' pending claims come first, by priority and then by age. The claims of one pod are planned together, on one
node, or not at all, and so are the pods of a gang, on any nodes; a pod or gang for which there is no room at present
does not keep others from the free memory, except a pod from that of GPUs that are reserved for it after a while
(``controller.demand.reservation``). What is left goes to offers for claims to come: so many full GPUs first, which stay
whole, and then in turn one of every other kind, from small to large. Published offers are preferred, because to replace
one takes about as long as a fence.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping

from controller.curation.curator import OfferDraft
from controller.curation.planner import PlannedOffers
from controller.curation.ranked_fleet import Place, RankedFleet
from controller.demand.demand import Eligible
from controller.demand.device_search import Budget, choose_devices
from controller.demand.feasibility import Kind, Nodes
from controller.demand.gangs import Gang
from controller.demand.pending_claims import Queue
from controller.demand.requirements import ClaimRequirements
from controller.demand.reservation import Reserved, without
from driver.kube.types import Pod
from driver.model.offer import FULL, SHARE, Offer, OfferKind, Spot
from driver.placement.ranking import Ranking

Wanted = tuple[ClaimRequirements, Nodes]


class DisjointCurator:
    """Chooses the offers of a fleet. The result depends on the arguments only; remembered rankings save time.

    ``offers``: the number of offers of each kind without pending claims. ``stickiness``: a published offer for claims
    to come is given up for one whose growth of fragmentation is less by more than this, in memory slices.
    """

    def __init__(self, ranking: Ranking, offers: int = 2, stickiness: float = 0.5) -> None:
        self._ranking = ranking
        self._offers = offers
        self._stickiness = stickiness
        self._ranked: RankedFleet | None = None

    def curate(
        self, queue: Queue, published: Collection[Offer], only_on: Mapping[str, Nodes], reserved: Reserved | None = None
    ) -> PlannedOffers:
        """``published`` are the present offers. ``only_on``: the nodes to plan on for claims that offers did not help.

        The keys of ``only_on`` are those of claims (``controller.demand.starvation``).
        """
        fleet = without(queue.feasibility.fleet, reserved)
        ranked = self._ranked = RankedFleet(fleet, self._ranking, self._ranked)
        standing = sorted(place for offer in published if (place := ranked.place(offer)) is not None)
        plan = _Plan(ranked, queue, standing)
        planned: dict[str, tuple[Place, ...]] = {}
        gang_of = {pod.metadata.key: gang for gang in queue.gangs for pod in gang.pods}
        done: set[Gang] = set()
        for pod in queue.pods:
            gang = gang_of.get(pod.metadata.key)
            if gang is not None:
                if gang not in done and not gang.missing:
                    planned |= plan.serve_gang(gang, planned.keys(), only_on)
                done.add(gang)
            elif planned.keys().isdisjoint(each.key for each in queue.of_pod(pod)):
                planned |= plan.serve_pod(pod, only_on)
        plan.fill(self._offers, self._stickiness)
        offers = {key: tuple(map(ranked.offer, places)) for key, places in planned.items()}
        return PlannedOffers(tuple(map(ranked.offer, sorted(plan.places))), offers)


class _Plan:
    """Places that are planned one after the other, each beside the ones before."""

    def __init__(self, fleet: RankedFleet, queue: Queue, standing: Iterable[Place]) -> None:
        self.places: set[Place] = set()
        self._fleet, self._queue, self._feasibility = fleet, queue, queue.feasibility
        self._published: defaultdict[OfferKind, list[Place]] = defaultdict(list)
        for place in standing:
            self._published[place.spot.kind].append(place)
        self._drafts: dict[OfferKind, OfferDraft] = {}
        self._unmet: set[Wanted] = set()
        """What could not be planned: it can't be later either, because the free memory only shrinks."""

        self._nodes_left: dict[Wanted, deque[str]] = {}
        """The nodes that may still have room for several devices: those that had none before are left out."""

        self._budgets: defaultdict[str, Budget] = defaultdict(Budget)
        """The steps left for the search, by namespace: no tenant keeps others from being planned."""

    def serve_gang(
        self, gang: Gang, planned: Collection[str], only_on: Mapping[str, Nodes]
    ) -> dict[str, tuple[Place, ...]]:
        """Plan devices for as many pods of ``gang`` as it needs at least, or for none; by key of the claim.

        ``planned`` are the keys of claims that have devices already.
        """
        before = self._unmet.copy(), {wanted: nodes.copy() for wanted, nodes in self._nodes_left.items()}
        standing = {key: places.copy() for key, places in self._published.items()}
        places_before = self.places.copy()
        found: dict[str, tuple[Place, ...]] = {}
        served = 0
        for pod in gang.pods:
            claims = {each.key for each in self._queue.of_pod(pod)}
            shared = not claims.isdisjoint(found.keys() | planned)
            places = {} if shared else self.serve_pod(pod, only_on)
            served += shared or bool(places)
            found |= places
        if served >= gang.needed:
            return found
        for place in self.places - places_before:
            self._remove(place)
        self._unmet, self._nodes_left = before[0], before[1]
        self._published.update(standing)
        return {}

    def serve_pod(self, pod: Pod, only_on: Mapping[str, Nodes]) -> dict[str, tuple[Place, ...]]:
        """Plan devices for all pending claims of ``pod``, or for none; by key of the claim."""
        claims = [each.key for each in self._queue.of_pod(pod)]
        turn = [only_on[key] for key in claims if key in only_on]
        places = self.serve(pod, frozenset.intersection(*turn) if turn else None)
        return dict.fromkeys(claims, tuple(places)) if places else {}

    def serve(self, pod: Pod, only_on: Nodes | None) -> list[Place]:
        """Plan devices for all pending claims of ``pod``; none if not all of them have room."""
        nodes = self._queue.nodes_for(pod)
        if only_on is not None:
            nodes = nodes & only_on or nodes
        for requirements in self._queue.combinations(pod):
            wanted = (requirements, nodes)
            if wanted in self._unmet or not requirements.requests or not self._feasibility.could(*wanted):
                continue
            if _is_one(requirements):
                found = self._one(*wanted)
            else:
                found = self._several(*wanted, self._budgets[pod.metadata.namespace])
            if found:
                for place in found:
                    self._add(place)
                return found
            self._unmet.add(wanted)
        return []

    def fill(self, count: int, stickiness: float) -> None:
        """Plan ``count`` more offers of each kind, as far as there is room."""
        small_to_large = sorted(set(self._fleet.keys) - {FULL, SHARE}, key=self._size)
        for kinds in ([FULL], *[[SHARE, *small_to_large]] * count):
            for key in kinds:
                for _ in range(count if key == FULL else 1):
                    if (place := self._spare(key, stickiness)) is not None:
                        self._add(place)

    def _spare(self, key: OfferKind, stickiness: float) -> Place | None:
        draft = self._draft(key)
        best = draft.best(None)
        if best is None:
            return None
        kept = min(self._standing(key), key=lambda place: (draft.rank(place), place), default=None)
        if kept is not None and draft.rank(kept).growth <= best.ranked.terms.growth + stickiness:
            return kept
        return best.place

    def _one(self, requirements: ClaimRequirements, nodes: Nodes) -> list[Place]:
        """A place for one device: a published offer, or else the one that causes the least fragmentation."""
        kinds = self._feasibility.kinds(requirements.requests[0].selector, nodes)
        standing = [(kind, place) for kind, group in kinds.items() for place in self._standing_of(kind, group)]
        found = standing or [(kind, place) for kind, group in kinds.items() for place in self._best_of(kind, group)]
        ranked = ((self._draft(kind.key).rank(place), place) for kind, place in found)
        return [place for _, place in sorted(ranked)[:1]]

    def _standing_of(self, kind: Kind, group: frozenset[str]) -> list[Place]:
        within = self._fleet.within
        return [place for place in self._standing(kind.key) if _is_of(place.spot, kind) and within(place, group)]

    def _best_of(self, kind: Kind, group: frozenset[str]) -> Iterable[Place]:
        """The best place of one kind; all places, where a selector picks single placements."""
        if kind.starts is not None:
            admits = self._draft(kind.key).admits
            places = self._fleet.places(kind.key, group)
            return [place for place in places if _is_of(place.spot, kind) and admits(place)]
        eligible: Eligible = None if len(group) == self._feasibility.having(kind.key) else group
        best = self._draft(kind.key).best(eligible)
        return [] if best is None else [best.place]

    def _several(self, requirements: ClaimRequirements, nodes: Nodes, budget: Budget) -> list[Place]:
        """Places for several devices on one node: published offers if they suffice, and on the fullest such node."""
        gpus = self._feasibility.fleet.gpus
        standing: defaultdict[str, list[Spot]] = defaultdict(list)
        for place in (place for key in self._published for place in self._standing(key)):
            standing[self._fleet.uuid(place)].append(place.spot)
        enough = Counter(gpus[uuid].node for uuid, spots in standing.items() for _ in spots)
        for node in sorted(node for node, count in enough.items() if count >= sum(requirements.counts)):
            if node in nodes and (found := self._on_node(requirements, node, budget, standing)):
                return found
        wanted = (requirements, nodes)
        if wanted not in self._nodes_left:
            self._nodes_left[wanted] = deque(self._feasibility.nodes_for(*wanted))
        left = self._nodes_left[wanted]
        while left:
            if found := self._on_node(requirements, left[0], budget):
                return found
            left.popleft()
        return []

    def _on_node(
        self,
        requirements: ClaimRequirements,
        node: str,
        budget: Budget,
        published: Mapping[str, Collection[Spot]] | None = None,
    ) -> list[Place]:
        """The GPUs with the least free memory come first. ``published``: the only spots to use, by GPU."""
        gpus = sorted(self._feasibility.fleet.nodes[node], key=lambda entry: entry.state.free)
        found = [self._fleet.found[entry.gpu.uuid] for entry in gpus]
        states = tuple(self._draft(FULL).state(*each) for each in found)
        chosen = choose_devices(gpus, states, requirements, self._feasibility.matching.value, budget, published)
        return [Place(*self._fleet.found[entry.gpu.uuid], spot) for entry, spot in chosen]

    def _standing(self, key: OfferKind) -> list[Place]:
        """Published offers of ``key`` that have room. The others never have again: the free memory only shrinks."""
        admits = self._draft(key).admits
        found = self._published[key] = [place for place in self._published[key] if admits(place)]
        return found

    def _size(self, key: OfferKind) -> int:
        """The memory slices of a partition of ``key``, on the first GPU that has it."""
        windows = (entry.state.geometry.windows.get(key.profile or "") for entry in self._feasibility.fleet)
        return next((masks[0].bit_count() for masks in windows if masks), 0)

    def _add(self, place: Place) -> None:
        self.places.add(place)
        for draft in self._drafts.values():
            draft.add(place)

    def _remove(self, place: Place) -> None:
        self.places.remove(place)
        for draft in self._drafts.values():
            draft.remove(place)

    def _draft(self, key: OfferKind) -> OfferDraft:
        """The draft with all planned places that ranks those of ``key``."""
        if key not in self._drafts:
            draft = self._drafts[key] = OfferDraft(self._fleet, key)
            for place in sorted(self.places):
                draft.add(place)
        return self._drafts[key]


def _is_one(requirements: ClaimRequirements) -> bool:
    return len(requirements.requests) == 1 and requirements.requests[0].count == 1 and not requirements.constraints


def _is_of(spot: Spot, kind: Kind) -> bool:
    return spot.kind == kind.key and (kind.starts is None or spot.at in kind.starts)
