"""Claims that share a partition: each has a compute instance of its own, and the partition goes with the last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from driver.errors import ClaimError, HardwareError, RecoverableError
from driver.model.gpu import Gpu
from driver.model.offer import Offer
from driver.slices.build import SliceBuilder
from kubelet_plugin.changes import GpuChange, HardwareOutcomes
from kubelet_plugin.checkpoint.records import decode_record
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.inventory.published_devices import PublishPolicy
from kubelet_plugin.reconcile.later_pods import LaterPods
from kubelet_plugin.reconcile.memory_watch import MemoryWatch
from kubelet_plugin.status.claim_status import device_statuses
from kubelet_plugin.status.events import PluginEvents
from tests.support.claims import NODE, result
from tests.support.node import KeptChanges, KeptEvents, NodeUnderTest, choosing, start_node

DEVICE, NEXT = "gpu-0-mig-1c3g40gb-0-shared", "gpu-0-mig-1c3g40gb-4-shared"
MANY_STEPS = 20
SHARING = choosing(compute_instances="1c.3g.40gb")


@dataclass
class KeptOutcomes(HardwareOutcomes):
    """``failures`` are those for which a GPU is blamed."""

    failures: list[HardwareError] = field(default_factory=list)

    def change_failed(self, gpu: Gpu, change: GpuChange, error: HardwareError) -> None:
        self.failures.append(error)

    def change_succeeded(self, gpu: Gpu, change: GpuChange) -> None:
        """Nobody asks for it."""


class Killed(BaseException):
    """The process is killed at this instruction."""


def instance(share: str, request: str = "gpu", device: str = DEVICE) -> dict[str, Any]:
    return result(device, request, shareID=share, consumedCapacity={"computeSlices": "1"})


@pytest.fixture
def node(tmp_path: Path) -> NodeUnderTest:
    return start_node(tmp_path, choice=SHARING)


def claims_of(node: NodeUnderTest, *names: str) -> list[ClaimReference]:
    return [node.api.allocate(name, instance(f"share-{name}")) for name in names]


def devices_in_slices(node: NodeUnderTest, policy: PublishPolicy | None = None) -> dict[str, dict[str, Any]]:
    published = node.node.inventory.published(policy) if policy else node.node.inventory.published()
    contents = SliceBuilder(node.node.pool).build(published).values()
    return {device["name"]: device for content in contents for device in content.get("devices", ())}


def test_three_claims_have_one_partition_and_a_fourth_is_refused(node: NodeUnderTest) -> None:
    claims = claims_of(node, "a", "b", "c")
    answers = [answer for claim in claims for answer in node.preparer.prepare(claim)]
    assert [(answer.device, answer.share_id) for answer in answers] == [(DEVICE, f"share-{n}") for n in "abc"]
    cut = node.partitions()
    assert len({partition.gpu_instance_id for partition in cut}) == 1
    assert len({partition.uuid for partition in cut}) == 3
    [fourth] = claims_of(node, "d")
    with pytest.raises(ClaimError, match=rf"{DEVICE}.* overlaps .*which claim default/[abc]"):
        node.preparer.prepare(fourth)
    for claim, left in zip(claims, (2, 1, 0), strict=True):
        node.preparer.unprepare(claim)
        node.preparer.unprepare(claim)
        assert len(node.partitions()) == left
    assert node.nothing_left()


def test_a_repeated_prepare_gives_the_same_compute_instance(node: NodeUnderTest) -> None:
    first, second = claims_of(node, "a", "b")
    for claim in (first, second):
        node.preparer.prepare(claim)
    before = node.partitions(), node.cdi_specs()
    for claim in (second, first):
        node.preparer.prepare(claim)
    assert (node.partitions(), node.cdi_specs()) == before


def test_each_claim_says_its_compute_instance_and_that_memory_is_shared(node: NodeUnderTest) -> None:
    for claim in claims_of(node, "a", "b"):
        node.preparer.prepare(claim)
    statuses = [status for [status] in device_statuses(node.node.checkpoint.records()).values()]
    assert {status.data["uuid"] for status in statuses} == {partition.uuid for partition in node.partitions()}
    assert {status.data["computeInstanceID"] for status in statuses} == {0, 1}
    assert all("nothing holds its programs to a part of that" in status.message for status in statuses)


def test_a_shared_partition_is_published_with_its_compute_slices_and_counts_once(node: NodeUnderTest) -> None:
    devices = devices_in_slices(node)
    assert "gpu-0-mig-3g40gb-0" not in devices
    capacity = {"value": "3", "requestPolicy": {"default": "1", "validValues": ["1"]}}
    assert devices[DEVICE]["capacity"] == {"computeSlices": capacity}
    assert devices[DEVICE]["allowMultipleAllocations"] is True
    assert devices[DEVICE]["attributes"]["type"] == {"string": "mig-shared"}
    for claim in claims_of(node, "a", "b"):
        node.preparer.prepare(claim)
    held = devices_in_slices(node)
    assert held[DEVICE]["consumesCounters"] == devices[DEVICE]["consumesCounters"]
    assert "taints" not in held[DEVICE]
    assert {"gpu-0", "gpu-0-mig-1g10gb-0", "gpu-0-mig-4g40gb-0"}.isdisjoint(held)
    assert NEXT in held


def test_a_held_partition_that_the_plan_does_not_offer_gets_no_new_claims(node: NodeUnderTest) -> None:
    node.preparer.prepare(*claims_of(node, "a"))
    gpu = node.node.inventory.gpus[0]
    offer = Offer.parse(f"{gpu.uuid}/1c.3g.40gb@0")
    assert offer is not None
    for offers, is_closed in ((frozenset({offer}), False), (frozenset[Offer](), True)):
        policy = PublishPolicy(held=frozenset({DEVICE}), offers=offers, closing=True)
        assert ("taints" in devices_in_slices(node, policy)[DEVICE]) is is_closed


def test_two_requests_of_a_claim_have_two_compute_instances(node: NodeUnderTest) -> None:
    claim = node.api.allocate("both", instance("s1", "a"), instance("s2", "b"))
    answers = node.preparer.prepare(claim)
    assert [(answer.requests, answer.share_id) for answer in answers] == [(("a",), "s1"), (("b",), "s2")]
    assert len({answer.cdi_device_ids for answer in answers}) == len(node.partitions()) == 2
    node.preparer.unprepare(claim)
    assert node.nothing_left()


@pytest.mark.parametrize("other", ["gpu-0", "gpu-0-mig-1g10gb-0", "gpu-0-mig-4g40gb-0"])
def test_nothing_that_overlaps_goes_together_with_a_shared_partition(node: NodeUnderTest, other: str) -> None:
    [shared], alone = claims_of(node, "shared"), node.api.allocate("alone", other)
    for first, second in ((shared, alone), (alone, shared)):
        node.preparer.prepare(first)
        with pytest.raises(ClaimError, match="overlaps"):
            node.preparer.prepare(second)
        node.preparer.unprepare(first)


def test_a_device_without_a_share_is_refused(node: NodeUnderTest) -> None:
    with pytest.raises(ClaimError, match=r"DRAConsumableCapacity; delete the pod, and remove --compute-instances"):
        node.preparer.prepare(node.api.allocate("a", DEVICE))


def test_a_lost_compute_instance_is_made_again_and_the_others_stay(node: NodeUnderTest) -> None:
    claims = claims_of(node, "a", "b")
    for claim in claims:
        node.preparer.prepare(claim)
    gpu, [lost, other] = node.node.inventory.gpus[0], node.partitions()
    node.host.destroy_compute_instance(gpu, lost)
    assert [len(devices) for _, devices in node.preparer.losses()].count(1) == 1
    for claim in claims:
        node.preparer.prepare(claim)
    assert other in node.partitions()
    assert len(node.partitions()) == 2
    assert not any(devices for _, devices in node.preparer.losses())


@pytest.mark.parametrize("has_neighbour", [False, True])
def test_a_kill_at_any_step_leaves_nothing_of_the_claim_and_all_of_its_neighbour(
    tmp_path: Path, has_neighbour: bool
) -> None:
    for steps in count():
        node = start_node(tmp_path / str(steps), choice=SHARING)
        neighbour, killed = claims_of(node, "neighbour", "killed")
        if has_neighbour:
            node.preparer.prepare(neighbour)
        before, passed = node.partitions(), iter(range(steps))

        def observe(*_: object, passed: Iterator[int] = passed) -> None:
            if next(passed, None) is None:
                raise Killed

        with suppress(Killed):
            under = start_node(node.root, node.api, observe, choice=SHARING)
            under.preparer.prepare(killed)
            under.preparer.unprepare(killed)
            break
        again = start_node(node.root, node.api, choice=SHARING)
        again.preparer.prepare(killed)
        assert len(again.partitions()) == len(before) + 1
        again.preparer.unprepare(killed)
        assert again.partitions() == before
        again.preparer.unprepare(neighbour)
        assert again.nothing_left()
    assert steps > MANY_STEPS


def test_a_claim_that_lost_its_record_keeps_its_compute_instance(node: NodeUnderTest) -> None:
    kept, other = claims_of(node, "kept", "other")
    for claim in (other, kept):
        node.preparer.prepare(claim)
    before = node.partitions()
    path = node.root / "state" / "claims" / f"{kept.uid}.json"
    uuid = decode_record(path.read_bytes(), path).devices[0].uuid
    path.write_text("{")
    again = node.restart()
    with pytest.raises(RecoverableError, match="unreadable or missing"):
        again.preparer.unprepare(other)
    assert again.partitions() == before
    again.preparer.prepare(kept)
    assert decode_record(path.read_bytes(), path).devices[0].uuid == uuid
    again.cleanup.finish_release(other.uid)
    assert [partition.uuid for partition in again.partitions()] == [uuid]


@pytest.mark.parametrize("shared_first", [True, False])
def test_a_change_of_the_setting_waits_for_the_claims_of_the_profile(tmp_path: Path, shared_first: bool) -> None:
    settings = {True: SHARING, False: choosing()}
    exclusive = "gpu-0-mig-3g40gb-0"
    node = start_node(tmp_path, choice=settings[shared_first])
    claim = node.api.allocate("a", instance("s1") if shared_first else exclusive)
    node.preparer.prepare(claim)
    changed = start_node(tmp_path, node.api, choice=settings[not shared_first])
    assert changed.held() == {DEVICE if shared_first else exclusive}
    assert any("mig-1c3g40gb" in name for name in changed.offered()) is shared_first
    changed.preparer.prepare(claim)
    changed.preparer.unprepare(claim)
    assert changed.nothing_left()
    after = start_node(tmp_path, node.api, choice=settings[not shared_first])
    assert any("mig-1c3g40gb" in name for name in after.offered()) is not shared_first


def test_compute_instances_that_no_claim_has_are_named_and_removed_with_the_next_claim(node: NodeUnderTest) -> None:
    first, second, third = claims_of(node, "a", "b", "c")
    for claim in (first, second):
        node.preparer.prepare(claim)
    node.host.create_compute_instance(node.node.inventory.gpus[0], node.partitions()[0])
    blamed = KeptOutcomes()
    node.outcomes.receivers.append(blamed)
    with pytest.raises(HardwareError, match="no claim has take its place; those that are not in use are removed"):
        node.preparer.prepare(third)
    assert blamed.failures == []
    assert len(node.partitions()) == 2
    assert node.preparer.prepare(third)
    for claim in (first, second, third):
        node.preparer.unprepare(claim)
    assert node.nothing_left()


def test_the_event_of_each_claim_says_that_memory_is_shared(node: NodeUnderTest) -> None:
    events = KeptEvents()
    stores, settings = node.node, node.preparer.gpu_settings
    later = LaterPods(stores, settings.memory, node.api)
    watch = MemoryWatch(stores, settings.memory, later, PluginEvents(events.record, NODE), KeptChanges([]))
    node.preparer.prepare(*claims_of(node, "a"))
    for _ in range(2):
        watch.handle_scan(stores.inventory.gpus)
    [(about, reason, message)] = events.told
    assert (about, reason) == ("ResourceClaim/a", "MemoryNotLimited")
    assert f"it has a compute instance of {DEVICE}, whose memory its claims share" in message
