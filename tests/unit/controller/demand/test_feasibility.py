"""The time for a fleet of 8,000 GPUs and 50 pending claims (`pytest -m slow -s`, this file)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from controller.cluster.fleet import Fleet, FleetGpu
from controller.demand.demand import demand_of
from controller.demand.node_eligibility import Eligibility
from controller.demand.pending_claims import Queue
from controller.demand.selected_devices import Selector
from tests.support.fleets import possible
from tests.support.gpus import H100, gpu_of
from tests.support.queues import ATTRIBUTES, FULL, OURS, Situation, profile, request, selected_by
from tests.support.reasons import reasons_of

NODES, GPUS, CLAIMS = 1000, 8, 50
BASE = gpu_of(H100)

SELECTORS = (
    FULL,
    *(profile(name) for name in ("1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")),
    selected_by('type == "mig"', 'profile == "1g.10gb"', "placementStart < 3"),
    selected_by(f'productName == "{H100}"', 'type == "gpu"'),
    selected_by('type == "gpu"', 'uuid == "GPU-node-0500-3"'),
)


def entry(node: str, number: int, held: int) -> FleetGpu:
    gpu = replace(BASE, uuid=f"GPU-{node}-{number}", index=number, minor=number, nvlink_clique=node)
    found = FleetGpu(node, gpu, number)
    for _ in range(held):
        if possible(found):
            found = replace(found, held=(*found.held, random.choice(possible(found))))
    return found


def situation() -> Situation:
    """Half of the GPUs are cut at random; every fifth claim asks for four devices."""
    random.seed(1)
    gpus = [entry(f"node-{n:04}", m, random.choice([0, 0, 1, 3])) for n in range(NODES) for m in range(GPUS)]
    there = Situation(gpus)
    for number in range(CLAIMS):
        wanted = request(selector=SELECTORS[number % len(SELECTORS)], count=4 if number % 5 == 4 else 1)
        there.wants(wanted, name=f"claim-{number}")
    return there


def seconds(do: Callable[[], object]) -> float:
    """CPU seconds: other work on the machine does not count."""
    before = time.process_time()
    do()
    return time.process_time() - before


def selecting(there: Situation, expression: str) -> float:
    """Seconds to hold one selector, over an attribute that nobody has read before, against every GPU."""
    selector = there.matching.selector((expression,))
    assert isinstance(selector, Selector)
    return seconds(lambda: [selector.on(each) for each in there.gpus])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_demand_of_a_large_fleet_is_known_within_a_second_and_again_within_a_fraction() -> None:
    there = situation()
    fleet, objects = Fleet.of(there.gpus), there.queue.cluster
    eligibility = Eligibility(objects.nodes)
    queues: list[Queue] = []

    def demand() -> None:
        queues.append(Queue(objects, Fleet.of(there.gpus), there.matching, eligibility))
        assert demand_of(queues[-1])

    states = seconds(lambda: [each.state for each in fleet])
    first, repeated = seconds(demand), min(seconds(demand) for _ in range(3))
    new, known = (selecting(there, selected_by('architecture == "Hopper"')) for _ in range(2))
    asked = selecting(there, f'{OURS} && "placementStart" in {ATTRIBUTES}')
    unique = selecting(there, selected_by('type == "mig"', 'parentUUID == "GPU-node-0500-3"'))
    reasons = seconds(lambda: reasons_of(queues[-1]))
    print(f"\nGPU states {states:.3f} s; a new selector {new:.3f} s, known {known:.4f} s, one on UUIDs {unique:.3f} s")
    print(f"demand first {first:.3f} s, repeated {repeated:.3f} s; reasons {reasons:.3f} s")
    assert new < 0.5
    assert asked < 1.0
    assert repeated < 1.0
