"""GPUs that claims share by memory: sums stay below what a GPU has, offers suffice, and stay where nothing changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from controller.cluster.fleet import FleetGpu
from controller.cluster.unheld_devices import UnheldDevices
from controller.curation.counters_planner import CountersPlanner
from controller.curation.disjoint_planner import DisjointPlanner
from controller.demand.demand import demand_of
from driver.model.device import shared_device
from driver.model.offer import SHARED as SHARED_KEY
from driver.model.offer import DeviceKind, Offer, Spot
from driver.placement.ranking import Ranking
from tests.support.fleets import possible
from tests.support.queues import FULL, Situation, profile, request
from tests.support.reasons import reasons_of
from tests.support.shared_gpus import memory, shared_gpu, shared_memory

RANKING = Ranking()
ROOM = 40
AMOUNTS = st.integers(1, 45 * 1024)
"""MiB, some more than any GPU has."""


@st.composite
def gpus(draw: st.DrawFn, node: str, number: int) -> FleetGpu:
    """Shared by some claims, or with other devices held on it."""
    entry = shared_gpu(node, number, gib=ROOM, shares=draw(st.sampled_from([0, 2])))
    if draw(st.booleans()):
        parts, left = list[int](), ROOM
        while left and draw(st.booleans()):
            parts.append(draw(st.integers(1, left)))
            left -= parts[-1]
        return shared_gpu(node, number, *parts, gib=ROOM, shares=entry.shares)
    exclusive = [device for device in possible(entry) if device.kind is not DeviceKind.SHARED]
    held = draw(st.sampled_from(exclusive)) if draw(st.booleans()) else None
    return entry if held is None else replace(entry, held=(held,))


@st.composite
def clusters(draw: st.DrawFn) -> list[FleetGpu]:
    return [draw(gpus(node, number)) for node in "ab" for number in range(draw(st.integers(1, 3)))]


def left_on(entry: FleetGpu) -> int:
    """What claims can still get, counted from what is held."""
    if any(device.kind is not DeviceKind.SHARED for device in entry.held):
        return 0
    return ROOM - sum(device.spot.at for device in entry.held)


@given(clusters(), AMOUNTS, st.integers(1, 4))
def test_a_claim_is_satisfiable_if_and_only_if_so_many_parts_fit_on_one_node(
    entries: list[FleetGpu], mib: int, count: int
) -> None:
    there = Situation(entries).wants(memory(f"{mib}Mi", count=count))
    gib = ceil(mib / 1024)
    fitting = {node: sum(left_on(entry) // gib for entry in entries if entry.node == node) for node in "ab"}
    is_satisfiable = max(fitting.values()) >= count
    if there.queue.requirements(there.waiting()):
        assert there.queue.satisfiable(there.waiting()) == is_satisfiable
    assert bool(reasons_of(there.queue)) != is_satisfiable
    assert bool(demand_of(there.queue)) == (gib <= ROOM)


def offered(there: Situation, published: Iterable[Offer], *, disjoint: bool) -> set[Offer]:
    if disjoint:
        return {*DisjointPlanner(RANKING).curate(there.queue, [*published], {}).offers}
    devices = UnheldDevices()
    devices.offered = {*published}
    return {*CountersPlanner(RANKING).plan(there.queue, devices, ()).offers}


@given(st.data(), st.lists(st.integers(1, ROOM), min_size=1, max_size=16), st.booleans())
def test_pending_claims_get_their_memory_whichever_offer_the_scheduler_takes(
    data: st.DataObject, amounts: list[int], disjoint: bool
) -> None:
    entries = data.draw(clusters())
    waiting = dict(enumerate(amounts))
    published: set[Offer] = set()
    while True:
        there = Situation([*entries])
        for number, gib in waiting.items():
            there.wants(memory(f"{gib}Gi"), name=f"claim-{number:02}")
        before, published = published, offered(there, published, disjoint=disjoint)
        assert offered(there, published, disjoint=disjoint) == published, before
        open_gpus = [entry for entry in entries if Offer(entry.gpu.uuid, Spot(SHARED_KEY)) in published]
        assert {id(entry) for entry in entries if entry.state.used and left_on(entry)} <= set(map(id, open_gpus))
        assert all(left_on(entry) for entry in open_gpus)
        pairs = [(at, entry) for at, gib in waiting.items() for entry in open_gpus if left_on(entry) >= gib]
        if not pairs:
            break
        at, entry = data.draw(st.sampled_from(pairs))
        part = shared_device(entry.gpu, entry.number, shared_memory(ROOM), waiting.pop(at))
        entries[entries.index(entry)] = entry.holding((*entry.held, part))
    # Nothing that waits would fit anywhere, and no GPU gives more than it has.
    assert not any(left_on(entry) >= gib for gib in waiting.values() for entry in entries)
    assert all(sum(device.spot.at for device in entry.held) <= ROOM for entry in entries if entry.state.used)


@given(clusters(), st.lists(st.integers(1, ROOM), max_size=6))
def test_disjoint_offers_of_one_gpu_are_its_shared_device_or_others(
    entries: list[FleetGpu], amounts: list[int]
) -> None:
    there = Situation(entries)
    for number, gib in enumerate(amounts):
        there.wants(memory(f"{gib}Gi"), name=f"claim-{number}")
    there.wants(request(selector=profile("1g.10gb")), name="part").wants(request(selector=FULL), name="full")
    offers = offered(there, (), disjoint=True)
    shared = {offer.gpu for offer in offers if offer.spot.kind == SHARED_KEY}
    assert shared.isdisjoint(offer.gpu for offer in offers if offer.spot.kind != SHARED_KEY)
    taken = {entry.gpu.uuid for entry in entries if entry.state.used}
    assert taken.isdisjoint(offer.gpu for offer in offers if offer.spot.kind != SHARED_KEY)
