"""The trace in the fast simulation: what becomes of each task by who decides where, and the bound."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from tests.bench.placement.policies import BestFirst, LowestStart, Policy, curated
from tests.bench.placement.simulation import Simulation
from tests.bench.placement.trace import Arrival, Request
from tests.bench.public_trace.packing import gpus_needed
from tests.bench.public_trace.tasks import GivenArrivals, gpus_of

ALONE, STANDALONE, CURATED = "a scheduler alone", "standalone nodes", "curated"
BOUND = "everything movable (bound)"
REPLAYS = (ALONE, STANDALONE, CURATED, BOUND)

OFFERS = 2
"""The number of offers of each kind without pending claims, as in the product."""


class Decided(NamedTuple):
    """What became of one task. ``at``: in the scenario's time; ``held``: the part of all memory slices held then."""

    at: float
    request: Request
    admitted: bool
    held: float


class Filling(NamedTuple):
    """How full the fleet was before the first refusal and at the end, and how many tasks were refused."""

    before_refusal: float
    end: float
    refused: int


class Churning(NamedTuple):
    """Means over the tasks that count: the held part of the fleet, and the admitted part of the tasks, by request."""

    held: float
    admitted: float
    by_request: Mapping[Request, float]


def replay(name: str, scenario: GivenArrivals) -> list[Decided]:
    """What becomes of each task with the policy of that name (one of REPLAYS)."""
    if name == BOUND:
        return _everything_movable(scenario)
    policies: dict[str, Policy] = {ALONE: LowestStart(), STANDALONE: BestFirst(), CURATED: curated(OFFERS)}
    steps: list[Decided] = []

    def decided(arrival: Arrival, admitted: bool, used: int) -> None:
        steps.append(Decided(arrival.at, arrival.request, admitted, used / scenario.slices))

    Simulation(scenario, policies[name]).run(decided)
    return steps


def _everything_movable(scenario: GivenArrivals) -> list[Decided]:
    """A task is admitted if it and all that run could be packed anew."""
    running: Counter[Request] = Counter()
    ends: list[tuple[float, int, Request]] = []
    used, steps = 0, list[Decided]()
    for number, (at, request, duration) in enumerate(scenario.trace()):
        while ends and ends[0][0] <= at:
            _, _, ended = heapq.heappop(ends)
            running[ended] -= 1
            used -= ended.slices(scenario.gpu)
        running[request] += 1
        admitted = gpus_needed(running) <= gpus_of(scenario)
        if admitted:
            heapq.heappush(ends, (at + duration, number, request))
            used += request.slices(scenario.gpu)
        else:
            running[request] -= 1
        steps.append(Decided(at, request, admitted, used / scenario.slices))
    return steps


def first_refusal(steps: Sequence[Decided]) -> int | None:
    """The position of the first task that was refused; None if none was."""
    return next((number for number, step in enumerate(steps) if not step.admitted), None)


def filling(steps: Sequence[Decided]) -> Filling:
    """Of tasks that never end."""
    first = first_refusal(steps)
    before = 0.0 if first == 0 else steps[-1 if first is None else first - 1].held
    return Filling(before, steps[-1].held, sum(not step.admitted for step in steps))


def churning(steps: Sequence[Decided], warm_up: int) -> Churning:
    """Of tasks that come at random moments: what they find is what is there on average over time."""
    counted = steps[warm_up:]
    came = Counter(step.request for step in counted)
    admitted = Counter(step.request for step in counted if step.admitted)
    by_request = {request: admitted[request] / came[request] for request in came}
    return Churning(sum(step.held for step in counted) / len(counted), admitted.total() / len(counted), by_request)


def asked(scenario: GivenArrivals) -> list[float]:
    """Which part of the fleet has been asked for after each task that never ends."""
    totals = accumulate(arrival.request.slices(scenario.gpu) for arrival in scenario.trace())
    return [total / scenario.slices for total in totals]
