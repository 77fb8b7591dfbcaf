"""Random cutting: the simulated GPU accepts exactly what the oracle rule of the facts allows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pynvml
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driver.simulator import mig_rules
from driver.simulator.machine import SimulatedGpuState
from driver.simulator.products import Product, facts, find_product, product_names

PRODUCTS = [name for name in product_names() if (product := find_product(name)) and product.profiles]

anytime = settings(deadline=None, max_examples=60)
"""A busy machine is no reason to fail."""


def rows(product: str) -> list[dict[str, Any]]:
    """The profiles of the facts, found another way than the simulator finds them: by profile names."""
    names = [profile.name for profile in known(product).profiles]
    found = (row["profiles"] for row in facts("mig_geometry")["products"] if "profiles" in row)
    return next(profiles for profiles in found if [profile["name"] for profile in profiles] == names)


def fits(instances: list[tuple[dict[str, Any], int, int]]) -> bool:
    """The oracle: disjoint ranges, each profile's cap, one +me, ALL_ME only beside NO_ME."""
    slices = [part for _, start, size in instances for part in range(start, start + size)]
    names = [row["name"] for row, _, _ in instances]
    caps = {row["name"]: row["max_instances"] for row, _, _ in instances}
    media = [name.rpartition("gb")[2] for name in names]
    alone = "+me.all" not in media or (media.count("+me.all") == 1 and set(media) <= {"+me.all", "-me"})
    return (
        len(slices) == len(set(slices))
        and all(count <= caps[name] for name, count in Counter(names).items())
        and media.count("+me") <= 1
        and alone
    )


def known(name: str) -> Product:
    product = find_product(name)
    assert product is not None
    return product


@pytest.mark.parametrize("name", PRODUCTS)
@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_a_cut_is_accepted_exactly_when_the_result_fits(name: str, data: st.DataObject) -> None:
    product = known(name)
    every = [(row, p["start"], p["size"]) for row in rows(name) for p in row["placements"]]
    state = SimulatedGpuState(mig_enabled=True)
    present: dict[int, tuple[dict[str, Any], int, int]] = {}
    for _ in range(data.draw(st.integers(1, 15))):
        if present and data.draw(st.integers(0, 3)) == 0:
            serial = data.draw(st.sampled_from(sorted(present)))
            state = mig_rules.destroy_gpu_instance(state, next(gi for gi in state.instances if gi.serial == serial))
            del present[serial]
            continue
        row, start, size = data.draw(st.sampled_from(every))
        allowed = fits([*present.values(), (row, start, size)])
        before = state
        try:
            state, created = mig_rules.create_gpu_instance(product, state, row["gi_profile_id"], (start, size))
        except pynvml.NVMLError_InsufficientResources:
            assert not allowed
            assert state == before
        else:
            assert allowed
            present[created.serial] = (row, start, size)
        assert len({gi.id for gi in state.instances}) == len(present)


@anytime
@given(st.sampled_from(PRODUCTS), st.data())
def test_compute_instances_never_overlap_or_exceed_their_gpu_instance(name: str, data: st.DataObject) -> None:
    product = known(name)
    profile = data.draw(st.sampled_from(product.profiles))
    place = (profile.starts[0], profile.size)
    state, instance = mig_rules.create_gpu_instance(product, SimulatedGpuState(mig_enabled=True), profile.id, place)
    choices = sorted(mig_rules.compute_profiles(product, profile))
    for number in data.draw(st.lists(st.sampled_from(choices), max_size=10)):
        try:
            state, _ = mig_rules.create_compute_instance(product, state, state.instances[0], number)
        except pynvml.NVMLError_InsufficientResources:
            continue
    compute = state.instances[0].compute
    slices = [part for ci in compute for part in range(ci.start, ci.start + ci.size)]
    assert len(slices) == len(set(slices))
    assert set(slices) <= set(range(profile.slices))
    assert len({ci.id for ci in compute}) == len({ci.index for ci in compute}) == len(compute)
    assert instance.profile == profile.id


@pytest.mark.parametrize("name", PRODUCTS)
def test_no_set_of_instances_has_more_memory_or_multiprocessors_than_the_gpu(name: str) -> None:
    product = known(name)
    for profile in product.profiles:
        state, instances = SimulatedGpuState(mig_enabled=True), []
        for wanted in [profile, *sorted(product.profiles, key=lambda p: (-p.size, -p.multiprocessors))]:
            for start in mig_rules.free_starts(product, state, wanted):
                if start in mig_rules.free_starts(product, state, wanted):
                    state, created = mig_rules.create_gpu_instance(product, state, wanted.id, (start, wanted.size))
                    instances.append((wanted, created.start))
        assert sum(p.memory_at(start) for p, start in instances) <= product.memory_mib
        assert sum(p.multiprocessors for p, _ in instances) <= product.multiprocessors
