"""The order of offers: small ones go where they hurt least, checked by hand and against a plain calculation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.model.device import Device, devices_of
from driver.model.gpu import Gpu
from driver.model.occupancy import Occupancy
from driver.placement import fragmentation, order_offers, rank, windows_of
from tests.support.gpus import H100, gpu_of

GPU = gpu_of(H100)
EVERY = {device.name: device for device in devices_of(GPU, 0)}


def offers_after(*held: str) -> list[str]:
    """Names of the offers beside what is held, best first, ``gpu-0-mig-`` left out."""
    devices = [EVERY[f"gpu-0-mig-{name}"] for name in held]
    taken = Occupancy.of(GPU, devices)
    fitting = [device for device in EVERY.values() if taken.admits(device)]
    return [device.name.removeprefix("gpu-0-mig-") for device in order_offers(fitting, {GPU.uuid: taken.mask})]


def best(profile: str, *held: str) -> str:
    return next(name for name in offers_after(*held) if name.startswith(f"{profile}-"))


def test_full_gpus_come_first_then_small_to_large() -> None:
    names = offers_after()
    assert names[0] == "gpu-0"
    assert [name.split("-")[0] for name in names[1:]] == (
        ["1g10gb"] * 7 + ["1g10gbme"] * 7 + ["1g20gb"] * 4 + ["2g20gb"] * 3 + ["3g40gb"] * 2 + ["4g40gb", "7g80gb"]
    )


@pytest.mark.parametrize(
    ("profile", "held", "expected"),
    [
        pytest.param("1g10gb", (), "1g10gb-6", id="empty: slice 6 spoils only 1g.20gb and the upper 3g"),
        pytest.param("1g10gb", ("1g10gb-6",), "1g10gb-4", id="beside what is cut in the same half"),
        pytest.param("1g10gb", ("1g10gb-4",), "1g10gb-5", id="fills the pair that is broken already"),
        pytest.param("1g10gb", ("1g10gb-0",), "1g10gb-1", id="fills the lower pair"),
        pytest.param("1g10gb", ("3g40gb-0",), "1g10gb-6", id="keeps 2g.20gb beside a 3g"),
        pytest.param("3g40gb", (), "3g40gb-4", id="the upper half: 4g.40gb stays possible"),
        pytest.param("3g40gb", ("1g10gb-6",), "3g40gb-0", id="the half that is left"),
        pytest.param("2g20gb", (), "2g20gb-4", id="keeps 4g.40gb possible"),
    ],
)
def test_where_the_next_partition_goes_on_an_h100(profile: str, held: tuple[str, ...], expected: str) -> None:
    assert best(profile, *held) == expected


def test_the_first_small_ones_never_touch_the_half_that_a_4g_needs() -> None:
    held: list[str] = []
    for _ in range(3):
        held.append(best("1g10gb", *held))
    assert all(int(name[-1]) >= 4 for name in held)
    assert "4g40gb-0" in offers_after(*held)


def plain_fragmentation(gpu: Gpu, occupied: int) -> float:
    """The definition, slowly: mean over profiles of free slices that no free placement of it covers."""
    free = {i for i in range(gpu.memory_slices) if not occupied >> i & 1}
    unusable = []
    for profile in gpu.profiles:
        usable: set[int] = set()
        for placement in profile.placements:
            if set(placement.slices) <= free:
                usable |= set(placement.slices)
        unusable.append(len(free - usable))
    return sum(unusable) / len(unusable)


@given(st.integers(0, 255))
def test_fragmentation_is_what_its_definition_says(occupied: int) -> None:
    assert fragmentation(windows_of(GPU), 8, occupied) == plain_fragmentation(GPU, occupied)


masks = st.integers(0, 255)


@given(masks, st.permutations(sorted(EVERY.values(), key=lambda device: device.name)), masks)
def test_the_order_depends_on_nothing_but_what_is_occupied(occupied: int, mixed: list[Device], other: int) -> None:
    first = order_offers(EVERY.values(), {GPU.uuid: occupied})
    order_offers(mixed, {GPU.uuid: other})
    assert order_offers(mixed, {GPU.uuid: occupied}) == first
    assert sorted(device.name for device in first) == sorted(EVERY)


@given(masks)
def test_inside_a_profile_the_order_is_that_of_the_rank(occupied: int) -> None:
    ordered = order_offers(EVERY.values(), {GPU.uuid: occupied})
    for profile in GPU.profiles:
        ranks = [rank(device, occupied, windows_of(GPU)) for device in ordered if device.profile == profile]
        assert ranks == sorted(ranks)


def test_a_gpu_without_mig_has_one_offer_and_no_fragmentation() -> None:
    plain = gpu_of("NVIDIA L40S")
    [only] = devices_of(plain, 3)
    assert only.name == "gpu-3"
    assert order_offers([only], {}) == [only]
    assert fragmentation(windows_of(plain), 1, 0) == 0.0


def test_between_two_gpus_the_fuller_one_is_cut_first() -> None:
    other = gpu_of(H100, 1)
    offers = [device for gpu in (GPU, other) for device in devices_of(gpu, gpu.minor) if str(device.profile)]
    small = [d for d in offers if d.profile is not None and d.profile.name == "1g.10gb" and d.mask != 1 << 6]
    ordered = order_offers(small, {other.uuid: 1 << 6, GPU.uuid: 0})
    assert ordered[0].gpu is other
