"""Whether devices of one node can satisfy the requirements of claims, by the scheduler's rules (pure).

One bounded depth-first search answers this for the GPUs of a node (``fits``) and for a set of its devices
(``choose_devices``). It tries requests with the fewest choices first and equivalent devices once, does not repeat a
state that failed, and abandons a request as soon as its GPUs lack capacity for it. After a number of steps it gives up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

from controller.cluster.fleet import FleetGpu
from controller.demand.requirements import AttributeConstraint, ClaimRequirements
from controller.demand.selected_devices import Matches
from driver.kube.types import MAX_DEVICES
from driver.model.device import SLICE_VALUE, share_weight
from driver.model.offer import OF_SEVERAL, SHARE, SHARED, DeviceKind, OfferKind, Spot
from driver.placement.occupancy import GpuState

NODE_STEPS = 500
"""Steps of the search on one node; in each, the devices that could be taken next are tried."""

FLEET_STEPS = 4000
"""Steps on all nodes for one set of requirements; the disjoint planner has as many for all pods of a namespace."""

ROUNDING = 1e-6
"""Tolerance in memory slices for rounding errors: a share may take a fraction of a slice."""

States = tuple[GpuState, ...]
Values = tuple[Hashable, ...]
"""For each constraint the value that its devices share, None while it has no devices; if distinct, all their values."""

ValueOf = Callable[[FleetGpu, Spot, str], Hashable | None]
"""The value of an attribute of the device at a spot; None if it has none."""


@lru_cache(1 << 16)
def free_spots(state: GpuState, matches: Matches) -> tuple[Spot, ...]:
    """The spots at which a selected device could be allocated; of shares, which are equivalent, the first.

    That of a shared device has the GiB that are asked for.
    """
    free: list[Spot] = []
    for kind, starts in matches.starts_by_kind.items():
        if kind == SHARED:
            free += [Spot(SHARED, matches.gib)] if matches.gib <= state.left else []
            continue
        spots = [spot for spot in state.spots(kind) if starts is None or spot.at in starts]
        free += spots[:1] if kind == SHARE else spots
    return tuple(free)


@lru_cache(1 << 16)
def most_devices(state: GpuState, matches: Matches) -> int:
    """The number of selected devices that the GPU can provide at once."""
    return max(
        (
            state.parts_left(spot.at) if spot.kind == SHARED else 1 + most_devices(state.take(spot, 1), matches)
            for spot in free_spots(state, matches)
        ),
        default=0,
    )


def slices_of(state: GpuState, kind: OfferKind, gib: int = 0) -> float:
    """The memory slices that a device of ``kind``, or ``gib`` of a shared one, takes on such a GPU."""
    if kind == SHARE and state.shares:
        return share_weight(state.shares) * state.geometry.slices / SLICE_VALUE
    if kind == SHARED:
        return state.geometry.slices * gib / max(1, state.room)
    windows = state.geometry.windows.get(kind.profile or "", ())
    slices = float(windows[0].bit_count() if windows else state.geometry.slices)
    return slices / kind.instances if kind.type is DeviceKind.SHARED_PARTITION else slices


def refuses_request_for_all(gpu: FleetGpu, matches: Matches) -> bool:
    """Whether the scheduler would refuse a request for all devices here: a selected device is held, or tainted.

    Not considered, though published: devices that only overlap a held one, such as listed devices, and the tainted
    devices of an unhealthy GPU. A held device of which several claims can have a part counts only without room.
    """
    if any(matches.has(*device.spot) for device in gpu.held):
        return not any(spot.kind.type in OF_SEVERAL for spot in free_spots(gpu.state, matches))
    return bool(gpu.tainted) and bool(free_spots(replace(gpu, tainted=()).state, matches))


class SearchOutcome(Enum):
    """``UNKNOWN``: the search was given up."""

    FITS = "fits"
    NO_ROOM = "no room"
    UNKNOWN = "unknown"


@dataclass
class Budget:
    """The steps left for all nodes together."""

    left: int = FLEET_STEPS

    @property
    def is_spent(self) -> bool:
        return self.left <= 0


class _GivenUp(Exception):
    """The search has used all its steps."""


def fits(
    gpus: Sequence[FleetGpu],
    states: States,
    requirements: ClaimRequirements,
    value_of: ValueOf,
    budget: Budget,
) -> SearchOutcome:
    """Whether ``gpus`` of one node, in ``states``, can provide all devices of ``requirements``."""
    matches = [[request.selector.on(gpu) for gpu in gpus] for request in requirements.requests]
    return _DeviceSearch(gpus, states, requirements, matches, value_of, budget, records=False).run()


def choose_devices(
    gpus: Sequence[FleetGpu],
    states: States,
    requirements: ClaimRequirements,
    value_of: ValueOf,
    budget: Budget,
    published: Mapping[str, Collection[Spot]] | None = None,
) -> list[tuple[FleetGpu, Spot]]:
    """Devices of one node, in ``states``, that satisfy ``requirements`` together, in the order of the requests.

    Empty if there are none, or the search was given up. ``published``: the only devices to use, by UUID of their GPU;
    a request for all devices is then never satisfied: devices that are not published count for it, too.
    """
    if published is not None and any(request.count is None for request in requirements.requests):
        return []
    matches = [[request.selector.on(gpu) for gpu in gpus] for request in requirements.requests]
    if published is not None:
        spots = [published.get(gpu.gpu.uuid, ()) for gpu in gpus]
        matches = [[selected.limited_to(free) for selected, free in zip(row, spots, strict=True)] for row in matches]
    search = _DeviceSearch(gpus, states, requirements, matches, value_of, budget, records=True)
    return search.devices if search.run() is SearchOutcome.FITS else []


class _DeviceSearch:
    """The depth-first search on one node. ``matches``: for each request what it selects of each GPU.

    ``records``: find out which ``devices`` satisfy the requirements, not only whether some do.
    """

    def __init__(
        self,
        gpus: Sequence[FleetGpu],
        states: States,
        requirements: ClaimRequirements,
        matches: Sequence[Sequence[Matches]],
        value_of: ValueOf,
        budget: Budget,
        *,
        records: bool,
    ) -> None:
        self._states, self._records = states, records
        self._order = _fewest_choices_first(states, requirements, matches)
        self._requests = [requirements.requests[index] for index in self._order]
        self._matches = [matches[index] for index in self._order]
        self._constraints: list[list[tuple[int, AttributeConstraint]]] = [
            [pair for pair in enumerate(requirements.constraints) if index in pair[1].requests] for index in self._order
        ]
        self._start: Values = tuple(
            frozenset() if constraint.distinct else None for constraint in requirements.constraints
        )
        self._claims = [requirements.claims[index] if requirements.claims else 0 for index in self._order]
        self._counts = requirements.counts
        self._gpus = gpus
        self._value_of = value_of
        self._chosen: list[tuple[int, int, Spot]] = []
        self._failed: set[Hashable] = set()
        self._values: dict[Hashable, Hashable | None] = {}
        self._budget = budget
        self._steps = 0

    def run(self) -> SearchOutcome:
        if max(self._counts) > MAX_DEVICES or self._needed() > sum(state.free for state in self._states) + ROUNDING:
            return SearchOutcome.NO_ROOM
        try:
            satisfied = self._satisfy(0, self._counts, self._states, self._start)
        except _GivenUp:
            return SearchOutcome.UNKNOWN
        return SearchOutcome.FITS if satisfied else SearchOutcome.NO_ROOM

    @property
    def devices(self) -> list[tuple[FleetGpu, Spot]]:
        """The devices that a recording search has found, in the order of the requests."""
        ordered = sorted(self._chosen, key=lambda choice: self._order[choice[0]])
        return [(self._gpus[position], spot) for _, position, spot in ordered]

    def _needed(self) -> float:
        """The least number of memory slices that satisfies all requests."""
        needed = 0.0
        for request, row in zip(self._requests, self._matches, strict=True):
            pairs = zip(self._states, row, strict=True)
            sizes = (slices_of(state, kind, matches.gib) for state, matches in pairs for kind in matches.starts_by_kind)
            needed += (request.count or 1) * min(sizes, default=0)
        return needed

    def _satisfy(self, index: int, counts: tuple[int, ...], states: States, values: Values) -> bool:
        """Whether the requests from ``index`` on can be satisfied.

        ``counts``: devices by claim: fixed counts of all requests, plus what requests for all devices before ``index``
        have taken.
        """
        if index == len(self._requests):
            return True
        count = self._requests[index].count
        if count is None:
            return self._take_all(index, counts, states, values)
        return self._take(index, count, counts, states, values)

    def _take(self, index: int, left: int, counts: tuple[int, ...], states: States, values: Values) -> bool:
        if not left:
            return self._satisfy(index + 1, counts, states, values)
        if self._capacity(index, states, values) < left:
            return False
        # Without constraints the capacity is exact, and no request follows: no device needs to be tried.
        if index + 1 == len(self._requests) and not self._constraints[index] and not self._records:
            return True
        search_state = (index, left, counts, states, values)
        if search_state in self._failed:
            return False
        self._step()
        for position, spot, values_after in self._choices(index, states, values):
            self._chosen.append((index, position, spot))
            state_after = states[position].take(spot, 1)
            if self._take(index, left - 1, counts, _with_state(states, position, state_after), values_after):
                return True
            self._chosen.pop()
        self._failed.add(search_state)
        return False

    def _capacity(self, index: int, states: States, values: Values) -> int:
        """An upper limit of the devices that the node can still provide for a request and its constraints."""
        constraints = self._constraints[index]
        by_value: list[Counter[Hashable]] = [Counter() for _ in constraints]
        total = 0
        for position, (state, matches) in enumerate(zip(states, self._matches[index], strict=True)):
            usable = [
                spot
                for spot in free_spots(state, matches)
                if self._values_with(index, position, spot, values) is not None
            ]
            capacity = most_devices(state, matches) if usable else 0
            total += capacity
            for (_, constraint), counts in zip(constraints, by_value, strict=True):
                for value in {self._value(position, spot, constraint.attribute) for spot in usable}:
                    counts[value] += capacity
        for (_, constraint), counts in zip(constraints, by_value, strict=True):
            total = min(total, len(counts) if constraint.distinct else max(counts.values(), default=0))
        return total

    def _choices(self, index: int, states: States, values: Values) -> Iterator[tuple[int, Spot, Values]]:
        """Spots for one more device and the values of the constraints with it; of equivalent spots the first.

        A recording search tries spots for small devices first, so that it records small devices.
        """
        choices = self._different_choices(index, states, values)
        if not self._records:
            return choices
        return iter(sorted(choices, key=lambda choice: slices_of(states[choice[0]], *choice[1])))

    def _different_choices(self, index: int, states: States, values: Values) -> Iterator[tuple[int, Spot, Values]]:
        tried = set()
        later_requests_have_constraints = any(self._constraints[index + 1 :])
        for position, (state, matches) in enumerate(zip(states, self._matches[index], strict=True)):
            others = tuple(row[position] for row in self._matches[index:])
            for spot in free_spots(state, matches):
                values_after = self._values_with(index, position, spot, values)
                equivalent = (position if later_requests_have_constraints else None, state, others, spot, values_after)
                if values_after is not None and equivalent not in tried:
                    tried.add(equivalent)
                    yield position, spot, values_after

    def _take_all(self, index: int, counts: tuple[int, ...], states: States, values: Values) -> bool:
        """Takes all selected devices that fit together; refused where one of them is not free."""
        if any(map(refuses_request_for_all, self._gpus, self._matches[index])):
            return False
        claim, before = self._claims[index], len(self._chosen)
        for position, matches in enumerate(self._matches[index]):
            while free := free_spots(states[position], matches):
                spot = free[0]
                values_after = self._values_with(index, position, spot, values)
                if values_after is None:
                    del self._chosen[before:]
                    return False
                states, values = _with_state(states, position, states[position].take(spot)), values_after
                self._chosen.append((index, position, spot))
                if spot.kind == SHARED:  # one device, however many claims could have it
                    break
        taken = len(self._chosen) - before
        counts = (*counts[:claim], counts[claim] + taken, *counts[claim + 1 :])
        if taken > 0 and counts[claim] <= MAX_DEVICES and self._satisfy(index + 1, counts, states, values):
            return True
        del self._chosen[before:]
        return False

    def _values_with(self, index: int, position: int, spot: Spot, values: Values) -> Values | None:
        """The values of the constraints with one more device; None where it violates one."""
        changed = list(values)
        for number, constraint in self._constraints[index]:
            value = self._value(position, spot, constraint.attribute)
            before = changed[number]
            if isinstance(before, frozenset):
                if value is None or value in before:
                    return None
                changed[number] = before | {value}
            elif value is None or before not in {None, value}:
                return None
            else:
                changed[number] = value
        return tuple(changed)

    def _value(self, position: int, spot: Spot, attribute: str) -> Hashable | None:
        query = (position, spot, attribute)
        if query not in self._values:
            self._values[query] = self._value_of(self._gpus[position], spot, attribute)
        return self._values[query]

    def _step(self) -> None:
        self._steps += 1
        self._budget.left -= 1
        if self._steps > NODE_STEPS or self._budget.left < 0:
            raise _GivenUp


def _fewest_choices_first(
    states: States, requirements: ClaimRequirements, matches: Sequence[Sequence[Matches]]
) -> Sequence[int]:
    """The order in which to try requests: those that must fail fail early.

    A request for all devices keeps the order: it takes the devices that earlier requests leave.
    """
    requests = requirements.requests
    if len(requests) == 1 or any(request.count is None for request in requests):
        return range(len(requests))
    choices = [sum(len(free_spots(*pair)) for pair in zip(states, row, strict=True)) for row in matches]
    return sorted(range(len(requests)), key=lambda index: (choices[index], index))


def _with_state(states: States, position: int, state: GpuState) -> States:
    return (*states[:position], state, *states[position + 1 :])
