"""Situations in which a claim may be pending, and everything that is said of it, as questions to a scheduler (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import msgspec
from hypothesis import strategies as st

from controller.cluster.fleet import Fleet, FleetGpu
from controller.demand.pending_claims import PendingClaim
from controller.explain.helpful_changes import HelpfulChange, changes_that_help
from controller.explain.sources.no_free_device import Reasoning
from controller.explain.sources.selected_gpus import Obstacle, without
from driver.kube.slice_types import DetailedSlice
from driver.kube.types import DeviceClaim, Node, Pod, Request, Result, Toleration
from driver.model.gpu import MigMode
from driver.model.plan import OfferMode
from driver.model.reported_gpus import FaultKind
from tessera.simulate.imagined_cluster import PublishedSlices
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

REPAIR = {"key": "repair", "effect": "NoSchedule"}
"""The taint of a DeviceTaintRule."""


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
    faults = {"Xid 79": FaultKind.UNAVAILABLE, "cordoned: fan": FaultKind.CORDONED}
    fault = draw(st.sampled_from([*[None] * 6, *faults]))
    return entry if fault is None else replace(entry, fault=fault, fault_kind=faults[fault])


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Up to three nodes of one product each, some of them cordoned; devices held by claims; a pending pod.

    A DeviceTaintRule may taint devices. The pod has one or two claims.
    """
    entries = []
    for node in NODES[: draw(st.integers(1, 3))]:
        product = draw(st.sampled_from([H100, H100, A100, L40S]))
        entries += [draw(gpus(node, number, product)) for number in range(draw(st.integers(1, 4)))]
    there = Situation(entries)
    for node in {entry.node for entry in entries}:
        spec: dict[str, Any] = draw(st.sampled_from([{}, {}, {}, {"unschedulable": True}, TOLERATED]))
        there.node(node, {"pool": draw(st.sampled_from("xy"))}, **spec)
        if spec.get("unschedulable"):
            there.gpus = [
                replace(each, why_no_offers="is cordoned") if each.node == node else each for each in there.gpus
            ]
    hold(there, draw(st.randoms(use_true_random=False)))
    selectors = st.sampled_from(SELECTORS)
    if draw(st.integers(0, 3)) == 0:
        pool = {"pool": f"{draw(st.sampled_from(NODES))}-{DRIVER}"}
        tainted = draw(st.sampled_from([{"driver": DRIVER}, pool, pool | {"device": "gpu-0"}]))
        there.taint_rule("repair", tainted, **REPAIR)
    shape = draw(st.sampled_from(["one", "one", "one", "all", "two", "alternatives"]))
    if shape == "all":
        # Selected devices that overlap are never offered together, as ``published`` has them.
        disjoint = st.sampled_from([each for each in SELECTORS if 'type == "mig"' not in each])
        requests = [request(selector=draw(disjoint), allocationMode="All")]
    elif shape == "alternatives":
        requests = [first_available(("one", draw(selectors)), ("two", draw(selectors)))]
    else:
        names = ["one", "two"] if shape == "two" else ["one"]
        requests = [request(name=name, selector=draw(selectors), count=draw(st.integers(1, 4))) for name in names]
    constraints = draw(st.sampled_from([[], [], [{"matchAttribute": CLIQUE}], [{"matchAttribute": PARENT}]]))
    pod: dict[str, Any] = draw(st.sampled_from([{}, {}, {}, {"nodeSelector": {"pool": "x"}}]))
    # With a constraint and all devices, the scheduler gives up on every node because of one with different values.
    claims = [there.claim("claim", *requests, constraints=[] if shape == "all" else constraints)]
    if shape != "all" and draw(st.integers(0, 4)) == 0:
        claims.append(there.claim("second", request(selector=draw(selectors), count=draw(st.integers(1, 2)))))
    there.pod("pod", *claims, **pod)
    return with_devices(there, _tolerating) if draw(st.booleans()) and there.taint_rules else there


def hold(there: Situation, chance: Any) -> None:
    """Give the held devices to claims of one to three devices of one node."""
    for node in NODES:
        devices = [device.name for entry in there.gpus if entry.node == node for device in entry.held]
        chance.shuffle(devices)
        while devices:
            taken = [devices.pop() for _ in range(min(len(devices), chance.randint(1, 3)))]
            there.holding(f"holder-{node}-{len(devices)}", node, *taken)


class Question(NamedTuple):
    """Does the pending claim of ``there`` fit? It does if ``expected``, says ``sentence``."""

    there: Situation
    expected: bool
    sentence: str


def reasoning_of(there: Situation) -> tuple[Reasoning, PendingClaim]:
    """The reasoning about the first pending claim, and that claim."""
    queue = there.queue
    pending = queue.pending[0]
    return Reasoning(queue).for_claim(pending), pending


def questions(there: Situation) -> Iterator[Question]:
    """What is said of the claim: whether it fits, whether the end of all others would help, and each change."""
    reasoning, pending = reasoning_of(there)
    reason = reasoning.reason(pending)
    yield Question(there, reason is None, "it fits" if reason is None else reason.sentence)
    if reason is not None:
        yield Question(ended(there, holders(there)), not reason.permanent, f"if all others ended: {reason.sentence}")
    for change in changes_that_help(reasoning, pending):
        for changed in _changed(there, change):
            yield Question(changed, True, f"it would fit if {change.text}")


