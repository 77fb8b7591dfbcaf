"""Partitions that claims share, as the controller sees, offers and explains them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from controller.cluster.claim_index import ClaimIndex
from controller.cluster.fleet import FleetGpu
from controller.cluster.node_views import NodeView
from controller.cluster.unheld_devices import UnheldDevices
from controller.eviction.overlapping_allocations import conflicts_on, refused_claim
from controller.report.slice_states import SliceState
from driver.kube.types import Claim
from driver.model.gpu_settings import SharedProfiles
from driver.model.offer import Offer, Spot, partition_kind
from driver.model.plan import PlanMode, PlanStatus
from driver.model.reported_gpus import GpuReport, encode_inventory
from driver.model.shared_memory import SHARING_FIELD
from tests.support.fleets import possible
from tests.support.gpus import gpu_of
from tests.support.map_cluster import MapCluster
from tests.support.node_views import changes, fleet_of
from tests.support.planners import PLANNERS, Planned, disjoint, with_counters
from tests.support.queues import DRIVER, Situation, fleet_gpu, profile, request

PROFILE = "1c.3g.40gb"
KIND = partition_kind(PROFILE)
SHARING = SharedProfiles.parse(PROFILE).applied_to(gpu_of(), {}).profiles
DEVICE = "gpu-0-mig-1c3g40gb-0-shared"
POOL = f"n-{DRIVER}"


def sharing(node: str, number: int, *claims: int) -> FleetGpu:
    """``claims``: how many have each of the GPU's two partitions."""
    entry = fleet_gpu(node, number, facts={"profiles": SHARING})
    devices = [device for device in entry.devices if device.spot.kind == KIND]
    return entry.holding(device for device, count in zip(devices, claims, strict=False) for _ in range(count))


def offered(offers: Iterable[Offer]) -> set[str]:
    """The shared partitions among the offers."""
    return {f"{offer.gpu}@{offer.spot.at}" for offer in offers if offer.spot.kind == KIND}


def asked_for(there: Situation, claims: int) -> Situation:
    for number in range(claims):
        there.wants(request(selector=profile(PROFILE)), name=f"claim-{number}")
    return there


@PLANNERS
@pytest.mark.parametrize(
    ("claims", "expected"), [(0, {"a/1@0"}), (1, {"a/1@0"}), (2, {"a/1@0"}), (3, {"a/1@0", "a/1@4"})]
)
def test_a_partition_with_claims_is_filled_before_another_is_opened(
    planned: Planned, claims: int, expected: set[str]
) -> None:
    there = Situation([sharing("a", 0), sharing("a", 1, 1), sharing("a", 2, 3, 3)])
    assert offered(planned(asked_for(there, claims), ())) == expected


@pytest.mark.parametrize(
    ("planned", "expected"),
    [
        pytest.param(with_counters, {3: 1, 4: 2, 7: 3, 24: 8, 30: 8}, id="counters"),
        pytest.param(disjoint, {3: 3, 4: 3, 7: 3, 24: 8, 30: 8}, id="disjoint, with some for future claims"),
    ],
)
def test_partitions_are_opened_for_as_many_claims_as_wait(planned: Planned, expected: dict[int, int]) -> None:
    gpus = [sharing("a", number) for number in range(4)]
    opened = {count: len(offered(planned(asked_for(Situation(gpus), count), ()))) for count in expected}
    assert opened == expected


@PLANNERS
def test_partitions_with_room_stay_offered_though_nobody_waits(planned: Planned) -> None:
    there = Situation([sharing("a", 0, 1, 2), sharing("a", 1, 2)])
    assert {"a/0@0", "a/0@4", "a/1@0"} <= offered(planned(there, ()))


@PLANNERS
def test_several_instances_for_one_claim_are_offered_on_one_node(planned: Planned) -> None:
    there = Situation([sharing("a", 0, 3, 2), sharing("b", 0), sharing("b", 1)])
    there.wants(request(selector=profile(PROFILE), count=4))
    assert {offer[0] for offer in offered(planned(there, ()))} == {"a", "b"}
    assert len([offer for offer in offered(planned(there, ())) if offer[0] == "b"]) >= 2


