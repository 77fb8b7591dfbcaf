"""What is said of pending claims is true: each statement is checked by doing what it says.

The judge is the scheduler's allocator in Python, which gives the same answers as the real scheduler
(`make conformance-allocator`), on slices that publish everything that fits.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from typing import Any

import msgspec
from hypothesis import assume, given
from hypothesis import strategies as st

from controller.cluster.fleet import Fleet, FleetGpu
from controller.explain.availability import Obstacle, without
from controller.explain.changes import Change, changes_that_help
from controller.explain.reasons import Reasoning, reasons_of
from driver.kube.types import Node
from driver.model.gpu import MigMode
from driver.model.plan import OfferMode, offer_of
from driver.placement.state import spot_of
from tessera.simulate.allocator import allocate
from tessera.simulate.capacity import Allocated
from tessera.simulate.pools import SliceIndex
from tessera.simulate.published import PublishedSlices
from tests.support.fleets import possible
from tests.support.gpus import H100
from tests.support.queues import (
    DRIVER,
    FULL,
    SHARE,
    Situation,
    first_available,
    fleet_gpu,
    profile,
    request,
    selected_by,
)

A100, L40S = "NVIDIA A100-SXM4-80GB", "NVIDIA L40S"
NODES = ("a", "b", "c")
SELECTORS = (
    FULL,
    SHARE,
    profile("1g.10gb"),
    profile("2g.20gb"),
    profile("3g.40gb"),
    profile("7g.80gb"),
    profile("9g.90gb"),
    selected_by('type == "mig"', "memorySlices == 2"),
    selected_by('type == "gpu"', f'productName == "{L40S}"'),
    selected_by('type == "gpu"', f'productName == "{H100}"'),
    selected_by('architecture == "Ampere"', 'type == "gpu"'),
)
CLIQUE, PARENT = "gpu.tessera.dev/nvlinkClique", "gpu.tessera.dev/parentUUID"

TOLERATED = {"taints": [{"key": "maintenance", "effect": "NoSchedule"}]}


@st.composite
def gpus(draw: st.DrawFn, node: str, number: int, product: str) -> FleetGpu:
    facts: dict[str, Any] = {"nvlink_clique": draw(st.sampled_from(["clique-0", "clique-1"]))}
    if product == A100:
        facts["mig_mode"] = draw(st.sampled_from([MigMode.ENABLED, MigMode.DISABLED]))
    shares = draw(st.sampled_from([0, 0, 0, 2]))
    entry = fleet_gpu(node, number, product, facts=facts, shares=shares)
    for _ in range(draw(st.integers(0, 4))):
        if possible(entry):
            entry = replace(entry, held=(*entry.held, draw(st.sampled_from(possible(entry)))))
    fault = draw(st.sampled_from([None] * 6 + ["Xid 79", "cordoned: fan"]))
    return replace(entry, fault=fault)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Up to three nodes of one product each, some of them closed to pods; devices held by claims; a pending pod."""
    entries = []
    for node in NODES[: draw(st.integers(1, 3))]:
        product = draw(st.sampled_from([H100, H100, A100, L40S]))
        entries += [draw(gpus(node, number, product)) for number in range(draw(st.integers(1, 4)))]
    there = Situation(entries)
    for node in {entry.node for entry in entries}:
        spec: dict[str, Any] = draw(st.sampled_from([{}, {}, {}, {"unschedulable": True}, TOLERATED]))
        there.node(node, {"pool": draw(st.sampled_from("xy"))}, **spec)
        if spec.get("unschedulable"):
            there.gpus = [replace(each, closed="is cordoned") if each.node == node else each for each in there.gpus]
    hold(there, draw(st.randoms(use_true_random=False)))
    selectors = st.sampled_from(SELECTORS)
    if draw(st.integers(0, 4)) == 0:
        requests = [first_available(("one", draw(selectors)), ("two", draw(selectors)))]
    else:
        names = ["one", "two"][: draw(st.sampled_from([1, 1, 1, 2]))]
        requests = [request(name=name, selector=draw(selectors), count=draw(st.integers(1, 4))) for name in names]
    constraints = draw(st.sampled_from([[], [], [{"matchAttribute": CLIQUE}], [{"matchAttribute": PARENT}]]))
    pod: dict[str, Any] = draw(st.sampled_from([{}, {}, {}, {"nodeSelector": {"pool": "x"}}]))
    return there.wants(*requests, constraints=constraints, **pod)


def hold(there: Situation, chance: Any) -> None:
    """Give the held devices to claims of one to three devices of one node."""
    for node in NODES:
        devices = [device.name for entry in there.gpus if entry.node == node for device in entry.held]
        chance.shuffle(devices)
        while devices:
            taken = [devices.pop() for _ in range(min(len(devices), chance.randint(1, 3)))]
            there.holding(f"holder-{node}-{len(devices)}", node, *taken)