def published(there: Situation) -> list[DetailedSlice]:
    """Everything that is free and everything that is held, as nodes publish it."""
    names = {(result.pool, result.device) for result in held(there)}
    fleet = Fleet.of(
        entry.holding(each for each in entry.held if (f"{entry.node}-{DRIVER}", each.name) in names)
        for entry in there.gpus
    )
    offers = [device.offer for entry in fleet for device in entry.devices if entry.state.admits(device.spot)]
    return list(PublishedSlices(DRIVER, OfferMode.COUNTERS, {}).of(fleet, offers))


def held(there: Situation) -> list[Result]:
    """The devices of allocated claims."""
    return [result for each in there.claims for result in each.results]


def smaller_releases(there: Situation) -> Iterator[Question]:
    """Where several claims are said to be the fewest whose end helps: the end of any one alone does not."""
    for change in changes_that_help(*reasoning_of(there)):
        if "the fewest possible" in change.text and len(change.claims) > 1:
            for name in holders(there):
                yield Question(ended(there, [name]), False, f"{change.text}, not {name} alone")


def holders(there: Situation) -> list[str]:
    """The allocated claims."""
    return [str(each.metadata.key) for each in there.claims if each.status.allocation is not None]


def ended(there: Situation, gone: Iterable[str]) -> Situation:
    """The situation after these claims (``namespace/name``) have ended."""
    names, found = set(gone), copy(there)
    found.claims = [each for each in there.claims if str(each.metadata.key) not in names]
    return found


def _changed(there: Situation, change: HelpfulChange) -> Iterator[Situation]:
    """The situation after ``change``; one for each GPU or node if any of several is enough."""
    found, text = copy(there), change.text
    match change.kind:
        case "release":
            yield ended(there, change.claims)
        case "cordoned" | "fault" | "reset":
            obstacle = Obstacle[change.kind.upper()]
            named = [entry for entry in there.gpus if f"gpu-{entry.number} of {entry.node}" in text]
            assert named, text
            for chosen in [[each] for each in named] if " or gpu-" in text else [named]:
                lifted = copy(there)
                lifted.gpus = [without(each, obstacle) if each in chosen else each for each in there.gpus]
                yield ended(lifted, change.claims)
        case "tainted":
            found.taint_rules = []
            yield ended(found, change.claims)
            yield ended(with_devices(there, _tolerating), change.claims)
        case "node-uncordoned":
            found.nodes = {name: _uncordoned(each) for name, each in there.nodes.items()}
            found.gpus = [replace(entry, why_no_offers="") for entry in there.gpus]
            yield found
        case "node-admitted":
            found.nodes = {name: Node(each.metadata) for name, each in there.nodes.items()}
            found.gpus = [replace(entry, why_no_offers="") for entry in there.gpus]
            found.pods = [_without_selector(pod) for pod in there.pods]
            yield found
        case "count":
            wanted = int(text.split(" asked for ")[1].split()[0])
            yield with_devices(there, partial(_with_count, count=wanted))
        case "constraint":
            yield with_devices(there, lambda devices: msgspec.structs.replace(devices, constraints=()))
        case _:
            raise AssertionError(f"no way to try {change}")


def _uncordoned(node: Node) -> Node:
    return msgspec.structs.replace(node, spec=msgspec.structs.replace(node.spec, unschedulable=False))


def _without_selector(pod: Pod) -> Pod:
    return msgspec.structs.replace(pod, spec=msgspec.structs.replace(pod.spec, node_selector={}))


def with_devices(there: Situation, changed: Callable[[DeviceClaim], DeviceClaim]) -> Situation:
    """The situation with other requests or constraints of its pending claims."""
    found = copy(there)
    found.claims = [
        msgspec.structs.replace(each, spec=msgspec.structs.replace(each.spec, devices=changed(each.spec.devices)))
        if each.status.allocation is None
        else each
        for each in there.claims
    ]
    return found


def _with_count(devices: DeviceClaim, count: int) -> DeviceClaim:
    """``count`` devices for the only request."""
    [only] = devices.requests
    assert only.exactly is not None
    requests = (msgspec.structs.replace(only, exactly=msgspec.structs.replace(only.exactly, count=count)),)
    return msgspec.structs.replace(devices, written_requests=requests)


def _tolerating(devices: DeviceClaim) -> DeviceClaim:
    """Requests that tolerate the taint of the rule."""
    toleration = (Toleration(REPAIR["key"], "Exists"),)

    def changed(request: Request) -> Request:
        if request.exactly is not None:
            return msgspec.structs.replace(
                request, exactly=msgspec.structs.replace(request.exactly, tolerations=toleration)
            )
        alternatives = tuple(msgspec.structs.replace(each, tolerations=toleration) for each in request.first_available)
        return msgspec.structs.replace(request, first_available=alternatives)

    return msgspec.structs.replace(devices, written_requests=tuple(map(changed, devices.requests)))
