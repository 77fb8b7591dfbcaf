"""Whether the GPUs of one node can meet a wish, by the scheduler's rules: a bounded depth-first search (pure).

Requests with the fewest choices come first, devices that lie alike are tried once, what failed is not tried again, and
a request that its GPUs have no room for is given up at once. What is left of the search stops after ``STEPS``; then the
answer is that nobody knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from enum import Enum
from functools import lru_cache

from controller.fleet import FleetGpu
from controller.matching import Matches
from controller.wishes import RESULTS, Rule, Wish
from driver.model.device import SLICE_VALUE
from driver.placement import SHARE, GpuState, Key, Spot, spot_of

STEPS = 500
"""Devices tried on one node."""

ALL_STEPS = 4000
"""Devices tried on all nodes for one wish."""

States = tuple[GpuState, ...]
Bound = tuple[Hashable, ...]
"""For each rule the value that its devices have so far, None for none yet; if distinct, the set of their values."""

ValueOf = Callable[[FleetGpu, Key, int, str], Hashable | None]


class Outcome(Enum):
    """``UNKNOWN``: the search was given up."""

    FITS = "fits"
    NONE = "none"
    UNKNOWN = "unknown"


class GivenUp(Exception):
    """The search has taken all the steps it may."""


class Budget:
    """The steps that are left for all nodes together."""

    def __init__(self, steps: int = ALL_STEPS) -> None:
        self.left = steps


def fits(
    gpus: Sequence[FleetGpu], states: States, wish: Wish, value_of: ValueOf, budget: Budget, *, in_use: bool = True
) -> Outcome:
    """Whether ``gpus`` of one node, in ``states``, can give all that ``wish`` asks for.

    ``in_use``: what is held counts for requests for all devices, which the scheduler refuses where one is in use.
    """
    search = _Search(gpus, _narrowest_first(gpus, states, wish), value_of, budget, in_use=in_use)
    if wish.too_many or search.needed(states) > sum(state.free for state in states):
        return Outcome.NONE
    try:
        found = search.run(states)
    except GivenUp:
        return Outcome.UNKNOWN
    return Outcome.FITS if found else Outcome.NONE


def _narrowest_first(gpus: Sequence[FleetGpu], states: States, wish: Wish) -> Wish:
    """The same wish, the request with the fewest choices first: what must fail fails early.

    A request for all devices keeps the order: it takes what those before it have left.
    """
    if len(wish.asks) == 1 or any(ask.count is None for ask in wish.asks):
        return wish
    choices = [
        sum(len(spots(state, ask.selector.on(entry))) for entry, state in zip(gpus, states, strict=True))
        for ask in wish.asks
    ]
    order = sorted(range(len(wish.asks)), key=lambda index: (choices[index], index))
    moved = {old: new for new, old in enumerate(order)}
    rules = (rule._replace(asks=frozenset(moved[index] for index in rule.asks)) for rule in wish.rules)
    return Wish(tuple(wish.asks[index] for index in order), tuple(rules))


@lru_cache(1 << 16)
def spots(state: GpuState, matches: Matches) -> tuple[Spot, ...]:
    """Where a device that is selected could be held now; of shares, which are all alike, the first."""
    found: list[Spot] = []
    for key, starts in matches.keys.items():
        if key == SHARE:
            found += list(state.spots(key))[:1]
        else:
            found += (spot for spot in state.spots(key) if starts is None or spot.at in starts)
    return tuple(found)


def slices_of(state: GpuState, key: Key) -> float:
    """The memory slices that a device of ``key`` takes on such a GPU."""
    if key == SHARE and state.shares:
        return SLICE_VALUE // state.shares * state.geometry.slices / SLICE_VALUE
    windows = state.geometry.windows.get(key.profile or "", ())
    return float(windows[0].bit_count() if windows else state.geometry.slices)


@lru_cache(1 << 16)
def most(state: GpuState, matches: Matches) -> int:
    """How many devices that are selected the GPU can give at once."""
    return max((1 + most(state.take(spot), matches) for spot in spots(state, matches)), default=0)


class _Search:
    def __init__(
        self, gpus: Sequence[FleetGpu], wish: Wish, value_of: ValueOf, budget: Budget, *, in_use: bool
    ) -> None:
        self._gpus = gpus
        self._wish = wish
        self._value_of = value_of
        self._in_use = in_use
        self._matches = [[ask.selector.on(entry) for entry in gpus] for ask in wish.asks]
        self._failed: set[Hashable] = set()
        self._values: dict[Hashable, Hashable | None] = {}
        self._budget = budget
        self._steps = 0

    def needed(self, states: States) -> float:
        """Memory slices that the wish takes at least."""
        found = 0.0
        for ask, each in zip(self._wish.asks, self._matches, strict=True):
            pairs = zip(states, each, strict=True)
            found += (ask.count or 1) * min(
                (slices_of(s, key) for s, matches in pairs for key in matches.keys), default=0
            )
        return found

    def run(self, states: States) -> bool:
        bound: Bound = tuple(frozenset() if rule.distinct else None for rule in self._wish.rules)
        return self._ask(0, 0, states, bound)

    def _ask(self, index: int, taken: int, states: States, bound: Bound) -> bool:
        """Whether the asks from ``index`` on can be met, ``taken`` devices being given already."""
        if index == len(self._wish.asks):
            return taken <= RESULTS
        ask = self._wish.asks[index]
        if ask.count is None:
            return self._everything(index, taken, states, bound)
        return self._some(index, ask.count, taken, states, bound)

    def _some(self, index: int, left: int, taken: int, states: States, bound: Bound) -> bool:
        if not left:
            return self._ask(index + 1, taken, states, bound)
        if self._room(index, states, bound) < left:
            return False
        if index + 1 == len(self._wish.asks) and not self._rules(index):
            return taken + left <= RESULTS
        where = (index, left, taken, states, bound)
        if where in self._failed:
            return False
        self._step()
        for position, spot, now in self._choices(index, states, bound):
            if self._some(index, left - 1, taken + 1, _taken(states, position, spot), now):
                return True
        self._failed.add(where)
        return False

    def _room(self, index: int, states: States, bound: Bound) -> int:
        """No fewer devices than the node can still give to an ask; for each rule by the values they may have."""
        rules = self._rules(index)
        by_value: list[Counter[Hashable]] = [Counter() for _ in rules]
        total = 0
        for position, (state, matches) in enumerate(zip(states, self._matches[index], strict=True)):
            open_to = [spot for spot in spots(state, matches) if self._bind(index, position, spot, bound) is not None]
            room = most(state, matches) if open_to else 0
            total += room
            for (_, rule), counts in zip(rules, by_value, strict=True):
                for value in {self._value(position, spot, rule.attribute) for spot in open_to}:
                    counts[value] += room
        for (_, rule), counts in zip(rules, by_value, strict=True):
            total = min(total, len(counts) if rule.distinct else max(counts.values(), default=0))
        return total

    def _choices(self, index: int, states: States, bound: Bound) -> Iterator[tuple[int, Spot, Bound]]:
        """Places for one more device, and what they bind the rules to; of those that lie alike, the first."""
        tried = set()
        told_apart = any(self._rules(later) for later in range(index + 1, len(self._wish.asks)))
        for position, (state, matches) in enumerate(zip(states, self._matches[index], strict=True)):
            others = tuple(each[position] for each in self._matches[index:])
            for spot in spots(state, matches):
                now = self._bind(index, position, spot, bound)
                alike = (position if told_apart else None, state, others, spot, now)
                if now is not None and alike not in tried:
                    tried.add(alike)
                    yield position, spot, now

    def _everything(self, index: int, taken: int, states: States, bound: Bound) -> bool:
        """Takes all that is selected, as much of it as lies side by side; refused where some of it is not free."""
        if self._in_use and any(is_taken(*each) for each in zip(self._gpus, self._matches[index], strict=True)):
            return False
        before = taken
        for position, matches in enumerate(self._matches[index]):
            while free := spots(states[position], matches):
                spot = free[0]
                now = self._bind(index, position, spot, bound)
                if now is None:
                    return False
                states, bound, taken = _taken(states, position, spot), now, taken + 1
        return taken > before and self._ask(index + 1, taken, states, bound)

    def _bind(self, index: int, position: int, spot: Spot, bound: Bound) -> Bound | None:
        """What the rules are bound to with one more device; None where it breaks one."""
        found = list(bound)
        for number, rule in self._rules(index):
            value = self._value(position, spot, rule.attribute)
            before = found[number]
            if isinstance(before, frozenset):
                if value is None or value in before:
                    return None
                found[number] = before | {value}
            elif value is None or before not in {None, value}:
                return None
            else:
                found[number] = value
        return tuple(found)

    def _value(self, position: int, spot: Spot, attribute: str) -> Hashable | None:
        where = (position, spot, attribute)
        if where not in self._values:
            self._values[where] = self._value_of(self._gpus[position], spot.key, spot.at, attribute)
        return self._values[where]

    def _rules(self, index: int) -> list[tuple[int, Rule]]:
        return [(number, rule) for number, rule in enumerate(self._wish.rules) if index in rule.asks]

    def _step(self) -> None:
        self._steps += 1
        self._budget.left -= 1
        if self._steps > STEPS or self._budget.left < 0:
            raise GivenUp


def _taken(states: States, position: int, spot: Spot) -> States:
    return (*states[:position], states[position].take(spot), *states[position + 1 :])


def is_taken(entry: FleetGpu, matches: Matches) -> bool:
    """Whether a device that is selected is published and not free: held, or on a GPU with a fault."""
    if entry.fault is not None and matches:
        return True
    return any(matches.has(*spot_of(device)) for device in entry.held)