def fits(there: Situation, *, gone: Iterable[str] = (), entries: Iterable[FleetGpu] | None = None) -> bool:
    """Whether the scheduler finds devices for the pending claim on a node that its pod may run on."""
    ended = {f"default/{name}" if "/" not in name else name for name in gone}
    wanted = copy(there)
    wanted.claims = [each for each in there.claims if str(each.metadata.key) not in ended]
    results = [result for each in wanted.claims for result in each.results]
    names = {(result.pool, result.device) for result in results}
    fleet = Fleet.of(
        entry.holding(each for each in entry.held if (f"{entry.node}-{DRIVER}", each.name) in names)
        for entry in (there.gpus if entries is None else entries)
    )
    offers = [offer_of(device) for entry in fleet for device in entry.devices if entry.state.admits(spot_of(device))]
    slices = SliceIndex(PublishedSlices(DRIVER, OfferMode.COUNTERS, {}).of(fleet, offers))
    nodes = wanted.queue.nodes(wanted.waiting())
    claim = wanted.waiting().claim
    return any(
        allocate([claim], node, slices, wanted.classes, Allocated.of(results)) is not None
        for name, node in sorted(wanted.nodes.items())
        if name in nodes
    )


@given(situations())
def test_a_claim_has_a_reason_if_and_only_if_the_scheduler_finds_nothing(there: Situation) -> None:
    found = reasons_of(there.queue)
    assert bool(found) != fits(there), [each.sentence for each in found]


@given(situations())
def test_what_is_said_to_be_permanent_does_not_end_when_all_other_claims_do(there: Situation) -> None:
    reasoning = Reasoning(there.queue)
    reason = reasoning.of(there.waiting())
    assume(reason is not None)
    assert reason is not None
    holders = [each.metadata.name for each in there.claims if each.status.allocation is not None]
    assert reason.permanent != fits(there, gone=holders), reason.sentence


@given(situations())
def test_each_change_that_is_said_to_help_does(there: Situation) -> None:
    queue = there.queue
    pending = queue.pending[0]
    for change in changes_that_help(queue, Reasoning(queue), pending):
        assert does_help(there, change), change.text


@given(situations())
def test_if_the_end_of_claims_would_help_the_fewest_are_named(there: Situation) -> None:
    queue = there.queue
    changes = changes_that_help(queue, Reasoning(queue), queue.pending[0])
    holders = [each.metadata.name for each in there.claims if each.status.allocation is not None]
    releases = [each for each in changes if each.kind == "release"]
    reason = next(iter(reasons_of(queue)), None)
    if reason is not None and fits(there, gone=holders):
        assert len(releases) == 1, reason.sentence
    for each in releases:
        if "the fewest possible" in each.text and len(each.claims) > 1:
            assert not any(fits(there, gone=[name]) for name in holders)


def does_help(there: Situation, change: Change) -> bool:
    """Whether it fits once ``change`` has been made; for one of several nodes or GPUs, the first."""
    text = change.text
    match change.kind:
        case "release":
            return fits(there, gone=change.claims)
        case "cordoned" | "fault" | "reset":
            obstacle = Obstacle[change.kind.upper()]
            named = [entry for entry in there.gpus if f"gpu-{entry.number} of {entry.node}" in text]
            return all(fits(there, entries=lifted(there, entry, obstacle)) for entry in named) and bool(named)
        case "node-uncordoned":
            opened = copy(there)
            opened.nodes = {name: uncordoned(each) for name, each in there.nodes.items()}
            opened.gpus = [replace(entry, closed="") for entry in there.gpus]
            return fits(opened)
        case "node-admitted":
            opened = copy(there)
            opened.nodes = {name: Node(each.metadata) for name, each in there.nodes.items()}
            opened.gpus = [replace(entry, closed="") for entry in there.gpus]
            opened.pods = [replace_selector(pod) for pod in there.pods]
            return fits(opened)
        case "count":
            fewer = copy(there)
            wanted = int(text.split(" asked for ")[1].split()[0])
            fewer.claims = [with_count(each, wanted) for each in there.claims]
            return fits(fewer)
    raise AssertionError(f"no way to try {change}")


def uncordoned(node: Node) -> Node:
    return msgspec.structs.replace(node, spec=msgspec.structs.replace(node.spec, unschedulable=False))


def lifted(there: Situation, chosen: FleetGpu, obstacle: Obstacle) -> list[FleetGpu]:
    return [without(entry, obstacle) if entry is chosen else entry for entry in there.gpus]


def replace_selector(pod: Any) -> Any:
    return msgspec.structs.replace(pod, spec=msgspec.structs.replace(pod.spec, node_selector={}))


def with_count(claim: Any, count: int) -> Any:
    """A pending claim whose only request is for ``count`` devices."""
    if claim.status.allocation is not None:
        return claim
    [only] = claim.spec.devices.requests
    requests = (msgspec.structs.replace(only, exactly=msgspec.structs.replace(only.exactly, count=count)),)
    devices = msgspec.structs.replace(claim.spec.devices, written_requests=requests)
    return msgspec.structs.replace(claim, spec=msgspec.structs.replace(claim.spec, devices=devices))
