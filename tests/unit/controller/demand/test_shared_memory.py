"""Claims for memory of a GPU: where there is room, and what is asked of the GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controller.demand.demand import Demand, demand_of
from driver.model.offer import SHARED as SHARED_KEY
from driver.model.offer import DeviceKind
from tests.support.queues import Situation, fleet_gpu, node_of, profile, request, selected_by
from tests.support.shared_gpus import SHARED, memory, shared_gpu

PARENT = "gpu.tessera.dev/parentUUID"


def is_satisfiable(gpus: list[Any], *requests: dict[str, Any], constraints: Any = ()) -> bool:
    there = Situation(gpus).wants(*requests, constraints=constraints)
    return there.queue.satisfiable(there.waiting())


@pytest.mark.parametrize(
    ("held", "asked", "fits"),
    [
        pytest.param([], "6Gi", True, id="nobody has any"),
        pytest.param([70], "10Gi", True, id="exactly what is left"),
        pytest.param([70, 6], "5Gi", False, id="too little left"),
        pytest.param([70, 6], "3500Mi", True, id="rounded up to what is left"),
        pytest.param([70, 6], "4097Mi", False, id="rounded up to more than is left"),
        pytest.param([79], 1, True, id="a byte is a GiB"),
        pytest.param([], "80Gi", True, id="the whole"),
        pytest.param([], None, True, id="no amount is the whole"),
        pytest.param([1], None, False, id="no amount is the whole, and a GiB of it is held"),
        pytest.param([], "81Gi", False, id="more than the whole"),
    ],
)
def test_a_claim_gets_memory_of_a_gpu_if_so_many_whole_gib_are_left(held: list[int], asked: Any, fits: bool) -> None:
    assert is_satisfiable([shared_gpu("a", 0, *held)], memory(asked)) == fits


@pytest.mark.parametrize(
    ("requests", "fits"),
    [
        pytest.param([memory("30Gi", count=2)], True, id="one device twice"),
        pytest.param([memory("30Gi", count=3)], True, id="two on one GPU, one on the other"),
        pytest.param([memory("30Gi", count=4)], False, id="no room for four"),
        pytest.param([memory("60Gi", "x"), memory("40Gi", "y")], True, id="the larger first"),
        pytest.param([memory("40Gi", "x"), memory("60Gi", "y"), memory("30Gi", "z")], False, id="30 do not fit"),
    ],
)
def test_requests_of_one_claim_share_what_is_left_on_a_node(requests: list[dict[str, Any]], fits: bool) -> None:
    assert is_satisfiable([shared_gpu("a", 0, 20), shared_gpu("a", 1, 30)], *requests) == fits


def test_devices_of_one_gpu_are_found_where_that_gpu_has_room_for_all() -> None:
    gpus = [shared_gpu("a", 0, 40), shared_gpu("a", 1, 50)]
    same = [{"matchAttribute": PARENT}]
    assert is_satisfiable(gpus, memory("20Gi", count=2), constraints=same)
    assert not is_satisfiable(gpus, memory("20Gi", count=3), constraints=same)


@pytest.mark.parametrize("taken", ["full", "mig-1g10gb-0", "share-0"])
def test_a_gpu_of_which_another_device_is_held_shares_no_memory_and_the_other_way_round(taken: str) -> None:
    exclusive = shared_gpu("a", 0, shares=4)
    held = fleet_gpu("a", 0, shares=4)
    devices = [device for device in held.devices if device.name in {f"gpu-0-{taken}", f"gpu-0{taken[4:]}"}]
    assert not is_satisfiable([replace(exclusive, held=tuple(devices[:1]))], memory("1Gi"))
    kind = {"full": 'type == "gpu"', "mig-1g10gb-0": 'type == "mig"', "share-0": 'type == "share"'}[taken]
    assert is_satisfiable([exclusive], request(selector=selected_by(kind)))
    assert not is_satisfiable([shared_gpu("a", 0, 1, shares=4)], request(selector=selected_by(kind)))


def test_all_devices_of_a_node_are_refused_where_one_of_them_has_too_little_room() -> None:
    everything = memory("10Gi", allocationMode="All")
    assert is_satisfiable([shared_gpu("a", 0, 70), shared_gpu("a", 1)], everything)
    assert not is_satisfiable([shared_gpu("a", 0, 71), shared_gpu("a", 1)], everything)


def test_claims_for_the_same_memory_are_one_demand_and_others_are_demands_of_their_own() -> None:
    there = Situation([shared_gpu("a", number) for number in range(2)])
    for number, asked in enumerate(["6Gi", "6Gi", "5500Mi", "20Gi"]):
        there.wants(memory(asked), name=f"claim-{number}")
    assert demand_of(there.queue) == [Demand(SHARED_KEY, 3, gib=6), Demand(SHARED_KEY, 1, gib=20)]


def test_a_claim_that_states_no_memory_asks_for_the_whole_of_whichever_gpu_it_gets() -> None:
    there = Situation([shared_gpu("a", 0), shared_gpu("a", 1, gib=22, product="NVIDIA L4")]).wants(memory())
    [demand] = demand_of(there.queue)
    assert (demand.gib, demand.eligible) == (22, frozenset({"a/1"}))


@pytest.mark.parametrize(
    ("asked", "kind", "why"),
    [
        ("6Gi", DeviceKind.SHARED, "6 GiB are less than a partition"),
        ("30Gi", DeviceKind.SHARED, "3g.40gb has more"),
        (None, DeviceKind.PARTITION, "the smallest partition is less than a whole GPU"),
    ],
)
def test_a_claim_that_accepts_partitions_too_asks_for_the_smaller(asked: str, kind: DeviceKind, why: str) -> None:
    there = Situation([shared_gpu("a", 0), shared_gpu("a", 1)])
    wanted = memory(asked)
    wanted["exactly"]["selectors"] = [{"cel": {"expression": selected_by('type in ["mig", "shared"]')}}]
    there.wants(wanted)
    assert {demand.kind.type for demand in demand_of(there.queue)} == {kind}, why


def test_a_capacity_name_with_a_domain_selects_nothing() -> None:
    named = {"requests": {"gpu.tessera.dev/memory": "6Gi"}}
    assert not is_satisfiable([shared_gpu("a", 0)], request(selector=SHARED, capacity=named))


def test_gpus_that_are_not_shared_have_no_such_device() -> None:
    assert not is_satisfiable(node_of("a"), memory("1Gi"))
    assert is_satisfiable(node_of("a"), request(selector=profile("1g.10gb")))