def claim(name: str, *shares: str, ready: bool = False) -> Claim:
    result = {"request": "gpu", "driver": DRIVER, "pool": POOL, "device": DEVICE}
    results = [{**result, "shareID": share, "consumedCapacity": {"computeSlices": "1"}} for share in shares]
    conditions = [{"type": "Ready", "status": "True", "reason": "x", "message": "", "lastTransitionTime": ""}]
    devices = [{"driver": DRIVER, "pool": POOL, "device": DEVICE, "conditions": conditions}] if ready else []
    metadata = {"name": name, "namespace": "team", "uid": name, "creationTimestamp": name}
    status = {"allocation": {"devices": {"results": results}}, "devices": devices}
    return msgspec.convert({"metadata": metadata, "status": status}, Claim)


def view(*claims: Claim, dropped: tuple[str, ...] = ()) -> NodeView:
    index = ClaimIndex(DRIVER, claims)
    inventory = encode_inventory([GpuReport(sharing("n", 0).gpu, 0)])
    return NodeView(
        name="n",
        uid="n",
        pool=POOL,
        published={DEVICE: 1},
        offered=frozenset({DEVICE}),
        held=index.held(POOL),
        shared=index.shared(POOL),
        status=PlanStatus(epoch="e", mode=PlanMode.PLANNED, inventory=inventory, dropped=dropped),
    )


@pytest.mark.parametrize(
    ("claims", "left"),
    [
        pytest.param([claim("a", "1")], 2, id="one instance"),
        pytest.param([claim("a", "1", "2")], 1, id="two instances of one claim"),
        pytest.param([claim("a", "1"), claim("b", "2"), claim("c", "3")], 0, id="full"),
    ],
)
def test_each_claim_takes_a_compute_instance_and_the_memory_once(claims: list[Claim], left: int) -> None:
    seen = view(*claims)
    [gpu] = fleet_of(seen)
    assert gpu.state.left_of(Spot(KIND, 0)) == left
    assert gpu.state.mask == 0b1111
    assert gpu.overlaps == ()
    devices = UnheldDevices()
    devices.update([seen], changes([seen]), fleet_of(seen))
    assert devices.offered == ({Offer("n/0", Spot(KIND, 0))} if left else set())
    assert devices.free == {}


def test_more_claims_than_compute_instances_are_a_conflict_and_the_newest_is_refused() -> None:
    claims = [claim(name, "1", ready=name != "d") for name in "abcd"]
    seen = view(*claims)
    [conflict] = conflicts_on("n", fleet_of(seen), {DEVICE: seen.shared[DEVICE]})
    refused = refused_claim(conflict, claims, DRIVER)
    assert refused is not None
    assert refused.device.claim == "team/d"
    assert refused.conflict == "of whose 3 compute instances claims have 4"


def test_nothing_is_offered_where_the_api_server_would_make_the_device_exclusive() -> None:
    [gpu] = fleet_of(view(dropped=(SHARING_FIELD,)))
    assert not [device for device in possible(gpu) if device.spot.kind == KIND]


def test_the_map_shows_each_claim_of_a_partition_and_their_slices_once() -> None:
    cluster = MapCluster().gpu("n", 0, facts={"profiles": SHARING}).offers("n", DEVICE)
    [gpu] = cluster.holds("a/one", "n", DEVICE, gib=1).holds("b/two", "n", DEVICE, gib=1).map()[0].gpus
    held = [(str(span.holder), span.slices, span.kinds) for span in gpu.spans if span.holder is not None]
    assert held == [("a/one", 2.0, (PROFILE,)), ("b/two", 2.0, (PROFILE,))]
    assert gpu.slices[SliceState.HELD] == 4
    assert sum(span.slices for span in gpu.spans) == pytest.approx(8)
    assert gpu.overlaps == ()
