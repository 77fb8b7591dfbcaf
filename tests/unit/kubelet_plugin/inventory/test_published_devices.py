"""The published devices of one GPU whose offers must be disjoint, and which of its devices consume counters."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.model.device import Device, devices_of
from driver.model.gpu import Gpu
from driver.model.gpu_events_and_conditions import DeviceCondition
from driver.model.offer import Offer
from driver.model.plan import OfferMode
from driver.slices.build import PublishedGpu
from driver.slices.slice_names import Pool
from kubelet_plugin.inventory.published_devices import (
    ForeignPartitions,
    PublishableGpu,
    PublishPolicy,
    published_devices,
)
from tests.support.gpus import gpu_of
from tests.support.published import build_slices

GPU = gpu_of()
DEVICES = {device.name: device for device in devices_of(GPU, 0, shares=4)}
FULL, SHARE, OTHER_SHARE = "gpu-0", "gpu-0-share-0", "gpu-0-share-1"
SMALL, NEXT, MEDIUM, HALF = "gpu-0-mig-1g10gb-6", "gpu-0-mig-1g10gb-5", "gpu-0-mig-2g20gb-4", "gpu-0-mig-3g40gb-0"
MEDIA, OTHER_MEDIA = "gpu-0-mig-1g10gbme-0", "gpu-0-mig-1g10gbme-1"


def devices(*names: str) -> tuple[Device, ...]:
    return tuple(DEVICES[name] for name in names)


def offers(*names: str) -> frozenset[Offer]:
    return frozenset(device.offer for device in devices(*names))


def published(
    offered: tuple[str, ...] = (),
    kept: tuple[str, ...] = (),
    prepared: tuple[str, ...] = (),
    allocated: tuple[str, ...] = (),
    foreign: ForeignPartitions = ForeignPartitions(),  # noqa: B008 - immutable
) -> PublishedGpu:
    gpu = PublishableGpu(
        GPU,
        0,
        tuple(DEVICES.values()),
        devices(*prepared),
        devices(*allocated),
        shares_only=False,
        foreign=foreign,
        reserved=False,
        fault=None,
        conditions=(),
    )
    return gpu.published(PublishPolicy(offers=offers(*offered), kept=frozenset(kept), mode=OfferMode.DISJOINT))


def names(found: PublishedGpu) -> set[str]:
    return {device.name for device in found.offers}


@pytest.mark.parametrize(
    ("wanted", "kept", "prepared", "expected"),
    [
        pytest.param((SMALL, HALF), (), (), {SMALL, HALF}, id="what fits together"),
        pytest.param((FULL, SMALL), (), (), {FULL}, id="one of two offers that overlap"),
        pytest.param((SMALL, SHARE, OTHER_SHARE), (), (), {SHARE, OTHER_SHARE}, id="shares or a partition"),
        pytest.param((MEDIA, OTHER_MEDIA), (), (), {MEDIA}, id="one of two that need the same engines"),
        pytest.param((FULL,), (SMALL,), (), {SMALL}, id="nothing over a device that was not withdrawn"),
        pytest.param((SMALL,), (SMALL,), (), {SMALL}, id="a published device stays"),
        pytest.param((MEDIUM, SMALL), (), (NEXT,), {SMALL}, id="nothing over a held device"),
        pytest.param((), (MEDIUM,), (NEXT,), set(), id="a prepared device removes what it overlaps"),
    ],
)
def test_offers_that_have_no_counters_never_overlap(
    wanted: tuple[str, ...], kept: tuple[str, ...], prepared: tuple[str, ...], expected: set[str]
) -> None:
    found = published(wanted, kept, prepared)
    assert names(found) == expected
    assert not found.counted


@pytest.mark.parametrize(
    ("kept", "allocated"),
    [
        pytest.param((MEDIUM, NEXT, SMALL), (), id="published devices"),
        pytest.param((MEDIUM, SMALL), (NEXT,), id="a published device and one that the plan names as held"),
        pytest.param((), (MEDIUM, NEXT), id="devices that only the plan says are held"),
    ],
)
def test_devices_that_overlap_keep_their_counters(kept: tuple[str, ...], allocated: tuple[str, ...]) -> None:
    found = published((SMALL, HALF), kept, allocated=allocated)
    assert found.counted
    assert names(found) == {*kept, SMALL, HALF}


def test_an_existing_partition_that_is_offered_as_it_is_does_not_overlap_itself() -> None:
    mask = DEVICES[SMALL].mask
    found = published((MEDIUM,), foreign=ForeignPartitions(mask, frozenset({SMALL})))
    assert names(found) == {SMALL, MEDIUM}
    assert not found.counted


def test_a_free_device_that_is_in_the_way_of_an_offer_is_published() -> None:
    policy = PublishPolicy(
        frozenset({HALF}),
        offers(),
        kept=frozenset({HALF, SMALL}),
        publish_held=False,
        unpublished=frozenset({GPU.uuid}),
        mode=OfferMode.DISJOINT,
    )
    gpu = PublishableGpu(
        GPU, 0, tuple(DEVICES.values()), devices(HALF), (), False, ForeignPartitions(), False, None, ()
    )
    assert [published.unpublished for published in published_devices([gpu], policy)] == [False]
    without = replace(policy, kept=frozenset({HALF}))
    assert [published.unpublished for published in published_devices([gpu], without)] == [True]


def test_slices_of_gpus_without_counters_have_their_devices_and_no_counter_set() -> None:
    pool = Pool("node-a", "gpu.tessera.dev")
    slices = build_slices(pool, [published((SMALL, HALF))])
    assert slices[pool.counter_slice(0)] == {"devices": []}
    found = slices[pool.device_slice(0, divided=True)]["devices"]
    assert {device["name"] for device in found} == {SMALL, HALF}
    assert not [device for device in found if "consumesCounters" in device]


def test_a_free_device_that_nobody_may_get_is_left_out_where_taints_are_dropped() -> None:
    pool = Pool("node-a", "gpu.tessera.dev")
    cordon = DeviceCondition("cordoned", "maintenance", cordon=True)
    found = replace(published((SMALL,), prepared=(HALF,)), conditions=(cordon,), closed=frozenset({HALF}))
    for keeps_taints, expected in ((True, {SMALL, HALF}), (False, {HALF})):
        slices = build_slices(pool, [replace(found, keeps_taints=keeps_taints)])
        there = slices[pool.device_slice(0, divided=True)]["devices"]
        assert {device["name"] for device in there} == expected
        assert all(("taints" in device) == keeps_taints for device in there)


NODE_GPUS = [replace(GPU, uuid=f"GPU-{number}") for number in range(3)]
OF_NODE = {device.name: device for number, gpu in enumerate(NODE_GPUS) for device in devices_of(gpu, number)}
NAMES = st.frozensets(st.sampled_from([name for name in OF_NODE if "1g10gb-" in name or "3g40gb" in name]), max_size=6)


@given(prepared=NAMES, planned=NAMES, kept=NAMES, offered=NAMES, unpublished=st.frozensets(st.sampled_from(NODE_GPUS)))
def test_a_node_that_offers_anything_publishes_everything_that_its_plan_knows_to_be_held(
    prepared: frozenset[str],
    planned: frozenset[str],
    kept: frozenset[str],
    offered: frozenset[str],
    unpublished: frozenset[Gpu],
) -> None:
    policy = PublishPolicy(
        held=prepared | planned,
        offers=frozenset(OF_NODE[name].offer for name in offered),
        kept=kept,
        closing=True,
        publish_held=False,
        unpublished=frozenset(gpu.uuid for gpu in unpublished),
    )

    def of(gpu: Gpu, names: frozenset[str]) -> tuple[Device, ...]:
        return tuple(OF_NODE[name] for name in sorted(names) if OF_NODE[name].gpu is gpu)

    gpus = [
        PublishableGpu(
            gpu,
            number,
            tuple(device for device in OF_NODE.values() if device.gpu is gpu),
            of(gpu, prepared),
            of(gpu, planned - prepared),
            False,
            ForeignPartitions(),
            False,
            None,
            (),
        )
        for number, gpu in enumerate(NODE_GPUS)
    ]
    slices = published_devices(gpus, policy)
    offers = [gpu for gpu in slices if gpu.is_offering]
    in_slices = {device.name for gpu in slices if not gpu.unpublished for device in (*gpu.held, *gpu.offers)}
    if offers:
        assert in_slices >= prepared | planned
    else:
        assert not [gpu for gpu in slices if not gpu.unpublished and not gpu.offers]
