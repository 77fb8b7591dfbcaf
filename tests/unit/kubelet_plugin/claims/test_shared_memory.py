"""Claims that share a GPU by memory, from the allocation to the answer: each has its part, and nobody another's."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driver.errors import ClaimError
from driver.model.device import Device, number_gpus
from driver.model.gpu import Gpu, MigMode
from driver.model.gpu_settings import GpuSharing, parse_shared
from driver.model.offer import SHARED as SHARED_KIND
from driver.model.offer import DeviceKind, Offer, Spot
from driver.model.plan import OfferMode
from driver.model.shared_memory import GIB, MemoryLimit, SharedMemory, SharingStrategy
from driver.slices.build import CLOSED, SliceBuilder
from kubelet_plugin.inventory.inventory import ClaimReference, Inventory
from kubelet_plugin.inventory.published_devices import PublishPolicy
from kubelet_plugin.status.claim_status import apply_body, device_statuses
from tests.support.claims import DRIVER, result
from tests.support.node import NodeUnderTest, start_node

DEVICE = "gpu-0-shared"
IN_TURNS = GpuSharing(lambda _: 0, strategy_of=parse_shared("0=time-slicing").of)
BY_MPS = GpuSharing(lambda _: 0, strategy_of=parse_shared("0=mps").of)
WHOLE = 79
"""GiB of a simulated H100 that claims can have."""


def part(memory: str | None, share: str, request: str = "gpu") -> dict[str, Any]:
    return result(DEVICE, request, shareID=share, consumedCapacity={"memory": memory} if memory else None)


@pytest.fixture
def node(tmp_path: Path) -> NodeUnderTest:
    return start_node(tmp_path, sharing=IN_TURNS)


def shared_of(node: NodeUnderTest) -> Device:
    [device] = [d for d in node.node.inventory.devices_on(node.node.inventory.gpus[0]) if d.kind is DeviceKind.SHARED]
    return device


def shared_gpu(node: NodeUnderTest) -> SharedMemory:
    shared = shared_of(node).shared
    assert shared is not None
    return shared


def taints(node: NodeUnderTest, policy: PublishPolicy) -> dict[str, list[Any]]:
    """The devices in the slices of the first GPU's slice, and their taints."""
    contents = SliceBuilder(node.node.pool).build(node.node.inventory.published(policy)).values()
    devices = (device for content in contents for device in content.get("devices", ()))
    return {device["name"]: device.get("taints", []) for device in devices if device["name"].startswith("gpu-0")}


def test_claims_share_a_gpu_until_its_memory_is_given_out(node: NodeUnderTest) -> None:
    assert shared_gpu(node).gib == WHOLE
    small, large = node.api.allocate("small", part("6Gi", "s1")), node.api.allocate("large", part("70Gi", "s2"))
    for claim in (small, large):
        [answer] = node.preparer.prepare(claim)
        assert (answer.device, answer.share_id) == (DEVICE, {"small": "s1", "large": "s2"}[claim.name])
    third = node.api.allocate("third", part("4Gi", "s3"))
    with pytest.raises(ClaimError, match=r"gpu-0-shared has 3 GiB left of 79, it was allocated 4; .*large.*small"):
        node.preparer.prepare(third)
    node.preparer.unprepare(small)
    assert node.preparer.prepare(third)
    for claim in (large, third):
        node.preparer.unprepare(claim)
    assert node.nothing_left()


def test_nobody_waits_while_the_driver_is_asked_what_limits_memory(tmp_path: Path) -> None:
    """The driver may never answer."""
    waiting: list[bool] = []
    inventories: list[Inventory] = []

    def limit(gpu: Gpu, _: SharingStrategy) -> MemoryLimit:
        for inventory in inventories:
            other = threading.Thread(target=inventory.held_on, args=[gpu], daemon=True)
            other.start()
            other.join(1)
            waiting.append(other.is_alive())
        return MemoryLimit.CGROUP

    gpu, *others = start_node(tmp_path, sharing=IN_TURNS).node.inventory.gpus
    inventory = Inventory([gpu, *others], number_gpus([gpu, *others], {}), IN_TURNS.limited_by(limit))
    inventory.set_reserved({})
    inventories.append(inventory)
    inventory.states()
    inventory.update([replace(gpu, driver_version="616.0.0"), *others], {})
    inventory.set_mig_mode(gpu, MigMode.ENABLED)
    assert inventory.published()
    assert waiting == [False]


