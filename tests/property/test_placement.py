"""The order of offers: small ones go where they hurt least, checked by hand and against a plain calculation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.model.device import Device, devices_of
from driver.model.gpu import Gpu
from driver.model.offer import FULL, SHARE, DeviceKind, OfferKind
from driver.placement.measure import CLIQUE_CLASS, FULL_CLASS, SHARE_CLASS, Measure
from driver.placement.occupancy import GpuState
from driver.placement.ranking import RankedClique, Ranking, order_offers
from tests.support.gpus import H100, gpu_of

GPU = gpu_of(H100)
MEASURE = Measure()
RANKING = Ranking(MEASURE)
FREE = GpuState.of(GPU)
EVERY = {device.name: device for device in devices_of(GPU, 0)}


def offers_after(*held: str) -> list[str]:
    """Names of the offers beside what is held, best first, ``gpu-0-mig-`` left out."""
    devices = [EVERY[f"gpu-0-mig-{name}"] for name in held]
    taken = GpuState.of(GPU, devices)
    fitting = [device for device in EVERY.values() if taken.fits(device)]
    return [device.name.removeprefix("gpu-0-mig-") for device in order_offers(fitting, {GPU.uuid: taken.mask})]


def best(profile: str, *held: str) -> str:
    return next(name for name in offers_after(*held) if name.startswith(f"{profile}-"))


def test_small_devices_come_first_and_full_gpus_last() -> None:
    names = offers_after()
    assert names[-1] == "gpu-0"
    assert [name.split("-")[0] for name in names[:-1]] == (
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


def plain_unusable(gpu: Gpu, occupied: int) -> dict[str, int]:
    """The definition, slowly: for each profile the free slices that no free placement of it covers."""
    free = {i for i in range(gpu.memory_slices) if not occupied >> i & 1}
    unusable = {}
    for profile in gpu.profiles:
        usable: set[int] = set()
        for placement in profile.placements:
            if set(placement.slices) <= free:
                usable |= set(placement.slices)
        unusable[profile.name] = len(free - usable)
    return unusable


@given(st.integers(0, 255), st.dictionaries(st.sampled_from([p.name for p in GPU.profiles]), st.floats(0.01, 9)))
def test_fragmentation_is_what_its_definition_says(occupied: int, weights: dict[str, float]) -> None:
    state = GpuState.of(GPU, foreign=occupied)
    amounts = plain_unusable(GPU, occupied) | {FULL_CLASS: 8 - occupied.bit_count() if occupied else 0}
    total = sum(weights.get(name, 1) for name in (*amounts, CLIQUE_CLASS))
    expected = sum(weights.get(name, 1) / total * amount for name, amount in amounts.items())
    assert Measure(weights).fragmentation(state) == pytest.approx(expected)


masks = st.integers(0, 255)


@given(masks, st.permutations(sorted(EVERY.values(), key=lambda device: device.name)), masks)
def test_the_order_depends_on_nothing_but_what_is_occupied(occupied: int, mixed: list[Device], other: int) -> None:
    first = order_offers(EVERY.values(), {GPU.uuid: occupied})
    order_offers(mixed, {GPU.uuid: other})
    assert order_offers(mixed, {GPU.uuid: occupied}) == first
    assert sorted(device.name for device in first) == sorted(EVERY)


@given(masks)
def test_inside_a_profile_the_order_is_that_of_the_ranking(occupied: int) -> None:
    state = GpuState.of(GPU, foreign=occupied)
    clique = RANKING.clique((RANKING.gpu(state),))
    fitting = [device for device in EVERY.values() if state.admits(device.spot)]
    ordered = order_offers(fitting, {GPU.uuid: occupied})
    for profile in GPU.profiles:
        terms = [clique.rank(0, device.spot) for device in ordered if device.profile == profile]
        assert terms == sorted(terms)


held_lists = st.lists(st.sampled_from(sorted(EVERY)), max_size=7)


def fitting_of(names: list[str], shares: int = 0) -> list[Device]:
    """As many of the devices of these names as fit side by side."""
    every = {device.name: device for device in devices_of(GPU, 0, shares)}
    held: list[Device] = []
    for name in dict.fromkeys(names):
        if GpuState.of(GPU, held).fits(every[name]):
            held.append(every[name])
    return held


@given(st.one_of(held_lists, st.lists(st.sampled_from([f"gpu-0-share-{i}" for i in range(5)]))))
def test_a_place_is_free_exactly_if_its_device_fits(names: list[str]) -> None:
    held = fitting_of(names, shares=5)
    state, occupancy = GpuState.of(GPU, held, shares=5), GpuState.of(GPU, held)
    for device in devices_of(GPU, 0, 5):
        admitted = occupancy.fits(device) and device.name not in names
        assert state.admits(device.spot) == admitted
        if admitted:
            assert state.take(device.spot) == GpuState.of(GPU, [*held, device], shares=5)


def unusable_by_the_clique(clique: RankedClique) -> float:
    """Free slices that a request for all of the GPUs can't use."""
    return 0.0 if all(gpu.whole for gpu in clique.gpus) else sum(gpu.free for gpu in clique.gpus)


