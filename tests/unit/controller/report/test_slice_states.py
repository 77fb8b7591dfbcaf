"""Every memory slice of the cluster is in one state, and a stranded one is of no use to what is asked for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.cluster.fleet import Fleet, FleetGpu
from controller.report.slice_states import REQUESTED_SECONDS, GpuUse, RequestedKinds, capacity_of, scattered_gpus
from driver.model.offer import FULL, SHARE, DeviceKind, Offer, OfferKind
from tests.support.gpus import H100
from tests.support.queues import Situation, fleet_gpu, profile, request

SMALL, HALF = OfferKind(DeviceKind.PARTITION, "1g.10gb"), OfferKind(DeviceKind.PARTITION, "3g.40gb")


def counted(entry: FleetGpu, requested: set[OfferKind], *offers: Offer) -> dict[str, float]:
    capacity = capacity_of(Fleet.of([entry]), offers, requested)
    return {state.value: count for (_, state), count in capacity.slices.items()}


@pytest.mark.parametrize(
    ("entry", "requested", "expected"),
    [
        (fleet_gpu("n", 0), set(), {"free": 8}),
        (fleet_gpu("n", 0), {FULL}, {"free": 8}),
        (fleet_gpu("n", 0, H100, "full"), {FULL}, {"held": 8}),
        (fleet_gpu("n", 0, H100, "mig-1g10gb-0"), {FULL}, {"held": 1, "stranded": 7}),
        # A second half fits on slices 4 to 7 only.
        (fleet_gpu("n", 0, H100, "mig-1g10gb-0"), {HALF}, {"held": 1, "stranded": 3, "free": 4}),
        (fleet_gpu("n", 0, H100, "mig-1g10gb-0"), {HALF, SMALL}, {"held": 1, "free": 7}),
        (fleet_gpu("n", 0, H100, "mig-1g10gb-0", fault="lost"), {SMALL}, {"held": 1, "unavailable": 7}),
        (fleet_gpu("n", 0, H100, foreign=0b11), {SMALL}, {"unavailable": 2, "free": 5, "stranded": 1}),
        (fleet_gpu("n", 0, H100, "share-0", shares=4), {SHARE}, {"held": 2, "free": 6}),
        # The node accepts no new pods.
        (fleet_gpu("n", 0, H100, "mig-1g10gb-0", why_no_offers="is cordoned"), {SMALL}, {"held": 1, "unavailable": 7}),
        (
            fleet_gpu("n", 0, H100, "share-0", shares=4, why_no_offers="is cordoned"),
            {SHARE},
            {"held": 2, "unavailable": 6},
        ),
        (fleet_gpu("n", 0, H100, "share-0", shares=4, fault="lost"), {SHARE}, {"held": 2, "unavailable": 6}),
    ],
)
def test_slices_are_counted_by_state(entry: FleetGpu, requested: set[OfferKind], expected: dict[str, float]) -> None:
    assert counted(entry, requested) == expected


def test_slices_under_several_offers_count_once() -> None:
    entry = fleet_gpu("n", 0, H100, "mig-1g10gb-0")
    offers = [device.offer for device in entry.devices if device.name in ("gpu-0-mig-1g10gb-4", "gpu-0-mig-3g40gb-4")]
    assert counted(entry, {SMALL, HALF}, *offers) == {"held": 1, "offered": 4, "free": 3}


def test_an_offer_that_nobody_requests_does_not_hide_stranded_slices() -> None:
    entry = fleet_gpu("n", 0, H100, "mig-1g10gb-0")
    [offer] = [device.offer for device in entry.devices if device.name == "gpu-0-mig-1g10gb-4"]
    assert counted(entry, {FULL}, offer) == {"held": 1, "stranded": 7}


def test_only_the_shares_that_are_offered_count_as_offered() -> None:
    for held, expected in ((("share-0",), {"held": 2, "offered": 2, "free": 4}), ((), {"offered": 2, "free": 6})):
        entry = fleet_gpu("n", 0, H100, *held, shares=4, shares_only=True)
        [offer] = [device.offer for device in entry.devices if device.name == "gpu-0-share-1"]
        assert counted(entry, {SHARE}, offer) == expected


@given(st.sets(st.sampled_from([FULL, SMALL, HALF])), st.integers(0, 255), st.integers(0, 6))
def test_the_states_of_a_gpu_add_up_to_its_slices(requested: set[OfferKind], foreign: int, start: int) -> None:
    held = () if foreign >> start & 1 else (f"mig-1g10gb-{start}",)
    assert sum(counted(fleet_gpu("n", 0, H100, *held, foreign=foreign), requested).values()) == 8


def test_gpus_are_counted_by_use() -> None:
    entries = [
        fleet_gpu("n", 0),
        fleet_gpu("n", 1, H100, "full"),
        fleet_gpu("n", 2, H100, "mig-1g10gb-0"),
        fleet_gpu("n", 3, fault="lost"),
    ]
    gpus = capacity_of(Fleet.of(entries), (), ()).gpus
    assert {use: count for (_, use), count in gpus.items()} == dict.fromkeys(GpuUse, 1)


def test_a_kind_counts_as_requested_for_an_hour_after_a_claim_was_pending_or_allocated() -> None:
    situation = Situation([fleet_gpu("n", 0, H100, "mig-3g40gb-4")])
    situation.wants(request(selector=profile("1g.10gb")))
    requested, queue = RequestedKinds(), situation.queue
    requested.update(queue, queue.feasibility.fleet, ["n"], 0.0)
    assert requested.kinds == {SMALL, HALF}
    idle = Situation([fleet_gpu("n", 0, H100, "mig-3g40gb-4")]).queue
    requested.update(idle, idle.feasibility.fleet, ["n"], REQUESTED_SECONDS)
    assert requested.kinds == {SMALL, HALF}
    requested.update(idle, idle.feasibility.fleet, ["n"], REQUESTED_SECONDS + 1)
    assert requested.kinds == frozenset()


@pytest.mark.parametrize(
    ("gpus", "lost"),
    [
        pytest.param([], 0, id="nothing is held"),
        pytest.param([["mig-1g10gb-0"]], 0, id="one partition"),
        pytest.param([["mig-1g10gb-0"], ["mig-1g10gb-3"], ["mig-1g10gb-6"]], 2, id="one on each of three"),
        pytest.param([["mig-4g40gb-0"], ["mig-4g40gb-0"]], 0, id="two that do not fit on one"),
        pytest.param([["mig-4g40gb-0"], ["mig-3g40gb-0"]], 1, id="two that fit on one, at another place"),
        pytest.param(
            [["mig-1g10gb-0", "mig-2g20gb-4"], ["mig-3g40gb-4"], ["mig-1g10gb-0"]], 2, id="the largest are placed first"
        ),
        pytest.param([["mig-1g10gb-0"], ["full"]], 0, id="a full GPU is not packed"),
    ],
)
def test_gpus_are_lost_to_scatter_that_packed_partitions_would_leave_whole(gpus: list[list[str]], lost: int) -> None:
    fleet = Fleet.of(fleet_gpu("n" if number else "m", number, H100, *held) for number, held in enumerate(gpus))
    assert scattered_gpus(fleet).total() == lost


@pytest.mark.parametrize("state", [{"fault": "lost"}, {"foreign": 0b10000000}, {"why_no_offers": "is cordoned"}])
def test_a_gpu_that_could_not_be_whole_anyway_is_not_lost_to_scatter(state: dict[str, Any]) -> None:
    gpus = [fleet_gpu("n", number, H100, "mig-1g10gb-0", **(state if number == 1 else {})) for number in range(3)]
    assert scattered_gpus(Fleet.of(gpus)) == {H100: 1}


def test_partitions_are_not_packed_on_gpus_of_another_product() -> None:
    gpus = [fleet_gpu("n", 0, H100, "mig-1g10gb-0"), fleet_gpu("n", 1, "NVIDIA H200", "mig-1g18gb-0")]
    assert scattered_gpus(Fleet.of(gpus)).total() == 0
