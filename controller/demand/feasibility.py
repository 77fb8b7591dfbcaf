"""The nodes of a fleet that can satisfy the requirements of claims, and the GPUs that selectors select (pure).

All answers are remembered. A ``Feasibility`` is made anew when the fleet changes; ``Matching`` keeps what outlasts it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

from controller.cluster.fleet import Fleet, FleetGpu, Hardware
from controller.cluster.kind_sizes import KindSize, sizes_of
from controller.demand.device_search import (
    Budget,
    SearchOutcome,
    States,
    choose_devices,
    fits,
    most_devices,
    refuses_request_for_all,
)
from controller.demand.requirements import AskedKindsMemory, ClaimRequirements, DeviceRequest
from controller.demand.selected_devices import Selector, Selectors, shared_matches
from driver.model.offer import SHARED, OfferKind, Spot
from driver.model.shared_memory import GIB
from driver.placement.occupancy import GpuState

MAX_UNDECIDED_NODES = 4
"""The search for a node ends after this many nodes on which it was given up."""

MAX_REQUIREMENTS, MAX_SELECTIONS = 64, 256
"""Entries remembered about a fleet whose hardware stays; there are not many different claims at a time."""

MAX_ANSWERS = 4096
"""Answers of one kind that are remembered about one fleet."""

K = TypeVar("K")
V = TypeVar("V")

Nodes = frozenset[str]
Group = frozenset[str]
"""UUIDs of GPUs."""


class SelectedKind(NamedTuple):
    """Devices that a selector selects: their kind, and where their placements start (None: anywhere).

    ``gib``: what a claim would have of a shared device; 0 for other kinds.
    """

    kind: OfferKind
    starts: frozenset[int] | None
    gib: int = 0

    def has(self, spot: Spot) -> bool:
        return spot.kind == self.kind and (self.starts is None or spot.at in self.starts)


class NodeSearch(NamedTuple):
    """Whether some node satisfies the requirements, and the first one that does."""

    outcome: SearchOutcome
    node: str | None = None


KindQuery = tuple[Selector, Nodes]
SetsQuery = tuple[Selector, SelectedKind, Nodes, tuple[str, ...]]
NodeOutcomes = dict[str, tuple[tuple[FleetGpu, ...], SearchOutcome]]
"""The outcome on each node, with the GPUs for which it holds."""


@dataclass
class HardwareCache:
    """Results about fleets with the same hardware, reused from one decision to the next.

    ``kinds`` by selector and nodes, and ``sets`` of GPUs by selector, kind, nodes and attributes. ``free`` slices and
    ``outcomes`` of a node hold as long as its GPUs are the same objects; ``order`` are the nodes by free slices.
    ``monitors``: by selector and minimum, the nodes on which it selects at least that many monitor devices, and how
    many. ``asked``: what claims and templates ask for. ``sizes``: see ``sizes_of``. ``present``, ``unheld`` and
    ``ideal`` are the last ``Feasibility`` of each kind.
    """

    hardware: Hardware | None
    kinds: dict[KindQuery, dict[SelectedKind, Group]] = field(default_factory=dict)
    sets: dict[SetsQuery, list[list[str]]] = field(default_factory=dict)
    free: dict[str, tuple[tuple[FleetGpu, ...], float]] = field(default_factory=dict)
    order: list[tuple[float, str]] = field(default_factory=list)
    having: Counter[OfferKind] = field(default_factory=Counter)
    monitors: dict[tuple[Selector, int], Mapping[str, int]] = field(default_factory=dict)
    outcomes: dict[ClaimRequirements, NodeOutcomes] = field(default_factory=dict)
    asked: AskedKindsMemory = field(default_factory=AskedKindsMemory)
    sizes: Mapping[OfferKind, KindSize] | None = None
    present: Feasibility | None = None
    unheld: Feasibility | None = None
    ideal: Feasibility | None = None


class Matching(Selectors):
    """What is kept from decision to decision: selectors, and results about fleets of the present hardware."""

    def __init__(self, driver: str) -> None:
        super().__init__(driver)
        self.cache = HardwareCache(None)

    def feasibility(self, fleet: Fleet) -> Feasibility:
        """The feasibility on the present fleet: the same object as long as the fleet is."""
        if self.cache.hardware is not fleet.hardware:
            self.cache = HardwareCache(fleet.hardware)
        if self.cache.present is None or self.cache.present.fleet is not fleet:
            self.cache.present = Feasibility(fleet, self)
        return self.cache.present


class Feasibility:
    """The GPUs that selectors select in one fleet, and the nodes that can satisfy requirements.

    ``is_hypothetical``: its answers are not remembered for later fleets. ``is_ideal``: see ``ideal``.
    """

    def __init__(
        self, fleet: Fleet, matching: Matching, *, is_hypothetical: bool = False, is_ideal: bool = False
    ) -> None:
        self.fleet = fleet
        self.matching = matching
        self._is_hypothetical, self._is_ideal = is_hypothetical, is_ideal
        self._cache = HardwareCache(None) if is_hypothetical else matching.cache
        self._states: dict[str, States] = {}
        self._outcomes: dict[Hashable, SearchOutcome] = {}
        self._found: dict[tuple[ClaimRequirements, Nodes], NodeSearch] = {}
        self._sets: dict[SetsQuery, list[list[str]]] = {}
        self._rooms: dict[Hashable, bool] = {}
        self._smallest: dict[tuple[ClaimRequirements, str], frozenset[OfferKind]] = {}
        self._groups: dict[Hashable, tuple[Group, ...]] = {}

    @property
    def ideal(self) -> Feasibility:
        """As if nothing were held and every GPU were healthy, in the needed MIG mode and open to every use.

        The same object while the hardware stays the same.
        """
        if self._cache.ideal is None:
            fleet = self.fleet.unheld
            fleet = fleet.changed(replace(gpu, tainted=()) for gpu in fleet if gpu.tainted)
            self._cache.ideal = Feasibility(fleet, self.matching, is_hypothetical=True, is_ideal=True)
        return self._cache.ideal

    @property
    def unheld(self) -> Feasibility:
        """As if nothing were held, and everything else as it is; the same object as long as ``Fleet.unheld`` is."""
        unheld = self._cache.unheld
        if unheld is None or unheld.fleet is not self.fleet.unheld:
            unheld = self._cache.unheld = Feasibility(self.fleet.unheld, self.matching, is_hypothetical=True)
        return unheld

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """The nodes with GPUs, the fullest first: a claim that fits there leaves the others whole."""
        free, order = self._cache.free, self._cache.order
        for node, gpus in self.fleet.nodes.items():
            before = free.get(node)
            if before is None or before[0] is not gpus:
                if before is not None:
                    del order[bisect_left(order, (before[1], node))]
                free[node] = (gpus, sum(state.free for state in self.states(node)))
                insort(order, (free[node][1], node))
        return tuple(node for _, node in order)

    def states(self, node: str) -> States:
        if node not in self._states:
            self._states[node] = tuple(map(self.state, self.fleet.nodes[node]))
        return self._states[node]

    def state(self, gpu: FleetGpu) -> GpuState:
        if not self._is_ideal:
            return gpu.state
        geometry, room, clients = gpu.state.geometry, gpu.state.room, gpu.unheld.state.clients
        return GpuState(geometry, shares=gpu.shares, taken=(0,) * len(geometry.limits), room=room, clients=clients)

    def gpus_on(self, nodes: Nodes) -> Iterator[FleetGpu]:
        return (gpu for gpu in self.fleet if gpu.node in nodes)

    def may_fit(self, requirements: ClaimRequirements, nodes: Nodes) -> bool:
        """Whether one of ``nodes`` satisfies ``requirements``, or might."""
        return self.find_node(requirements, nodes).outcome is not SearchOutcome.NO_ROOM

    def fits_on(self, gpus: Sequence[FleetGpu], requirements: ClaimRequirements) -> bool:
        """Whether hypothetical ``gpus`` of one node certainly satisfy ``requirements``."""
        states = tuple(gpu.state for gpu in gpus)
        return self._outcome(requirements, gpus, states, Budget()) is SearchOutcome.FITS

    def find_node(self, requirements: ClaimRequirements, nodes: Nodes) -> NodeSearch:
        """The fullest of ``nodes`` that satisfies ``requirements``."""
        query = (requirements, nodes)
        if query not in self._found:
            search = NodeSearch(SearchOutcome.NO_ROOM)
            undecided = 0
            for node, outcome in self.outcomes(requirements, nodes):
                undecided += outcome is SearchOutcome.UNKNOWN
                if outcome is not SearchOutcome.NO_ROOM:
                    search = NodeSearch(outcome, node if outcome is SearchOutcome.FITS else None)
                if outcome is SearchOutcome.FITS or undecided >= MAX_UNDECIDED_NODES:
                    break
            _remember(self._found, query, search)
        return self._found[query]

    def nodes_that_may_fit(self, requirements: ClaimRequirements, nodes: Nodes) -> list[str]:
        """Those of ``nodes`` that satisfy ``requirements``, or might."""
        return [node for node, outcome in self.outcomes(requirements, nodes) if outcome is not SearchOutcome.NO_ROOM]

    def outcomes(self, requirements: ClaimRequirements, nodes: Nodes) -> Iterator[tuple[str, SearchOutcome]]:
        """Whether each of ``nodes`` with free memory satisfies ``requirements``, the fullest first."""
        budget = Budget()
        # Outcomes by node, which later fleets reuse while the node's GPUs are the same objects.
        remembered = None if self._is_hypothetical else self._cache.outcomes.get(requirements)
        if remembered is None:
            remembered = {}
            _remember(self._cache.outcomes, requirements, remembered, MAX_REQUIREMENTS)
        for node in self.nodes:
            gpus, free = self._cache.free[node]
            if not free or node not in nodes:
                continue
            before = remembered.get(node)
            if before is not None and before[0] is gpus:
                yield node, before[1]
                continue
            outcome = self._outcome(requirements, gpus, self.states(node), budget)
            if outcome is not SearchOutcome.UNKNOWN:  # depends on the steps used for other nodes, too
                remembered[node] = (gpus, outcome)
            yield node, outcome

    def _outcome(
        self, requirements: ClaimRequirements, gpus: Sequence[FleetGpu], states: States, budget: Budget
    ) -> SearchOutcome:
        """Nodes with equal states have the same answer, unless attribute values or held devices matter."""
        requests = requirements.requests
        alike: Hashable = None
        if not requirements.constraints and all(request.count is not None for request in requests):
            alike = (requirements, states, tuple(request.selector.on(gpu) for request in requests for gpu in gpus))
            if alike in self._outcomes:
                return self._outcomes[alike]
        outcome = fits(gpus, states, requirements, self.matching.value, budget)
        if alike is not None:
            _remember(self._outcomes, alike, outcome)
        return outcome

    def kinds(self, selector: Selector, nodes: Nodes) -> dict[SelectedKind, Group]:
        """The kinds of devices that ``selector`` selects on ``nodes``, held or not, and the GPUs that have them."""
        query, cache = (selector, nodes), self._cache.kinds
        if query not in cache:
            everywhere, fleet = self.fleet.nodes.keys() <= nodes, self.fleet.gpus
            gpus_of: dict[SelectedKind, list[str]] = {}
            for matches, alike in selector.among(self.fleet):
                gpus = alike if everywhere else [uuid for uuid in alike if fleet[uuid].node in nodes]
                for kind, starts in matches.starts_by_kind.items() if gpus else ():
                    selected = SelectedKind(kind, starts, matches.gib if kind == SHARED else 0)
                    gpus_of.setdefault(selected, []).extend(gpus)
            _remember(cache, query, {kind: frozenset(gpus) for kind, gpus in gpus_of.items()}, MAX_SELECTIONS)
        return cache[query]

    def smallest_first(self, selector: Selector, nodes: Nodes | None = None) -> list[SelectedKind]:
        """The ``kinds`` by the memory of their devices, then by their compute slices; None: on all nodes."""
        if self._cache.sizes is None:
            self._cache.sizes = sizes_of(self.fleet)
        sizes, kinds = self._cache.sizes, self.kinds(selector, frozenset(self.fleet.nodes) if nodes is None else nodes)
        of_part = {
            selected: sizes[SHARED]._replace(memory_bytes=selected.gib * GIB) for selected in kinds if selected.gib
        }
        return sorted(kinds, key=lambda item: (of_part.get(item) or sizes[item.kind], sorted(item.starts or ())))

    def has_room(
        self, request: DeviceRequest, selected: SelectedKind, nodes: Nodes, attributes: tuple[str, ...]
    ) -> bool:
        """Whether as many ``selected`` devices as the request counts are free on a node, of equal ``attributes``."""
        if request.count != 1 or attributes:
            return bool(self.sufficient_gpu_sets(request, selected, nodes, attributes))
        query = (request, selected, nodes)
        if query not in self._rooms:
            gpus = self.kinds(request.selector, nodes)[selected]
            able = (gpu for node in self.nodes if node in nodes for gpu in self._free_on(node) if gpu in gpus)
            _remember(self._rooms, query, any(self._capacity([gpu], selected) for gpu in able))
        return self._rooms[query]

    def _free_on(self, node: str) -> Iterator[str]:
        gpus, free = self._cache.free[node]
        return (gpu.gpu.uuid for gpu in gpus) if free else iter(())

    def smallest_kinds(self, requirements: ClaimRequirements, node: str) -> frozenset[OfferKind]:
        """The kinds of the smallest devices that satisfy ``requirements`` on ``node``; empty if none are found."""
        query = (requirements, node)
        if query not in self._smallest:
            gpus, states = self.fleet.nodes[node], self.states(node)
            chosen = choose_devices(gpus, states, requirements, self.matching.value, Budget())
            _remember(self._smallest, query, frozenset(spot.kind for _, spot in chosen))
        return self._smallest[query]

    def monitors(self, request: DeviceRequest) -> Mapping[str, int]:
        """The nodes with enough GPUs whose monitor device a request with adminAccess selects, and how many they have.

        GPUs that do not answer are counted, too.
        """
        query = (request.selector, request.count or 1)
        if query not in self._cache.monitors:
            among = list(request.selector.monitors_among(self.fleet))
            selected = (gpus for rejection, gpus in among if rejection is None)
            counts = Counter(self.fleet.gpus[uuid].node for gpus in selected for uuid in gpus)
            enough = {node: count for node, count in counts.items() if count >= query[1]}
            if any(rejection is not None and rejection.is_exhausted for rejection, _ in among):
                return enough  # not remembered: the selector's time was used up, and a later call may find more
            _remember(self._cache.monitors, query, enough, MAX_SELECTIONS)
        return self._cache.monitors[query]

    def gpus_with(self, kind: OfferKind) -> int:
        """The number of GPUs in the whole fleet that have devices of ``kind``."""
        having = self._cache.having
        if not having:
            alike = Counter((gpu.state.geometry, bool(gpu.shares), gpu.shared is not None) for gpu in self.fleet)
            for (geometry, divided, shared), count in alike.items():
                for offered in GpuState(geometry, shares=int(divided), room=int(shared)).offered():
                    having[offered] += count
        return having[kind]

    def most_on_one_node(self, request: DeviceRequest, nodes: Nodes) -> int:
        """The most devices for ``request`` that one of ``nodes`` can provide at once."""
        return max(
            (
                sum(map(most_devices, self.states(node), map(request.selector.on, self.fleet.nodes[node])))
                for node in self.nodes
                if node in nodes
            ),
            default=0,
        )

    def gpu_sets(
        self, request: DeviceRequest, selected: SelectedKind, nodes: Nodes, attributes: tuple[str, ...]
    ) -> list[list[str]]:
        """The GPUs on ``nodes`` with ``selected`` devices, by node and values of ``attributes``.

        GPUs without a value of one of the attributes are left out; so are, for a request for all devices, the nodes
        on which the scheduler refuses it.
        """
        ignores_held_devices = request.count is not None
        query = (request.selector, selected, nodes, attributes)
        cache, most = (self._cache.sets, MAX_SELECTIONS) if ignores_held_devices else (self._sets, MAX_ANSWERS)
        if query not in cache:
            sets: dict[Hashable, list[str]] = {}
            gpus = self.kinds(request.selector, nodes).get(selected, frozenset())
            for gpu in self.gpus_on(nodes):
                if gpu.gpu.uuid not in gpus or (not ignores_held_devices and self._refuses_all(request, gpu.node)):
                    continue
                spot = Spot(selected.kind, _a_start(gpu, selected))
                values = tuple(self.matching.value(gpu, spot, name) for name in attributes)
                if None not in values:
                    sets.setdefault((gpu.node, values), []).append(gpu.gpu.uuid)
            _remember(cache, query, list(sets.values()), most)
        return cache[query]

    def sufficient_gpu_sets(
        self, request: DeviceRequest, selected: SelectedKind, nodes: Nodes, attributes: tuple[str, ...]
    ) -> tuple[Group, ...]:
        """The ``gpu_sets`` that can provide the devices at present."""
        query = (request, selected, nodes, attributes)
        if query not in self._groups:
            sets, count = self.gpu_sets(request, selected, nodes, attributes), self.count(request, selected, nodes)
            enough = [gpus for gpus in sets if self._capacity(gpus, selected) >= count > 0]
            _remember(self._groups, query, tuple(map(frozenset, enough)))
        return self._groups[query]

    def count(self, request: DeviceRequest, selected: SelectedKind, nodes: Nodes) -> int:
        """The number of devices requested; for all devices of a node, the most that one node can provide."""
        if request.count is not None:
            return request.count
        return max((self._capacity(gpus, selected) for gpus in self.gpu_sets(request, selected, nodes, ())), default=0)

    def _capacity(self, gpus: Iterable[str], selected: SelectedKind) -> int:
        """The number of ``selected`` devices that these GPUs can provide at once."""
        only = shared_matches(((selected.kind, selected.starts),), selected.gib)
        return sum(most_devices(self.state(self.fleet.gpus[uuid]), only) for uuid in gpus)

    def _refuses_all(self, request: DeviceRequest, node: str) -> bool:
        """Whether the scheduler refuses a request for all devices there, since some of them are held or tainted."""
        return any(refuses_request_for_all(gpu, request.selector.on(gpu)) for gpu in self.fleet.nodes[node])


def _remember(cache: dict[K, V], query: K, answer: V, most: int = MAX_ANSWERS) -> None:
    """Add an answer to ``cache``, which is emptied first if it is full."""
    if len(cache) >= most:
        cache.clear()
    cache[query] = answer


def _a_start(gpu: FleetGpu, selected: SelectedKind) -> int:
    """The start of any ``selected`` device: those of one GPU differ in no attribute by which GPUs are grouped."""
    if selected.starts:
        return min(selected.starts)
    profile = gpu.gpu.profile_named(selected.kind.profile) if selected.kind.profile is not None else None
    return profile.placements[0].start if profile is not None else 0
