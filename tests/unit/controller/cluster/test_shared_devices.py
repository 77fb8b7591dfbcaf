"""Shared devices in the controller's view of the cluster: what each claim has of one, and what is left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from controller.cluster.claim_index import ClaimIndex, PoolDevice
from controller.cluster.fleet import FleetGpu
from controller.cluster.node_views import NodeView
from controller.cluster.unheld_devices import UnheldDevices
from controller.decision.write_and_evict import MAX_NAMED_CLAIMS, Asked, PlanSpecs
from driver.kube.types import Claim, GpuNodePlan, PlanMetadata
from driver.model.offer import SHARED, Offer, Spot
from driver.model.plan import COUNTERS_FIELD, OfferMode, PlanMode, PlanSpec, PlanStatus, PublishHeld
from driver.model.reported_gpus import GpuReport, encode_inventory
from driver.model.shared_memory import SHARING_FIELD, MemoryLimit, SharingStrategy
from tests.support.fleets import possible
from tests.support.node_views import changes, fleet_of
from tests.support.queues import DRIVER, gpu_in
from tests.support.shared_gpus import shared_memory, shared_result

POOL = f"n-{DRIVER}"
DEVICE = "gpu-0-shared"
OFFER = Offer("n/0", Spot(SHARED))


def claim(name: str, *results: dict[str, Any]) -> Claim:
    status = {"allocation": {"devices": {"results": results}}}
    return msgspec.convert({"metadata": {"name": name, "namespace": "team", "uid": name}, "status": status}, Claim)


def index_of(*claims: Claim) -> ClaimIndex:
    return ClaimIndex(DRIVER, claims)


def inventory(**report: Any) -> str:
    return encode_inventory([GpuReport(gpu_in("n", 0), 0, **{"shared": shared_memory(80), **report})])


def view(index: ClaimIndex, *, closed: bool = False, status: PlanStatus | None = None, **more: Any) -> NodeView:
    """A node that publishes the shared device."""
    facts: dict[str, Any] = {
        "published": {DEVICE: 1},
        "offered": frozenset(() if closed else {DEVICE}),
        "held": index.held(POOL),
        "shared": index.shared(POOL),
        "status": status or PlanStatus(epoch="e", mode=PlanMode.PLANNED, inventory=inventory()),
    }
    return NodeView(name="n", uid="n", pool=POOL, **facts | more)


def gpu_of(seen: NodeView) -> FleetGpu:
    [gpu] = fleet_of(seen)
    return gpu


def devices_of(seen: NodeView) -> UnheldDevices:
    devices = UnheldDevices()
    devices.update([seen], changes([seen]), fleet_of(seen))
    return devices


@pytest.mark.parametrize(
    ("results", "gib"),
    [
        pytest.param([shared_result("n", 0, "6Gi")], 6, id="its part"),
        pytest.param([shared_result("n", 0, "6Gi"), shared_result("n", 0, "3Gi", "2")], 9, id="two parts"),
        pytest.param([shared_result("n", 0)], 80, id="no amount is the whole"),
        pytest.param([shared_result("n", 0, "much")], 80, id="what can not be read is the whole"),
        pytest.param([shared_result("n", 0, "6Gi"), shared_result("n", 0, None, "2")], 80, id="a part, and the whole"),
        pytest.param([shared_result("n", 0, "6Gi", adminAccess=True)], 0, id="adminAccess has none"),
    ],
)
def test_a_claim_holds_what_the_scheduler_gave_it(results: list[dict[str, Any]], gib: int) -> None:
    gpu = gpu_of(view(index_of(claim("a", *results))))
    assert (gpu.state.used, gpu.state.left, gpu.overlaps) == (gib, 80 - gib, ())


def test_claims_of_one_device_come_and_go_by_themselves() -> None:
    index = index_of(claim("a", shared_result("n", 0, "6Gi")), claim("b", shared_result("n", 0, "70Gi")))
    assert gpu_of(view(index)).state.left == 4
    assert index.put(claim("c").metadata.key, claim("c", shared_result("n", 0, "4Gi"))) == {POOL}
    assert gpu_of(view(index)).state.left == 0
    assert index.put(claim("b").metadata.key, None) == {POOL}
    assert [held.claim for held in index.shared(POOL)[DEVICE]] == ["team/a", "team/c"]
    assert gpu_of(view(index)).state.left == 70


def test_claims_with_more_than_the_memory_are_a_defect_and_nothing_is_left() -> None:
    index = index_of(claim("a", shared_result("n", 0, "50Gi")), claim("b", shared_result("n", 0, "40Gi")))
    gpu = gpu_of(view(index))
    assert gpu.overlaps == ((DEVICE, DEVICE),)
    assert not possible(gpu)


@pytest.mark.parametrize(
    "status",
    [
        pytest.param(PlanStatus(inventory=inventory(shared=None)), id="--shared was removed"),
        pytest.param(PlanStatus(inventory=inventory(), dropped=(SHARING_FIELD,)), id="the API server drops the field"),
    ],
)
def test_memory_that_is_held_stays_held_on_a_gpu_that_is_not_shared_any_more(status: PlanStatus) -> None:
    seen = view(index_of(claim("a", shared_result("n", 0, "6Gi"))), status=status)
    assert not possible(gpu_of(seen))
    assert [device.spot.at for device in gpu_of(seen).held] == [6]
    assert SHARED not in {device.spot.kind for device in possible(gpu_of(view(index_of(), status=status)))}


def test_a_gpu_is_shared_although_counters_are_dropped() -> None:
    status = PlanStatus(inventory=inventory(), dropped=(COUNTERS_FIELD,))
    assert gpu_of(view(index_of(), status=status)).state.left == 80


def test_the_inventory_of_an_older_node_has_no_shared_gpu() -> None:
    older = msgspec.json.decode(inventory(shared=None))
    [[report, _]] = older["gpus"]
    del report["shared"], report["gpu"]["memory_reserved"]
    status = PlanStatus(inventory=msgspec.json.encode(older).decode())
    gpu = gpu_of(view(index_of(), published={}, status=status))
    assert (gpu.shared, gpu.state.left) == (None, 0)
    assert possible(gpu)


def test_what_a_later_node_reports_and_holds_is_left_aside() -> None:
    later = msgspec.json.decode(inventory())
    later["gpus"][0][0]["shared"] |= {"strategy": "by-vote", "limit": "moral"}
    status = PlanStatus(inventory=msgspec.json.encode(later).decode())
    unknown = {**shared_result("n", 0), "device": "gpu-0-dreamed-1"}
    seen = view(index_of(claim("a", unknown)), published={"gpu-0-dreamed-1": 1, DEVICE: 1}, status=status)
    gpu = gpu_of(seen)
    assert gpu.shared == replace(shared_memory(80), strategy=SharingStrategy.TIME_SLICING, limit=MemoryLimit.NONE)
    assert gpu.held == ()
    assert devices_of(seen).free == {OFFER: PoolDevice(POOL, DEVICE)}
    assert PlanSpec(offers=("GPU-1/dreamed-1", "GPU-1/shared")).offered == {Offer("GPU-1", Spot(SHARED))}


@pytest.mark.parametrize(
    ("held", "closed", "offered", "managed"),
    [
        pytest.param([], False, True, True, id="unheld"),
        pytest.param(["6Gi"], False, True, False, id="held, with room"),
        pytest.param(["6Gi"], True, False, False, id="held, with room, but closed"),
        pytest.param(["6Gi", "74Gi"], False, False, False, id="full"),
    ],
)
def test_a_held_device_with_room_is_offered_and_never_withdrawn(
    held: list[str], closed: bool, offered: bool, managed: bool
) -> None:
    claims = [claim(f"c{number}", shared_result("n", 0, part)) for number, part in enumerate(held)]
    devices = devices_of(view(index_of(*claims), closed=closed))
    assert devices.allocatable(()) == ({OFFER: PoolDevice(POOL, DEVICE)} if offered else {})
    assert devices.allocatable({PoolDevice(POOL, DEVICE)}) == {}
    assert (OFFER in devices.managed, OFFER in devices.free) == (managed, managed)


def test_an_offer_that_is_also_held_is_no_offer_that_its_node_has_not_published() -> None:
    seen = view(index_of(claim("a", shared_result("n", 0, "6Gi"))))
    plans = {"n": GpuNodePlan(PlanMetadata("n"), PlanSpec(offers=(str(OFFER),)))}
    assert not devices_of(seen).unpublished(plans)
    assert devices_of(seen).offerable([OFFER], plans) == {OFFER}


def test_the_plan_names_every_claim_of_a_held_device() -> None:
    index = index_of(claim("a", shared_result("n", 0, "6Gi")), claim("b", shared_result("n", 0, "70Gi")))
    seen, specs = view(index), PlanSpecs()
    asked = Asked(OfferMode.COUNTERS, frozenset({OFFER}), frozenset(), frozenset())
    specs.update([seen], changes([seen]), fleet_of(seen), asked, {"n": PublishHeld.ALWAYS})
    assert specs.specs["n"].held == (f"{DEVICE} team/a", f"{DEVICE} team/b")
    assert specs.specs["n"].offers == ("n/0/shared",)
    assert specs.specs["n"].held_devices == {DEVICE}


def test_a_plan_names_so_few_claims_of_a_device_that_the_api_server_takes_it() -> None:
    claims = [claim(f"c{number:02}", shared_result("n", 0, "1Gi")) for number in range(80)]
    seen, specs = view(index_of(*claims)), PlanSpecs()
    asked = Asked(OfferMode.COUNTERS, frozenset(), frozenset(), frozenset())
    specs.update([seen], changes([seen]), fleet_of(seen), asked, {"n": PublishHeld.ALWAYS})
    assert specs.specs["n"].held == tuple(f"{DEVICE} team/c{number:02}" for number in range(MAX_NAMED_CLAIMS))
