"""Demand against the plain way: every device by itself through the CEL engine, every set of devices tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from controller.cluster.fleet import FleetGpu
from controller.demand.demand import Demand, demand_of
from controller.demand.selected_devices import cel_device
from controller.explain.reason import ClaimReason, ReasonCode
from deviceclasses.cel.engine import Program, compile_selector
from driver.model.device import Device
from driver.model.gpu import MigMode
from driver.model.offer import OfferKind
from driver.placement.occupancy import GpuState
from tests.support.fleets import possible
from tests.support.gpus import H100
from tests.support.queues import DRIVER, FULL, SHARE, Situation, fleet_gpu, profile, request, selected_by
from tests.support.reasons import reasons_of

A100, L40S = "NVIDIA A100-SXM4-80GB", "NVIDIA L40S"
PARENT = "gpu.tessera.dev/parentUUID"
NODES = ("a", "b", "c")

SELECTORS = (
    FULL,
    SHARE,
    profile("1g.10gb"),
    profile("3g.40gb"),
    profile("7g.80gb"),
    selected_by('type == "mig"', "memorySlices == 2"),
    selected_by('type == "mig"', 'profile == "1g.10gb"', "placementStart < 3"),
    selected_by(f'productName == "{H100}"', 'type == "gpu"'),
    selected_by('type == "gpu"', 'uuid == "b/0"'),
    selected_by('type == "gpu"', 'nvlinkClique == "b"'),
    'device.capacity["gpu.tessera.dev"].memory.isGreaterThan(quantity("30Gi"))',
    selected_by('architecture == "Ampere"'),
    'device.attributes["gpu.tessera.dev"].exists(name, name == "nvlinkClique")',
)
"""Some fail on some devices: that is part of the point."""

PASSING = {ReasonCode.HELD, ReasonCode.FRAGMENTED, ReasonCode.CONSTRAINT, ReasonCode.NOT_TOGETHER}
"""Reasons that end by themselves once claims do."""


@st.composite
def gpus(draw: st.DrawFn, node: str, number: int) -> FleetGpu:
    product = draw(st.sampled_from([H100, H100, A100, L40S]))
    facts: dict[str, Any] = {"nvlink_clique": draw(st.sampled_from([node, None]))}
    if product == A100:
        facts["mig_mode"] = draw(st.sampled_from([MigMode.ENABLED, MigMode.DISABLED]))
    shares = draw(st.sampled_from([0, 0, 2]))
    fault = draw(st.sampled_from([None, None, None, "Xid 79"]))
    entry = fleet_gpu(node, number, product, facts=facts, shares=shares)
    for _ in range(draw(st.integers(0, 3))):
        if possible(entry):
            entry = replace(entry, held=(*entry.held, draw(st.sampled_from(possible(entry)))))
    return replace(entry, fault=fault)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Three nodes with one or two GPUs each."""
    return Situation([draw(gpus(node, n)) for node in NODES for n in range(draw(st.integers(1, 2)))])


@cache
def compiled(selector: str) -> Program:
    return compile_selector(selector)


def selected(entry: FleetGpu, selector: str) -> list[Device]:
    """The devices of a GPU that the engine selects, each asked by itself."""
    return [device for device in entry.devices if compiled(selector).evaluate(cel_device(DRIVER, device)) is True]


def checked(demand: Demand, there: Situation, selector: str) -> None:
    """The demand names the GPUs that have such devices, all of them, and no others."""
    having = {e.gpu.uuid for e in there.gpus if demand.kind in {device.spot.kind for device in e.devices}}
    right = {e.gpu.uuid for e in there.gpus if demand.kind in {device.spot.kind for device in selected(e, selector)}}
    if demand.all_devices:
        assert demand.eligible
        assert demand.eligible <= right
    else:
        assert (having if demand.eligible is None else demand.eligible) == right
    for group in demand.together:
        assert group <= right
        assert len({uuid.split("/")[0] for uuid in group}) == 1


def of_kind(kind: OfferKind) -> str:
    """A selector for devices of one kind."""
    return selected_by(f'type == "{kind.type}"', *([f'profile == "{kind.profile}"'] if kind.profile else []))


def are_as_small_as_fits(
    found: list[Demand], there: Situation, selector: str, count: int, nodes: Iterable[str]
) -> bool:
    """Whether one kind is asked for, and no smaller one would do on one of ``nodes``."""
    memory: dict[OfferKind, int] = {}
    for entry in there.gpus:
        for device in selected(entry, selector):
            kind = device.spot.kind
            memory[kind] = min(device.memory_bytes, memory.get(kind, device.memory_bytes))
    fitting = [
        kind
        for kind in memory
        if any(fits_by_trying(there, node, f"{selector} && {of_kind(kind)}", count, one_gpu=False) for node in nodes)
    ]
    kinds = {demand.kind for demand in found}
    if not fitting and count > 1:
        return kinds <= memory.keys() and bool(kinds) == bool(memory)
    least = min((memory[kind] for kind in fitting or memory), default=0)
    return [memory[kind] for kind in kinds] == ([least] if memory else [])


@given(situations(), st.sampled_from(SELECTORS), st.integers(1, 3))
def test_demand_names_exactly_the_gpus_whose_devices_match_by_direct_evaluation(
    there: Situation, selector: str, count: int
) -> None:
    there.wants(request(selector=selector, count=count))
    found = demand_of(there.queue)
    # Where everything of one node is asked for, that node need not have every key that others have.
    whole = {uuid.split("/")[0] for demand in found if demand.all_devices for uuid in demand.eligible or ()}
    assert are_as_small_as_fits(found, there, selector, count, whole or NODES)
    for demand in found:
        assert demand.count == count
        checked(demand, there, selector)