@given(st.lists(held_lists, min_size=1, max_size=3), st.data())
def test_the_classes_add_up_to_the_growth(cliques: list[list[str]], data: st.DataObject) -> None:
    clique = RANKING.clique(tuple(RANKING.gpu(GpuState.of(GPU, fitting_of(names))) for names in cliques))
    places = [(i, spot) for i, gpu in enumerate(clique.gpus) for key in gpu.state.offered() for spot in gpu.places(key)]
    if not places:
        return
    position, spot = data.draw(st.sampled_from(places))
    weights = MEASURE.classes(clique.gpus[position].state)
    after = clique.after(position, spot)
    had, left = (MEASURE.unusable(each.gpus[position].state) for each in (clique, after))
    grown = {name: left[name] - had[name] for name in had}
    grown[CLIQUE_CLASS] = unusable_by_the_clique(after) - unusable_by_the_clique(clique)
    assert clique.rank(position, spot).growth == pytest.approx(sum(weights[name] * grown[name] for name in grown))


@given(st.lists(held_lists, min_size=1, max_size=3))
def test_the_best_of_a_clique_is_the_least_of_its_places(cliques: list[list[str]]) -> None:
    clique = RANKING.clique(tuple(RANKING.gpu(GpuState.of(GPU, fitting_of(names))) for names in cliques))
    for key in FREE.offered():
        places = [(clique.rank(i, spot), i) for i, gpu in enumerate(clique.gpus) for spot in gpu.places(key)]
        best = clique.best(key)
        assert (best and best[:2]) == min(places, default=None)


def test_a_gpu_without_mig_has_one_offer_and_no_fragmentation() -> None:
    plain = gpu_of("NVIDIA L40S")
    [only] = devices_of(plain, 3)
    assert only.name == "gpu-3"
    assert order_offers([only], {}) == [only]
    assert MEASURE.fragmentation(GpuState.of(plain)) == 0.0


def test_between_two_gpus_the_fuller_one_is_cut_first() -> None:
    other = gpu_of(H100, 1)
    offers = [device for gpu in (GPU, other) for device in devices_of(gpu, gpu.minor) if str(device.profile)]
    small = [d for d in offers if d.profile is not None and d.profile.name == "1g.10gb" and d.mask != 1 << 6]
    ordered = order_offers(small, {other.uuid: 1 << 6, GPU.uuid: 0})
    assert ordered[0].gpu is other


def clique_of(*held: str) -> tuple[GpuState, ...]:
    """Four GPUs, of which the first ones hold a partition each."""
    return tuple(GpuState.of(GPU, [EVERY[f"gpu-0-mig-{held[i]}"]] if i < len(held) else []) for i in range(4))


def best_growth(states: tuple[GpuState, ...], key: OfferKind) -> tuple[float, int]:
    best = RANKING.clique(tuple(RANKING.gpu(state) for state in states)).best(key)
    assert best is not None
    return best.terms.growth, best.position


def test_the_first_cut_into_a_whole_node_costs_more_than_any_cut_after_it() -> None:
    small = OfferKind(DeviceKind.PARTITION, "1g.10gb")
    whole, _ = best_growth(clique_of(), small)
    cut_elsewhere, position = best_growth(clique_of("7g80gb-0"), small)
    assert whole > cut_elsewhere + 2
    assert position > 0


def test_a_full_gpu_is_taken_from_a_node_that_is_cut_already() -> None:
    assert best_growth(clique_of("1g10gb-6"), FULL)[0] < best_growth(clique_of(), FULL)[0]


def test_shares_gather_on_the_gpu_that_is_shared_already() -> None:
    devices = {device.name: device for device in devices_of(GPU, 0, 4)}
    shared = GpuState.of(GPU, [devices["gpu-0-share-1"]], shares=4)
    _, position = best_growth((GpuState.of(GPU, shares=4), shared), SHARE)
    assert position == 1
    assert SHARE_CLASS in MEASURE.classes(shared)


def test_weights_decide_what_is_kept_free() -> None:
    three = OfferKind(DeviceKind.PARTITION, "3g.40gb")
    starts = []
    for kept in ("4g.40gb", "1g.10gb"):
        weights = dict.fromkeys(MEASURE.classes(FREE), 0.0) | {kept: 1.0}
        weighted = Ranking(Measure(weights))
        best = weighted.gpu(FREE).best(three)
        starts.append(best and best.at)
    assert starts == [4, 4]


@given(st.permutations(sorted(EVERY)))
def test_every_device_has_its_own_spot(names: list[str]) -> None:
    assert len({EVERY[name].spot for name in names}) == len(names)
    assert {EVERY[name].spot.kind for name in names} == set(FREE.offered()) - {SHARE}
