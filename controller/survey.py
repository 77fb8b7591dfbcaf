"""What the fleet of one moment can give: which GPUs a selector selects, which node could meet a wish (pure).

Everything is remembered; a survey is made anew when the fleet changes, the matching behind it stays.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, cast

from controller.fleet import Fleet, FleetGpu
from controller.matching import Matches, Matching, Selector, SurveyMemory
from controller.search import Budget, Outcome, States, fits, is_taken, most
from controller.wishes import Ask, Wish
from driver.placement import GpuState, Key

DOUBTS = 4
"""On so many nodes a search may be given up before the answer is that nobody knows."""

KNOWN_WISHES, KNOWN_KINDS = 64, 256
"""What is remembered of a fleet whose hardware stays; there are not many different claims at a time."""

Nodes = frozenset[str]
Group = frozenset[str]
"""UUIDs of GPUs."""


class Found(NamedTuple):
    """Whether some node can meet a wish, and the first that can."""

    outcome: Outcome
    node: str | None = None


class Kind(NamedTuple):
    """Devices that a selector selects: a key, and where their placements start (None: anywhere)."""

    key: Key
    starts: frozenset[int] | None


class Survey:
    """``empty``: as if nothing were held, no GPU had a fault and none were kept from any use.

    What is found is forgotten with the survey if it is only ``imagined``.
    """

    def __init__(self, fleet: Fleet, matching: Matching, *, empty: bool = False, imagined: bool = False) -> None:
        self.fleet = fleet
        self.matching = matching
        self._empty = empty
        self._memory = SurveyMemory(None) if imagined else matching.survey_memory(fleet.hardware)
        self._states: dict[str, States] = {}
        self._single: dict[Kind, Matches] = {}
        self._outcomes: dict[Hashable, Outcome] = {}
        self._found: dict[tuple[Wish, Nodes], Found] = {}
        self._groups: dict[Hashable, tuple[Group, ...]] = {}

    @cached_property
    def emptied(self) -> Survey:
        return Survey(self.fleet, self.matching, empty=True, imagined=True)

    @cached_property
    def unheld(self) -> Survey:
        """As if nothing were held, and everything else as it is."""
        return Survey(Fleet.of(entry.unheld for entry in self.fleet), self.matching, imagined=True)

    def could(self, wish: Wish, nodes: Nodes) -> bool:
        """Whether ``wish`` can be met, or might be."""
        return self.fitting(wish, nodes).outcome is not Outcome.NONE

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """The nodes with GPUs, the fullest first: what fits there leaves the others whole."""
        free, order = self._memory.free, self._memory.order
        for node, gpus in self.fleet.nodes.items():
            known = free.get(node)
            if known is None or known[0] is not gpus:
                if known is not None:
                    del order[bisect_left(order, (known[1], node))]
                free[node] = (gpus, sum(state.free for state in self.states(node)))
                insort(order, (free[node][1], node))
        return tuple(node for _, node in order)

    def states(self, node: str) -> States:
        """Those of the node's GPUs, by number."""
        if node not in self._states:
            self._states[node] = tuple(map(self.state, self.fleet.nodes[node]))
        return self._states[node]

    def state(self, entry: FleetGpu) -> GpuState:
        if not self._empty:
            return entry.state
        geometry = entry.state.geometry
        return GpuState(geometry, shares=entry.shares, taken=(0,) * len(geometry.limits))

    def on(self, nodes: Nodes) -> Iterator[FleetGpu]:
        """The GPUs of ``nodes``."""
        return (entry for entry in self.fleet if entry.node in nodes)

    def selects_any(self, selector: Selector) -> bool:
        return any(selector.on(entry) for entry in self.fleet)

    def fitting(self, wish: Wish, nodes: Nodes) -> Found:
        """Looks for a node among ``nodes`` that can meet ``wish``."""
        where = (wish, nodes)
        if where not in self._found:
            self._found[where] = self._look(wish, nodes)
        return self._found[where]

    def _look(self, wish: Wish, nodes: Nodes) -> Found:
        doubts, budget = 0, Budget()
        known = self._outcomes_of(wish)
        for node in self.nodes:
            if node not in nodes:
                continue
            gpus, free = self._memory.free[node]
            if not free:
                continue
            before = known.get(node)
            if before is not None and before[0] is gpus:
                outcome = before[1]
            else:
                outcome = self._outcome(wish, node, budget)
                if outcome is not Outcome.UNKNOWN:  # that says how much had been searched before, too
                    known[node] = (gpus, outcome)
            if outcome is Outcome.FITS:
                return Found(outcome, node)
            doubts += outcome is Outcome.UNKNOWN
            if doubts >= DOUBTS:
                break
        return Found(Outcome.UNKNOWN if doubts else Outcome.NONE)

    def _outcomes_of(self, wish: Wish) -> dict[str, tuple[tuple[FleetGpu, ...], Outcome]]:
        outcomes = self._memory.outcomes
        if wish not in outcomes and len(outcomes) >= KNOWN_WISHES:
            outcomes.clear()
        return outcomes.setdefault(wish, {})

    def _outcome(self, wish: Wish, node: str, budget: Budget) -> Outcome:
        """Nodes whose GPUs look the same have the same answer, unless values or what is held on them matter."""
        gpus, states = self.fleet.nodes[node], self.states(node)
        if wish.rules or any(ask.count is None for ask in wish.asks):
            return self._search(gpus, states, wish, budget)
        like = (wish, states, tuple(ask.selector.on(entry) for ask in wish.asks for entry in gpus))
        if like not in self._outcomes:
            self._outcomes[like] = self._search(gpus, states, wish, budget)
        return self._outcomes[like]

    def _search(self, gpus: Sequence[FleetGpu], states: States, wish: Wish, budget: Budget) -> Outcome:
        return fits(gpus, states, wish, self.matching.value, budget, in_use=not self._empty)

    def kinds(self, selector: Selector, nodes: Nodes) -> dict[Kind, Group]:
        """What ``selector`` selects on ``nodes``, and the GPUs that have it, whatever is held there."""
        where = (selector, nodes)
        memory = self._memory.kinds
        if where not in memory:
            if len(memory) >= KNOWN_KINDS:
                memory.clear()
            alike: dict[Matches, list[str]] = {}
            for entry in self.on(nodes):
                alike.setdefault(selector.on(entry), []).append(entry.gpu.uuid)
            found: dict[Kind, list[str]] = {}
            for matches, gpus in alike.items():
                for kind in matches.keys.items():
                    found.setdefault(Kind(*kind), []).extend(gpus)
            memory[where] = {kind: frozenset(gpus) for kind, gpus in found.items()}
        return cast("dict[Kind, Group]", memory[where])

    def having(self, key: Key) -> int:
        """How many GPUs of the whole fleet have devices of ``key``."""
        having = self._memory.having
        if not having:
            alike = Counter((entry.state.geometry, bool(entry.shares)) for entry in self.fleet)
            for (geometry, shared), count in alike.items():
                for each in GpuState(geometry, shares=int(shared)).offered():
                    having[each] += count
        return having[key]

    def groups(self, ask: Ask, kind: Kind, nodes: Nodes, attributes: tuple[str, ...] = ()) -> tuple[Group, ...]:
        """The GPUs of one node, with the same values of ``attributes``, that can give the ask's devices of ``kind``.

        Where no such set of GPUs can at present, all sets. A GPU without one of the attributes is in none.
        """
        where = (ask, kind, nodes, attributes)
        if where not in self._groups:
            groups = self.sets(ask, kind, nodes, attributes)
            count = self.count(ask, kind, nodes)
            roomy = [group for group in groups if self._room(group, kind) >= count > 0]
            self._groups[where] = tuple(map(frozenset, roomy or groups))
        return self._groups[where]

    def count(self, ask: Ask, kind: Kind, nodes: Nodes) -> int:
        """The devices of ``kind`` for an ask; for one that takes all, as many as the node with the most can give."""
        if ask.count is not None:
            return ask.count
        groups = self.sets(ask, kind, nodes, ())
        return max((self._room(group, kind) for group in groups), default=0)

    def most_on_one_node(self, ask: Ask, nodes: Nodes) -> int:
        """How many devices of those that ``ask`` selects one of ``nodes`` can give at once."""
        return max(
            (
                sum(map(most, self.states(node), map(ask.selector.on, self.fleet.nodes[node])))
                for node in self.nodes
                if node in nodes
            ),
            default=0,
        )

    def sets(self, ask: Ask, kind: Kind, nodes: Nodes, attributes: tuple[str, ...]) -> list[list[str]]:
        """The GPUs on ``nodes`` that have what an ask selects of ``kind``, by node and values of ``attributes``."""
        found: dict[Hashable, list[str]] = {}
        selected = self.kinds(ask.selector, nodes).get(kind, frozenset())
        for entry in self.on(nodes):
            if entry.gpu.uuid not in selected or (ask.count is None and self._refuses_all(ask, entry.node)):
                continue
            at = _a_start(entry, kind)
            values = tuple(self.matching.value(entry, kind.key, at, name) for name in attributes)
            if None not in values:
                found.setdefault((entry.node, values), []).append(entry.gpu.uuid)
        return list(found.values())

    def _refuses_all(self, ask: Ask, node: str) -> bool:
        """Whether the scheduler refuses a request for all devices there, since some of them are in use."""
        return not self._empty and any(is_taken(entry, ask.selector.on(entry)) for entry in self.fleet.nodes[node])

    def _room(self, gpus: Sequence[str], kind: Kind) -> int:
        """How many devices of ``kind`` these GPUs can give at once."""
        only = self._single.setdefault(kind, Matches({kind.key: kind.starts}))
        return sum(most(self.state(self.fleet.gpus[uuid]), only) for uuid in gpus)


def _a_start(entry: FleetGpu, kind: Kind) -> int:
    """Where one of the devices of ``kind`` starts: those of one GPU differ in nothing that GPUs are grouped by."""
    if kind.starts:
        return min(kind.starts)
    profile = entry.gpu.profile_named(kind.key.profile) if kind.key.profile is not None else None
    return profile.placements[0].start if profile is not None else 0