def test_two_parts_of_one_gpu_are_two_devices_of_a_claim(node: NodeUnderTest) -> None:
    claim = node.api.allocate("both", part("6Gi", "s1", "a"), part("2Gi", "s2", "b"))
    answers = node.preparer.prepare(claim)
    assert [(answer.requests, answer.share_id) for answer in answers] == [(("a",), "s1"), (("b",), "s2")]
    [spec] = node.cdi_specs().values()
    by_name = {device["name"]: device["containerEdits"]["env"] for device in spec["devices"]}
    assert [answer.cdi_device_ids for answer in answers] == [(f"{DRIVER}/claim={name}",) for name in by_name]
    env = [text for edits in by_name.values() for text in edits]
    memory = [text.partition("=")[2] for text in env if text.startswith("TESSERA_MEMORY")]
    assert memory == ["6Gi", "2Gi"]
    assert node.preparer.prepare(claim) == answers
    [(reference, statuses)] = device_statuses(node.node.checkpoint.records()).items()
    body = apply_body(reference, DRIVER, statuses, {status.key: "2026-11-28T20:00:00Z" for status in statuses})
    assert [entry["shareID"] for entry in body["status"]["devices"]] == ["s1", "s2"]
    assert "nothing holds its programs to that" in body["status"]["devices"][0]["conditions"][0]["message"]


def test_a_claim_that_states_no_memory_has_the_whole_gpu(node: NodeUnderTest) -> None:
    node.preparer.prepare(node.api.allocate("all", part(None, "s1")))
    with pytest.raises(ClaimError, match="has 0 GiB left of 79"):
        node.preparer.prepare(node.api.allocate("one", part("1Gi", "s2")))


def test_a_claim_is_refused_where_mps_serves_no_more(tmp_path: Path) -> None:
    node = start_node(tmp_path, sharing=BY_MPS)
    part_of_one = replace(shared_of(node), spot=Spot(SHARED_KIND, 1))
    for number in range(48):
        node.node.inventory.hold(ClaimReference("default", f"claim-{number:02}", str(number)), [part_of_one])
    with pytest.raises(ClaimError, match=r"gpu-0-shared has room for 48 claims by MPS, all of them taken; .*claim-00"):
        node.preparer.prepare(node.api.allocate("another", part("1Gi", "s1")))


@pytest.mark.parametrize("other", ["gpu-0", "gpu-0-mig-1g10gb-0"])
def test_nothing_else_of_the_gpu_goes_together_with_its_shared_device(node: NodeUnderTest, other: str) -> None:
    shared, alone = node.api.allocate("shared", part("1Gi", "s1")), node.api.allocate("alone", other)
    for first, second in ((shared, alone), (alone, shared)):
        node.preparer.prepare(first)
        with pytest.raises(ClaimError, match="overlaps"):
            node.preparer.prepare(second)
        node.preparer.unprepare(first)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        pytest.param(result(DEVICE, consumedCapacity={"memory": "6Gi"}), "DRAConsumableCapacity", id="no share"),
        pytest.param(part("six", "s1"), "consumedCapacity memory 'six' is no positive quantity", id="no quantity"),
        pytest.param(part("0", "s1"), "consumedCapacity memory '0' is no positive quantity", id="nothing"),
        pytest.param(part("80Gi", "s1"), "has 79 GiB left of 79, it was allocated 80", id="more than there is"),
    ],
)
def test_an_allocation_that_makes_no_sense_is_refused(node: NodeUnderTest, device: Any, message: str) -> None:
    with pytest.raises(ClaimError, match=message):
        node.preparer.prepare(node.api.allocate("odd", device))
    assert node.nothing_left()


def test_a_held_shared_device_stays_on_offer_as_long_as_the_plan_offers_it(node: NodeUnderTest) -> None:
    gpu = node.node.inventory.gpus[0]
    node.preparer.prepare(node.api.allocate("one", part("6Gi", "s1")))
    offered = PublishPolicy(frozenset({DEVICE}), frozenset({Offer(gpu.uuid, Spot(SHARED_KIND))}), closing=True)
    closed = PublishPolicy(frozenset({DEVICE}), frozenset(), closing=True)
    assert taints(node, offered) == {DEVICE: []}
    assert taints(node, closed) == {DEVICE: [CLOSED]}


