"""The nodes of a fleet that can satisfy the requirements of claims, and the GPUs that selectors select (pure).

All answers are remembered. A ``Feasibility`` is made anew when the fleet changes; ``Matching`` keeps what outlasts it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from controller.cluster.fleet import Fleet, FleetGpu, Hardware
from controller.demand.device_search import Budget, SearchOutcome, States, fits, is_in_use, most_devices
from controller.demand.requirements import ClaimRequirements, DeviceRequest
from controller.demand.selected_devices import Matches, Selector, Selectors
from driver.model.offer import OfferKind, Spot
from driver.placement.occupancy import GpuState

MAX_UNDECIDED_NODES = 4
"""The search for a node ends after this many nodes on which it was given up."""

MAX_REQUIREMENTS, MAX_SELECTIONS = 64, 256
"""Entries remembered about a fleet whose hardware stays; there are not many different claims at a time."""

MAX_ANSWERS = 4096
"""Answers of one kind that are remembered about one fleet."""

T = TypeVar("T")

Nodes = frozenset[str]
Group = frozenset[str]
"""UUIDs of GPUs."""


class Kind(NamedTuple):
    """Devices that a selector selects: a key, and where their placements start (None: anywhere)."""

    key: OfferKind
    starts: frozenset[int] | None

    def has(self, spot: Spot) -> bool:
        return spot.kind == self.key and (self.starts is None or spot.at in self.starts)


class NodeSearch(NamedTuple):
    """Whether some node satisfies the requirements, and the first one that does."""

    outcome: SearchOutcome
    node: str | None = None


KindQuery = tuple[Selector, Nodes]
SetsQuery = tuple[Selector, Kind, Nodes, tuple[str, ...]]
NodeOutcomes = dict[str, tuple[tuple[FleetGpu, ...], SearchOutcome]]
"""The outcome on each node, with the GPUs for which it holds."""


@dataclass
class HardwareMemory:
    """Results about fleets with the same hardware, reused from one decision to the next.

    ``kinds`` by selector and nodes, and ``sets`` of GPUs by selector, kind, nodes and attributes. ``free`` slices and
    ``outcomes`` of a node hold as long as its GPUs are the same objects; ``order`` are the nodes by free slices.
    ``present``, ``unheld`` and ``emptied`` are the last ``Feasibility`` of each kind.
    """

    hardware: Hardware | None
    kinds: dict[KindQuery, dict[Kind, Group]] = field(default_factory=dict)
    sets: dict[SetsQuery, list[list[str]]] = field(default_factory=dict)
    free: dict[str, tuple[tuple[FleetGpu, ...], float]] = field(default_factory=dict)
    order: list[tuple[float, str]] = field(default_factory=list)
    having: Counter[OfferKind] = field(default_factory=Counter)
    outcomes: dict[ClaimRequirements, NodeOutcomes] = field(default_factory=dict)
    present: Feasibility | None = None
    unheld: Feasibility | None = None
    emptied: Feasibility | None = None


class Matching(Selectors):
    """What is kept from decision to decision: selectors, and results about fleets of the present hardware."""

    def __init__(self, driver: str) -> None:
        super().__init__(driver)
        self.memory = HardwareMemory(None)

    def feasibility(self, fleet: Fleet) -> Feasibility:
        """The feasibility on the present fleet: the same object as long as the fleet is."""
        if self.memory.hardware is not fleet.hardware:
            self.memory = HardwareMemory(fleet.hardware)
        if self.memory.present is None or self.memory.present.fleet is not fleet:
            self.memory.present = Feasibility(fleet, self)
        return self.memory.present


class Feasibility:
    """The GPUs that selectors select in one fleet, and the nodes that can satisfy requirements.

    ``ideal``: as if nothing were held, all GPUs were healthy, in the MIG mode that is needed, and for every use.
    Answers about a fleet that is only ``imagined`` are forgotten with it.
    """

    def __init__(self, fleet: Fleet, matching: Matching, *, ideal: bool = False, imagined: bool = False) -> None:
        self.fleet = fleet
        self.matching = matching
        self._ideal = ideal
        self._imagined = imagined
        self._memory = HardwareMemory(None) if imagined else matching.memory
        self._states: dict[str, States] = {}
        self._outcomes: dict[Hashable, SearchOutcome] = {}
        self._found: dict[tuple[ClaimRequirements, Nodes], NodeSearch] = {}
        self._sets: dict[SetsQuery, list[list[str]]] = {}
        self._groups: dict[Hashable, tuple[Group, ...]] = {}
        self._matches: dict[Kind, Matches] = {}

    @property
    def emptied(self) -> Feasibility:
        """With ``ideal``; the same object as long as the hardware is."""
        if self._memory.emptied is None:
            self._memory.emptied = Feasibility(self.fleet, self.matching, ideal=True, imagined=True)
        return self._memory.emptied

    @property
    def unheld(self) -> Feasibility:
        """As if nothing were held, and everything else as it is; the same object as long as ``Fleet.unheld`` is."""
        unheld = self._memory.unheld
        if unheld is None or unheld.fleet is not self.fleet.unheld:
            unheld = self._memory.unheld = Feasibility(self.fleet.unheld, self.matching, imagined=True)
        return unheld

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """The nodes with GPUs, the fullest first: a claim that fits there leaves the others whole."""
        free, order = self._memory.free, self._memory.order
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

    def state(self, entry: FleetGpu) -> GpuState:
        if not self._ideal:
            return entry.state
        geometry = entry.state.geometry
        return GpuState(geometry, shares=entry.shares, taken=(0,) * len(geometry.limits))

    def on(self, nodes: Nodes) -> Iterator[FleetGpu]:
        return (entry for entry in self.fleet if entry.node in nodes)

    def could(self, requirements: ClaimRequirements, nodes: Nodes) -> bool:
        """Whether one of ``nodes`` satisfies ``requirements``, or might."""
        return self.find_node(requirements, nodes).outcome is not SearchOutcome.NONE

    def would_fit(self, gpus: Sequence[FleetGpu], requirements: ClaimRequirements) -> bool:
        """Whether imagined ``gpus`` of one node satisfy ``requirements``."""
        states = tuple(entry.state for entry in gpus)
        return fits(gpus, states, requirements, self.matching.value, Budget()) is SearchOutcome.FITS

    def find_node(self, requirements: ClaimRequirements, nodes: Nodes) -> NodeSearch:
        """The fullest of ``nodes`` that satisfies ``requirements``."""
        where = (requirements, nodes)
        if where not in self._found:
            search = NodeSearch(SearchOutcome.NONE)
            undecided = 0
            for node, outcome in self.outcomes(requirements, nodes):
                undecided += outcome is SearchOutcome.UNKNOWN
                if outcome is not SearchOutcome.NONE:
                    search = NodeSearch(outcome, node if outcome is SearchOutcome.FITS else None)
                if outcome is SearchOutcome.FITS or undecided >= MAX_UNDECIDED_NODES:
                    break
            self._found[_room_in(self._found, where)] = search
        return self._found[where]

    def nodes_for(self, requirements: ClaimRequirements, nodes: Nodes) -> list[str]:
        """Those of ``nodes`` that satisfy ``requirements``, or might."""
        return [node for node, outcome in self.outcomes(requirements, nodes) if outcome is not SearchOutcome.NONE]

    def outcomes(self, requirements: ClaimRequirements, nodes: Nodes) -> Iterator[tuple[str, SearchOutcome]]:
        """Whether each of ``nodes`` with free memory satisfies ``requirements``, the fullest first."""
        outcomes_of, budget = self._memory.outcomes, Budget()
        # Those that the next fleets can take over.
        where = _room_in(outcomes_of, requirements, MAX_REQUIREMENTS)
        remembered = {} if self._imagined else outcomes_of.setdefault(where, {})
        for node in self.nodes:
            gpus, free = self._memory.free[node]
            if not free or node not in nodes:
                continue
            before = remembered.get(node)
            if before is not None and before[0] is gpus:
                yield node, before[1]
                continue
            outcome = self._outcome(requirements, node, budget)
            if outcome is not SearchOutcome.UNKNOWN:  # depends on the steps used for other nodes, too
                remembered[node] = (gpus, outcome)
            yield node, outcome

    def _outcome(self, requirements: ClaimRequirements, node: str, budget: Budget) -> SearchOutcome:
        """Nodes with equal states have the same answer, unless attribute values or held devices matter."""
        gpus, states, requests = self.fleet.nodes[node], self.states(node), requirements.requests
        alike: Hashable = None
        if not requirements.constraints and all(request.count is not None for request in requests):
            alike = (requirements, states, tuple(request.selector.on(entry) for request in requests for entry in gpus))
            if alike in self._outcomes:
                return self._outcomes[alike]
        outcome = fits(gpus, states, requirements, self.matching.value, budget, in_use=not self._ideal)
        if alike is not None:
            self._outcomes[_room_in(self._outcomes, alike)] = outcome
        return outcome

    def kinds(self, selector: Selector, nodes: Nodes) -> dict[Kind, Group]:
        """The kinds of devices that ``selector`` selects on ``nodes``, held or not, and the GPUs that have them."""
        where = (selector, nodes)
        memory = self._memory.kinds
        if where not in memory:
            everywhere, fleet = self.fleet.nodes.keys() <= nodes, self.fleet.gpus
            found: dict[Kind, list[str]] = {}
            for matches, alike in selector.among(self.fleet):
                gpus = alike if everywhere else [uuid for uuid in alike if fleet[uuid].node in nodes]
                for kind in matches.keys.items() if gpus else ():
                    found.setdefault(Kind(*kind), []).extend(gpus)
            groups = {kind: frozenset(gpus) for kind, gpus in found.items()}
            memory[_room_in(memory, where, MAX_SELECTIONS)] = groups
        return memory[where]

    def having(self, key: OfferKind) -> int:
        """The number of GPUs in the whole fleet that have devices of ``key``."""
        having = self._memory.having
        if not having:
            alike = Counter((entry.state.geometry, bool(entry.shares)) for entry in self.fleet)
            for (geometry, shared), count in alike.items():
                for kind in GpuState(geometry, shares=int(shared)).offered():
                    having[kind] += count
        return having[key]

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

    def sets(self, request: DeviceRequest, kind: Kind, nodes: Nodes, attributes: tuple[str, ...]) -> list[list[str]]:
        """The GPUs on ``nodes`` with selected devices of ``kind``, by node and values of ``attributes``.

        GPUs without a value of one of the attributes are left out.
        """
        lasts = request.count is not None  # then held devices do not matter
        where = (request.selector, kind, nodes, attributes)
        memory, most = (self._memory.sets, MAX_SELECTIONS) if lasts else (self._sets, MAX_ANSWERS)
        if where in memory:
            return memory[where]
        sets: dict[Hashable, list[str]] = {}
        selected = self.kinds(request.selector, nodes).get(kind, frozenset())
        for entry in self.on(nodes):
            if entry.gpu.uuid not in selected or (not lasts and self._refuses_all(request, entry.node)):
                continue
            start = _a_start(entry, kind)
            values = tuple(self.matching.value(entry, kind.key, start, name) for name in attributes)
            if None not in values:
                sets.setdefault((entry.node, values), []).append(entry.gpu.uuid)
        memory[_room_in(memory, where, most)] = list(sets.values())
        return memory[where]

    def groups(
        self, request: DeviceRequest, kind: Kind, nodes: Nodes, attributes: tuple[str, ...]
    ) -> tuple[Group, ...]:
        """The ``sets`` that can provide the devices; all of them if none has the capacity at present."""
        where = (request, kind, nodes, attributes)
        if where not in self._groups:
            sets, count = self.sets(request, kind, nodes, attributes), self.count(request, kind, nodes)
            enough = [gpus for gpus in sets if self._capacity(gpus, kind) >= count > 0]
            self._groups[_room_in(self._groups, where)] = tuple(map(frozenset, enough or sets))
        return self._groups[where]

    def count(self, request: DeviceRequest, kind: Kind, nodes: Nodes) -> int:
        """The number of devices requested; for all devices of a node, the most that one node can provide."""
        if request.count is not None:
            return request.count
        return max((self._capacity(gpus, kind) for gpus in self.sets(request, kind, nodes, ())), default=0)

    def _capacity(self, gpus: Iterable[str], kind: Kind) -> int:
        """The number of devices of ``kind`` that these GPUs can provide at once."""
        only = self._matches.setdefault(kind, Matches({kind.key: kind.starts}))
        return sum(most_devices(self.state(self.fleet.gpus[uuid]), only) for uuid in gpus)

    def _refuses_all(self, request: DeviceRequest, node: str) -> bool:
        """Whether the scheduler refuses a request for all devices there, since some of them are in use."""
        return not self._ideal and any(is_in_use(entry, request.selector.on(entry)) for entry in self.fleet.nodes[node])


def _room_in(memory: dict[T, Any], key: T, most: int = MAX_ANSWERS) -> T:
    """``key``, for which there is room in ``memory`` now."""
    if key not in memory and len(memory) >= most:
        memory.clear()
    return key


def _a_start(entry: FleetGpu, kind: Kind) -> int:
    """The start of any device of ``kind``: those of one GPU differ in no attribute by which GPUs are grouped."""
    if kind.starts:
        return min(kind.starts)
    profile = entry.gpu.profile_named(kind.key.profile) if kind.key.profile is not None else None
    return profile.placements[0].start if profile is not None else 0