@given(situations(), st.sampled_from(SELECTORS), st.integers(1, 3), st.booleans())
def test_a_claim_is_satisfiable_where_some_set_of_free_devices_of_one_node_would_do(
    there: Situation, selector: str, count: int, one_gpu: bool
) -> None:
    constraints = [{"matchAttribute": PARENT}] if one_gpu else []
    there.wants(request(selector=selector, count=count), constraints=constraints)
    if not there.queue.requirements(there.waiting()):
        return
    possible = any(fits_by_trying(there, node, selector, count, one_gpu=one_gpu) for node in NODES)
    assert there.queue.satisfiable(there.waiting()) == possible
    assert bool(reasons_of(there.queue)) != possible
    if possible:
        assert demand_of(there.queue)


@given(situations(), st.sampled_from(SELECTORS), st.integers(1, 3), st.booleans())
def test_what_nothing_held_keeps_from_a_claim_is_its_reason_whatever_is_held(
    there: Situation, selector: str, count: int, one_gpu: bool
) -> None:
    constraints = [{"matchAttribute": PARENT}] if one_gpu else []
    there.wants(request(selector=selector, count=count), constraints=constraints)
    idle = replace(there, gpus=[entry.unheld for entry in there.gpus])
    if lasting := reasons_of(idle.queue):
        assert list(map(_lasting_part, reasons_of(there.queue))) == list(map(_lasting_part, lasting))
    else:
        assert {each.code for each in reasons_of(there.queue)} <= PASSING


def _lasting_part(reason: ClaimReason) -> tuple[object, ...]:
    """Without the steps of a reset, which begin with a GPU on which nothing is held."""
    sentence = "" if reason.code is ReasonCode.RESET else reason.sentence
    return reason.pending.key, reason.code, sentence, reason.permanent


def fits_by_trying(there: Situation, node: str, selector: str, count: int, *, one_gpu: bool) -> bool:
    entries = {entry.gpu.uuid: entry for entry in there.gpus if entry.node == node}
    names = {
        uuid: {device.name for device in selected(entry, selector)} & {device.name for device in possible(entry)}
        for uuid, entry in entries.items()
    }
    devices = [device for uuid, entry in entries.items() for device in entry.devices if device.name in names[uuid]]
    if one_gpu:
        devices = [device for device in devices if device.name != f"gpu-{entries[device.gpu.uuid].number}"]
    for chosen in combinations(devices, count):
        if one_gpu and len({device.gpu.uuid for device in chosen}) > 1:
            continue
        if all(beside(entry, [d for d in chosen if d.gpu.uuid == uuid]) for uuid, entry in entries.items()):
            return True
    return False


def beside(entry: FleetGpu, devices: list[Device]) -> bool:
    """Whether ``devices`` can all be held beside what is held on the GPU."""
    held = list(entry.held)
    for device in devices:
        if not GpuState.of(entry.gpu, held, entry.foreign).fits(device):
            return False
        held.append(device)
    return True


@given(situations(), st.lists(st.sampled_from(SELECTORS[:5]), max_size=6))
def test_counts_add_up_over_claims(there: Situation, selectors: list[str]) -> None:
    for number, selector in enumerate(selectors):
        there.wants(request(selector=selector), name=f"claim-{number}")
    asked: Counter[str] = Counter()
    for selector in selectors:
        asked.update({str(device.spot.kind) for entry in there.gpus for device in selected(entry, selector)})
    given_out: Counter[str] = Counter()
    for demand in demand_of(there.queue):
        given_out[str(demand.kind)] += demand.count
    assert given_out == asked


@given(situations(), st.sampled_from(SELECTORS), st.sampled_from(NODES))
def test_demand_stays_on_the_nodes_where_the_pod_may_run(there: Situation, selector: str, node: str) -> None:
    for name in NODES:
        there.node(name, {"name": name})
    there.wants(request(selector=selector), nodeSelector={"name": node})
    for demand in demand_of(there.queue):
        named = demand.eligible
        if named is None:
            named = frozenset(e.gpu.uuid for e in there.gpus if demand.kind in {d.spot.kind for d in e.devices})
        assert {uuid.split("/")[0] for uuid in named} == {node}


@given(situations(), st.lists(st.sampled_from(SELECTORS[:7]), min_size=2, max_size=3))
def test_several_requests_are_satisfiable_where_one_node_has_free_devices_for_all_of_them(
    there: Situation, selectors: list[str]
) -> None:
    there.wants(*(request(name=f"request-{n}", selector=selector) for n, selector in enumerate(selectors)))
    if any(not any(selected(entry, selector) for entry in there.gpus) for selector in selectors):
        return
    possible = any(all_fit(there, node, selectors) for node in NODES)
    assert there.queue.satisfiable(there.waiting()) == possible
    if possible:
        named = {demand.eligible for demand in demand_of(there.queue)}
        assert len({uuid.split("/")[0] for eligible in named for uuid in eligible or NODES}) == 1


def all_fit(there: Situation, node: str, selectors: list[str]) -> bool:
    entries = {entry.gpu.uuid: entry for entry in there.gpus if entry.node == node}
    choices = [
        [device for entry in entries.values() for device in selected(entry, each) if device in possible(entry)]
        for each in selectors
    ]
    return any(
        len({(device.gpu.uuid, device.name) for device in chosen}) == len(chosen)
        and all(beside(entry, [d for d in chosen if d.gpu.uuid == uuid]) for uuid, entry in entries.items())
        for chosen in product(*choices)
    )