@pytest.mark.parametrize("mode", list(OfferMode))
@pytest.mark.parametrize("held", [frozenset[str](), frozenset({DEVICE})], ids=["names no claim", "names the claim"])
def test_the_plan_of_an_earlier_controller_offers_nothing_of_a_gpu_that_claims_share(
    node: NodeUnderTest, held: frozenset[str], mode: OfferMode
) -> None:
    """It knows no shared devices, and wants everything else of the GPU."""
    node.preparer.prepare(node.api.allocate("one", part("6Gi", "s1")))
    devices = node.node.inventory.devices_on(node.node.inventory.gpus[0])
    offers = frozenset(device.offer for device in devices if device.kind is not DeviceKind.SHARED)
    assert taints(node, PublishPolicy(held, offers, closing=True, mode=mode)) == {DEVICE: [CLOSED]}


@pytest.mark.parametrize("mode", list(OfferMode))
def test_without_a_controller_a_shared_gpu_with_room_offers_nothing_else(node: NodeUnderTest, mode: OfferMode) -> None:
    node.preparer.prepare(node.api.allocate("one", part("6Gi", "s1")))
    assert taints(node, PublishPolicy(mode=mode)) == {DEVICE: []}


def test_an_api_server_that_would_make_it_exclusive_gets_no_shared_device(node: NodeUnderTest) -> None:
    assert DEVICE in taints(node, PublishPolicy())
    assert DEVICE not in taints(node, PublishPolicy(keeps_sharing=False))
    assert DEVICE not in taints(node, PublishPolicy(keeps_sharing=False, complete=True))


@pytest.mark.parametrize("sharing", [GpuSharing(lambda _: 0), BY_MPS], ids=["not shared", "shared by MPS"])
def test_a_changed_setting_leaves_the_claims_their_memory(node: NodeUnderTest, sharing: GpuSharing) -> None:
    held = node.api.allocate("held", part("6Gi", "s1"))
    answers = node.preparer.prepare(held)
    again = node.restart(sharing=sharing)
    assert again.preparer.prepare(held) == answers
    is_shared = sharing is BY_MPS
    assert taints(again, PublishPolicy()) == {DEVICE: [] if is_shared else [CLOSED]}
    if is_shared:
        assert shared_gpu(again).strategy is SharingStrategy.TIME_SLICING, "as long as claims share it in turns"
    again.preparer.unprepare(held)
    assert again.nothing_left()
    assert shared_gpu(again.restart(sharing=BY_MPS)).strategy is SharingStrategy.MPS


def test_an_earlier_version_refuses_a_node_with_such_claims(node: NodeUnderTest) -> None:
    node.preparer.prepare(node.api.allocate("full", "gpu-1"))
    node.preparer.prepare(node.api.allocate("shared", part("6Gi", "s1")))
    stored = [json.loads(path.read_bytes()) for path in (node.root / "state" / "claims").iterdir()]
    assert {record["name"]: record["version"] for record in stored} == {"full": 1, "shared": 2}


def test_a_claim_without_its_record_keeps_the_rest_of_the_gpu_away(node: NodeUnderTest) -> None:
    claim = node.api.allocate("lost", part("6Gi", "s1"))
    node.preparer.prepare(claim)
    for record in (node.root / "state" / "claims").iterdir():
        record.write_bytes(b"garbage")
    again = node.restart(sharing=IN_TURNS)
    with pytest.raises(ClaimError, match="overlaps"):
        again.preparer.prepare(again.api.allocate("full", "gpu-0"))
    assert again.preparer.prepare(claim)
    again.preparer.unprepare(claim)
    assert not again.cdi_specs()


SIZES = st.lists(st.tuples(st.integers(0, 5), st.integers(1, WHOLE)), max_size=12)


@settings(max_examples=15, deadline=None)
@given(SIZES)
def test_what_claims_have_is_never_more_than_the_gpu_has(tmp_path_factory: pytest.TempPathFactory, work: Any) -> None:
    node = start_node(tmp_path_factory.mktemp("node"), gpus="h100-1", sharing=IN_TURNS)
    held: dict[int, tuple[ClaimReference, int]] = {}
    for number, gib in work:
        if number in held:
            node.preparer.unprepare(held.pop(number)[0])
        claim = node.api.allocate(f"claim-{number}", part(f"{gib}Gi", f"s{number}"), uid=f"uid-{number}")
        if sum(size for _, size in held.values()) + gib <= WHOLE:
            assert node.preparer.prepare(claim)
            held[number] = claim, gib
        else:
            with pytest.raises(ClaimError, match="GiB left of"):
                node.preparer.prepare(claim)
    on_gpu = node.node.inventory.held_on(node.node.inventory.gpus[0])
    assert sum(device.memory_bytes for device in on_gpu) == sum(gib for _, gib in held.values()) * GIB
