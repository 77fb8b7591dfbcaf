"""From what nodes and claims say to the fleet that curation sees."""

from __future__ import annotations

import pytest

from controller.cluster.fleet import FleetGpu
from controller.cluster.fleet_builder import FleetBuilder
from controller.cluster.node_dedication import Dedication
from controller.cluster.node_views import NodeView
from driver.model.offer import OF_SEVERAL, DeviceKind
from driver.model.plan import Held, PlanStatus
from driver.model.reported_gpus import GpuReport, encode_inventory
from tests.support.fleets import possible
from tests.support.gpus import H100, gpu_of
from tests.support.node_views import changes, fleet_of

L40S = "NVIDIA L40S"
UNSHARED = set(DeviceKind) - OF_SEVERAL


def view(*held: str, published: dict[str, int] | None = None, shares: int = 0, **more: object) -> NodeView:
    """A node with an H100 and an L40S."""
    states = [GpuReport(gpu_of(H100, 0), 0, shares), GpuReport(gpu_of(L40S, 1), 1)]
    facts = {
        "name": "n1",
        "uid": "u",
        "pool": "n1-gpu.tessera.dev",
        "status": PlanStatus(epoch="e", inventory=encode_inventory(states)),
        "published": published or {},
        "offered": frozenset(published or {}),
        "held": {name: Held(name, "default/claim") for name in held},
    }
    return NodeView(**(facts | more))  # type: ignore[arg-type]


def gpus(*views: NodeView) -> list[FleetGpu]:
    return list(fleet_of(*views))


def kinds(gpu: FleetGpu) -> set[DeviceKind]:
    return {device.kind for device in possible(gpu)}


def test_the_fleet_has_every_fact_that_the_node_told() -> None:
    assert [entry.gpu for entry in gpus(view())] == [gpu_of(H100, 0), gpu_of(L40S, 1)]


def test_what_claims_have_is_held_on_the_gpu_it_is_on() -> None:
    first, second = gpus(view("gpu-0-mig-1g10gb-6", "gpu-1"))
    assert [device.name for device in first.held] == ["gpu-0-mig-1g10gb-6"]
    assert [device.name for device in second.held] == ["gpu-1"]
    assert possible(second) == ()


def test_a_share_that_is_held_takes_what_it_was_given_out_as() -> None:
    [first, _] = gpus(view("gpu-0-share-3", published={"gpu-0-share-3": 10}, shares=4))
    assert [device.shares for device in first.held] == [10]
    assert kinds(first) == {DeviceKind.SHARE}


def test_a_gpu_whose_node_was_registered_again_is_the_new_nodes() -> None:
    [first, _] = gpus(view(name="a"), view(name="b", why_no_offers="is cordoned"))
    assert first.node == "a"


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        ("training", {DeviceKind.FULL}),
        ("inference", {DeviceKind.PARTITION}),
        ("dev", {DeviceKind.SHARE}),
        (None, UNSHARED),
    ],
)
def test_a_dedicated_node_is_offered_for_its_use_alone(use: str | None, expected: set[DeviceKind]) -> None:
    [first, _] = gpus(view(shares=4, dedication=Dedication(use)))
    assert kinds(first) == expected


def test_a_gpu_with_a_use_of_its_own_is_offered_for_that_and_the_others_for_the_nodes() -> None:
    [first, second] = gpus(view(shares=4, dedication=Dedication("training", {0: "dev"})))
    assert (kinds(first), kinds(second)) == ({DeviceKind.SHARE}, {DeviceKind.FULL})


def test_what_is_held_stays_whatever_its_gpu_is_dedicated_to_from_now_on() -> None:
    [first, _] = gpus(view("gpu-0-mig-1g10gb-6", dedication=Dedication(None, {0: "training"})))
    assert [device.name for device in first.held] == ["gpu-0-mig-1g10gb-6"]
    assert possible(first) == ()


def test_a_label_makes_only_its_node_anew_and_at_once() -> None:
    builder, before, after = FleetBuilder(), [view()], [view(dedication=Dedication(None, {0: "training"}))]
    builder.build(before, changes(before))
    [first, _] = builder.build(after, changes(after, before))
    assert kinds(first) == {DeviceKind.FULL}


def test_a_cordoned_node_offers_nothing() -> None:
    assert [possible(entry) for entry in gpus(view(why_no_offers="is cordoned"))] == [(), ()]


def test_a_node_that_can_start_no_pod_with_a_gpu_offers_nothing_until_it_can() -> None:
    builder, able = FleetBuilder(), [view()]
    before = list(builder.build(able, changes(able)))
    unable = [view(unable="the driver is missing")]
    closed = builder.build(unable, changes(unable, able))
    assert {(gpu.fault, possible(gpu)) for gpu in closed} == {("the driver is missing", ())}
    assert list(builder.build(able, changes(able, unable))) == before


def test_a_gpu_that_did_not_change_is_not_built_again() -> None:
    builder, unused, used = FleetBuilder(), [view()], [view("gpu-1")]
    before = list(builder.build(unused, changes(unused)))
    assert all(one is other for one, other in zip(builder.build(unused, changes(())), before, strict=True))
    again = [view()]  # a decision that failed is made again, from the same changes
    assert all(one is other for one, other in zip(builder.build(again, changes(again)), before, strict=True))
    changed = list(builder.build(used, changes(used, unused)))
    assert changed[0] is before[0]
    assert changed[1] is not before[1]


def test_a_device_that_another_claim_holds_makes_another_fleet() -> None:
    builder, before = FleetBuilder(), [view("gpu-1")]
    after = [view("gpu-1", held={"gpu-1": Held("gpu-1", "default/other")})]
    first = builder.build(before, changes(before))
    assert builder.build(before, changes(())) is first
    second = builder.build(after, changes(after, before))
    assert (second is first, second == first) == (False, True)


def test_what_is_held_changes_nothing_about_the_fleet_without_held_devices() -> None:
    builder, unused, used = FleetBuilder(), [view()], [view("gpu-1")]
    unheld = builder.build(unused, changes(unused)).unheld
    assert builder.build(used, changes(used, unused)).unheld is unheld
    assert builder.build(unused, changes(unused, used)).unheld is unheld
    cordoned = [view("gpu-1", why_no_offers="is cordoned")]
    found = builder.build(cordoned, changes(cordoned, unused))
    assert [(entry.held, entry.why_no_offers) for entry in found.unheld] == [((), "is cordoned")] * 2


def test_the_gpus_of_a_node_that_is_gone_are_gone() -> None:
    builder, both = FleetBuilder(), [view(name="a", status=PlanStatus()), view(name="b")]
    assert len(builder.build(both, changes(both)).gpus) == 2
    assert not builder.build(both[:1], changes(both[:1], both)).gpus


def test_an_allocated_share_with_an_impossible_number_is_ignored() -> None:
    [first, _] = gpus(view("gpu-0-share-99999999999999", shares=4))
    assert first.held == ()
    assert kinds(first) == UNSHARED
