"""Whatever a claim could be given where everything is offered, it can be given of what is offered for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hypothesis import event, example, given
from hypothesis import strategies as st

from controller.cluster.fleet import FleetGpu
from controller.curation.counters_planner import CountersPlanner
from controller.demand.demand import demand_of
from driver.model.device import Device
from driver.model.offer import DeviceKind
from tests.property.test_demand import selected
from tests.support.fleets import possible
from tests.support.queues import FULL, SHARE, Situation, fleet_gpu, profile, request, selected_by

Wanted = tuple[str, int]
"""A selector, and how many devices of it."""

CURATOR = CountersPlanner(offers=1)
"""Nothing is there by chance."""

AT_MOST_HALF = selected_by('type == "mig"', "memorySlices <= 4")

SELECTORS = (
    FULL,
    SHARE,
    profile("1g.10gb"),
    profile("3g.40gb"),
    profile("7g.80gb"),
    AT_MOST_HALF,
    selected_by('type == "mig"', "placementStart < 3"),
    selected_by('type != "share"') + ' && device.capacity["gpu.tessera.dev"].memory.isGreaterThan(quantity("30Gi"))',
)

wanted = st.tuples(st.sampled_from(SELECTORS), st.sampled_from([1, 1, 2]))
RULES = st.sampled_from([None, None, None, ("matchAttribute", "parentUUID"), ("distinctAttribute", "parentUUID")])


NODES = ("a", "b")


Described = tuple[int, tuple[int, ...]]
"""Of one GPU: its shares, and which of what was possible is held, one after the other."""

described = st.tuples(st.sampled_from([0, 0, 2]), st.lists(st.integers(0, 99), max_size=2).map(tuple))


EMPTY: Sequence[Described] = [(0, ())] * 3

nodes = st.lists(described, min_size=1, max_size=3)


def built(fleet: Sequence[Sequence[Described]]) -> Situation:
    """Nodes of H100 GPUs."""
    return Situation(
        [_gpu(node, number, *gpu) for node, gpus in zip(NODES, fleet, strict=True) for number, gpu in enumerate(gpus)]
    )


def _gpu(node: str, number: int, shares: int, held: tuple[int, ...]) -> FleetGpu:
    entry = fleet_gpu(node, number, shares=shares)
    for choice in held:
        if possible(entry):
            entry = entry.holding((*entry.held, possible(entry)[choice % len(possible(entry))]))
    return entry


@given(st.tuples(nodes, nodes), st.lists(wanted, min_size=1, max_size=3), RULES, st.booleans())
@example([EMPTY, EMPTY], [(FULL, 2), (profile("1g.10gb"), 1)], None, True)
@example([EMPTY, EMPTY], [(FULL, 1), (profile("7g.80gb"), 2)], None, False)
@example([EMPTY, EMPTY[:1]], [(profile("3g.40gb"), 3), (FULL, 1)], None, True)
@example(
    [[(0, ()), (2, ()), (0, (54,))], EMPTY[:1]], [(AT_MOST_HALF, 2), (profile("7g.80gb"), 1), (FULL, 1)], None, False
)
def test_what_is_offered_for_a_claim_suffices(
    fleet: Sequence[Sequence[Described]], asked: list[Wanted], rule: tuple[str, str] | None, one_claim: bool
) -> None:
    there = built(fleet)
    requests = [request(name=f"r{n}", selector=selector, count=count) for n, (selector, count) in enumerate(asked)]
    constraints: Any = [{rule[0]: f"gpu.tessera.dev/{rule[1]}"}] if rule else []
    if one_claim or rule:
        there.pod("pod", there.claim("claim", *requests, constraints=constraints))
    else:
        there.pod("pod", *[there.claim(f"claim-{n}", each) for n, each in enumerate(requests)])
    if any(not there.queue.requirements(each) for each in there.queue.pending):
        event("unread")
        return
    offers = CURATOR.curate(there.queue.feasibility.fleet, demand_of(there.queue))
    for node in NODES:
        if can_be_given(there, node, asked, rule, lambda device: True):
            break
    else:
        event("impossible")
        return
    event("possible")
    assert any(can_be_given(there, node, asked, rule, lambda device: device.offer in offers) for node in NODES)


def can_be_given(there: Situation, node: str, asked: Sequence[Wanted], rule: Any, published: Any) -> bool:
    """Whether some choice of published devices of ``node`` gives all that is asked for: every choice is tried."""
    gpus = [entry for entry in there.gpus if entry.node == node]
    singles = [selector for selector, count in asked for _ in range(count)]
    matching = {
        selector: [(i, d.name) for i, e in enumerate(gpus) for d in selected(e, selector) if published(d)]
        for selector in set(singles)
    }
    return _Trying(matching, rule[0] if rule else None).all(tuple(gpus), tuple(singles), ())


class _Trying:
    """What failed once is not tried again."""

    def __init__(self, matching: Mapping[str, Sequence[tuple[int, str]]], rule: str | None) -> None:
        self._matching = matching
        self._rule = rule
        self._failed: set[object] = set()

    def all(self, gpus: tuple[FleetGpu, ...], left: tuple[str, ...], parents: tuple[str, ...]) -> bool:
        where = (tuple(entry.state for entry in gpus), left, frozenset(parents))
        if not left or where in self._failed:
            return not left
        for position, name in self._matching[left[0]]:
            entry = gpus[position]
            device = next((each for each in possible(entry) if each.name == name), None)
            if device is not None and _keeps(self._rule, device, parents):
                after = (*gpus[:position], entry.holding((*entry.held, device)), *gpus[position + 1 :])
                if self.all(after, left[1:], (*parents, device.gpu.uuid)):
                    return True
        self._failed.add(where)
        return False


def _keeps(rule: str | None, device: Device, parents: Iterable[str]) -> bool:
    """Whether the constraint on ``parentUUID`` allows one more device: full GPUs have no such attribute."""
    if rule is None:
        return True
    if device.kind is DeviceKind.FULL:
        return False
    same = device.gpu.uuid in parents
    return not parents or (same and set(parents) == {device.gpu.uuid} if rule == "matchAttribute" else not same)
