"""Slices: the API's rules hold whatever is held, and the counters admit exactly what the GPU admits."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driver.model.device import MOST_SHARES, Device, devices_of, merged, number_gpus, share_device, shared_device
from driver.model.gpu import Gpu, MigMode
from driver.model.gpu_settings import SharedProfiles
from driver.model.offer import OF_SEVERAL, DeviceKind
from driver.model.shared_memory import SHARING_FIELD, SharedMemory
from driver.placement.occupancy import GpuState, in_the_way
from driver.simulator.products import facts, find_product
from driver.slices.attributes import quantity
from driver.slices.build import (
    Content,
    PublishedGpu,
    SliceBuilder,
    counters_of_gpu,
    limited,
    slice_object,
)
from driver.slices.slice_names import DEVICES_PER_GPU, Pool
from kubelet_plugin.inventory.published_devices import ForeignPartitions, PublishableGpu, PublishPolicy
from tests.support.gpus import H100, MIB, gpu_of
from tests.support.published import build_slices
from tests.support.shared_gpus import shared_memory


def has_geometry(name: str) -> bool:
    product = find_product(name)
    return product is not None and bool(product.profiles)


PRODUCTS = sorted(row["product"] for row in facts("mig_geometry")["products"] if has_geometry(row["product"]))
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
POOL = Pool("node-a", "gpu.tessera.dev")

products = st.sampled_from([*PRODUCTS, "NVIDIA L40S"])
share_counts = st.sampled_from([0, 0, 2, 3, 10, MOST_SHARES])
shared_memories = st.sampled_from([None, shared_memory(79)])
PARTS = (1, 6, 40, 79)
"""GiB that claims have of a shared device."""


def claimable(gpu: Gpu, number: int, shares: int, shared: SharedMemory | None) -> list[Device]:
    """Everything that a claim can have of ``gpu``."""
    exclusive = devices_of(gpu, number, shares)
    return [*exclusive, *(shared_device(gpu, number, shared, gib) for gib in PARTS if shared is not None)]


def admitted(devices: list[Device]) -> list[Device]:
    """Those of ``devices`` that fit one after another."""
    taken: list[Device] = []
    for device in devices:
        if GpuState.of(device.gpu, taken).fits(device):
            taken.append(device)
    return taken


class Fleet(list[PublishedGpu]):
    """GPUs, told in one line where a test fails."""

    def __repr__(self) -> str:
        return repr({(e.gpu.product_name, e.number): [device.name for device in e.held] for e in self})


@st.composite
def held_gpus(draw: st.DrawFn, most: int = 9) -> Fleet:
    """GPUs of one product, with any legal set of devices held on each."""
    product = draw(products)
    numbers = draw(st.lists(st.integers(0, 30), min_size=1, max_size=most, unique=True))
    found = Fleet()
    for minor, number in enumerate(numbers):
        gpu = gpu_of(product, minor)
        shares, shared = draw(share_counts), draw(shared_memories)
        every = devices_of(gpu, number, shares, shared=shared)
        wanted = draw(st.lists(st.sampled_from(claimable(gpu, number, shares, shared)), max_size=8))
        held = merged(admitted(wanted))
        names = {device.name for device in held}
        offers = tuple(d for d in every if d.name not in names and GpuState.of(gpu, held).fits(d))
        entry = PublishedGpu(gpu, number, tuple(held), offers, divided=shares > 0 or shared is not None)
        chosen = limited(len(held), offers, entry.occupied)
        found.append(replace(entry, offers=tuple(device for device in offers if device.name in chosen)))
    return found


@settings(max_examples=40)
@given(held_gpus(most=5))
def test_every_rule_of_the_api_holds(gpus: Fleet) -> None:
    slices = build_slices(POOL, gpus)
    sets: dict[str, dict[str, Any]] = {}
    names: Counter[str] = Counter()
    offering = {POOL.device_slice(gpu.number, divided=gpu.divided) for gpu in gpus if gpu.is_offering}
    assert list(slices) == sorted(slices, key=lambda name: (name in offering, name))
    for name, content in slices.items():
        assert len(name) <= 253
        assert SUBDOMAIN.fullmatch(name)
        assert set(content) in ({"sharedCounters"}, {"devices"})
        assert len(content.get("sharedCounters", ())) <= 8
        for entry in content.get("sharedCounters", ()):
            assert LABEL.fullmatch(entry["name"])
            assert entry["name"] not in sets
            sets[entry["name"]] = entry["counters"]
            assert 1 <= len(entry["counters"]) <= 32
            assert all(LABEL.fullmatch(counter) for counter in entry["counters"])
    for content in slices.values():
        devices = content.get("devices", [])
        assert len(devices) <= 64
        names.update(device["name"] for device in devices)
        for device in devices:
            check_device(device, sets)
    assert not [name for name, count in names.items() if count > 1]
    assert {device.name for entry in gpus for device in entry.held} <= set(names)


def check_device(device: Content, sets: dict[str, dict[str, Any]]) -> None:
    assert LABEL.fullmatch(device["name"])
    assert len(device["attributes"]) + len(device.get("capacity", ())) <= 32
    for name, value in device["attributes"].items():
        [(kind, content)] = value.items()
        assert re.fullmatch(r"([a-z0-9.]+/)?[A-Za-z_][A-Za-z0-9_]{0,31}", name)
        assert kind in {"string", "int", "bool", "version"}
        if kind in {"string", "version"}:
            assert len(content) <= 64
        if kind == "version":
            assert VERSION.fullmatch(content)
    for amount_of in device.get("capacity", {}).values() if device.get(SHARING_FIELD) else ():
        assert amount_of["requestPolicy"]["default"], "the first claim would get all of a capacity without a policy"
    assert 1 <= len(device["consumesCounters"]) <= 2
    for consumed in device["consumesCounters"]:
        for counter, value in consumed["counters"].items():
            assert amount(value) <= amount(sets[consumed["counterSet"]][counter])


@given(held_gpus(most=3))
def test_a_device_says_the_same_held_or_offered_whatever_else_is_held(gpus: Fleet) -> None:
    every = [(entry, devices_of(entry.gpu, entry.number, shares_on(entry), shared=memory_of(entry))) for entry in gpus]
    # Alone on its GPU: beside all others some shares would have to wait.
    free = {d.name: described([replace(e, held=(), offers=(d,))])[d.name] for e, devices in every for d in devices}
    assert [name for name, device in described(gpus).items() if free[name] != device] == []


@given(products, st.sampled_from([0, 2, 10]), st.data())
def test_complete_slices_do_not_show_what_is_held(product: str, shares: int, data: st.DataObject) -> None:
    gpu = gpu_of(product)
    every = devices_of(gpu, 0, shares)

    def published(*prepared: Device) -> dict[str, Content]:
        mode = MigMode.ENABLED if any(device.profile for device in prepared) else gpu.mig_mode
        known = replace(gpu, mig_mode=mode) if gpu.toggles_freely else gpu
        renewed = [replace(device, gpu=known) for device in (*every, *prepared)]
        entry = PublishableGpu(
            known,
            0,
            renewed[: len(every)],
            prepared=tuple(renewed[len(every) :]),
            allocated=(),
            shares_only=False,
            foreign=ForeignPartitions(),
            reserved=False,
            fault=None,
            conditions=(),
        )
        return build_slices(POOL, [entry.published(PublishPolicy(complete=True))])

    names = {device["name"] for content in published().values() for device in content.get("devices", ())}
    possible = [device for device in every if device.name in names]
    held = admitted(data.draw(st.lists(st.sampled_from(possible), max_size=8, unique_by=lambda device: device.name)))
    assert published(*held) == published()


def shares_on(entry: PublishedGpu) -> int:
    return max((device.shares for device in (*entry.held, *entry.offers) if device.kind is DeviceKind.SHARE), default=0)


def memory_of(entry: PublishedGpu) -> SharedMemory | None:
    return next((device.shared for device in (*entry.held, *entry.offers) if device.shared is not None), None)


@given(products, share_counts, st.integers(0, 10))
def test_a_gpu_with_too_many_devices_lets_shares_wait_but_for_one(product: str, shares: int, published: int) -> None:
    every = devices_of(gpu_of(product, 0), 0, shares)
    chosen = limited(published, every, 0)
    offered = [device for device in every if device.name in chosen]
    left_out = [device for device in every if device.name not in chosen]
    assert len(offered) == min(len(every), DEVICES_PER_GPU - published)
    waits_too = any(device.kind is not DeviceKind.SHARE for device in left_out)
    assert not left_out or not shares or sum(device.kind is DeviceKind.SHARE for device in offered) >= 1
    assert not waits_too or sum(device.kind is DeviceKind.SHARE for device in offered) <= 1


def described(gpus: list[PublishedGpu]) -> dict[str, tuple[str, Content]]:
    """Every device by name, with the slice it is in."""
    found = build_slices(POOL, gpus).items()
    return {device["name"]: (name, device) for name, content in found for device in content.get("devices", ())}


@given(held_gpus())
def test_the_scheduler_meets_devices_of_gpus_that_have_shares_after_all_others(gpus: Fleet) -> None:
    divided = {entry.number: entry.divided for entry in gpus}
    contents = (content for _, content in sorted(build_slices(POOL, gpus).items()))  # as the scheduler does
    met = [divided[int(device["name"].split("-")[1])] for c in contents for device in c.get("devices", ())]
    assert met == sorted(met)


@given(held_gpus(most=4), st.data())
def test_building_from_memory_equals_building_from_nothing(gpus: Fleet, data: st.DataObject) -> None:
    builder = SliceBuilder(POOL)
    builder.build(gpus)
    one = data.draw(st.sampled_from(gpus))
    changed = [replace(e, held=()) if e is one else e for e in gpus]
    assert builder.build(changed) == build_slices(POOL, changed)
    assert builder.build(changed[1:]) == build_slices(POOL, changed[1:])


def counters_left(devices: list[Device], available: dict[str, Any]) -> dict[str, int]:
    """The counters without what all devices consume; a combination fits if none is negative.

    A shared device or partition consumes them once, however many claims have it.
    """
    left = {name: amount(value) for name, value in available.items()}
    shared = merged(device for device in devices if device.kind in OF_SEVERAL)
    for device in (*shared, *(device for device in devices if device.kind not in OF_SEVERAL)):
        entry = PublishedGpu(device.gpu, 0, (device,), ())
        [published] = [d for c in build_slices(POOL, [entry]).values() for d in c.get("devices", ())]
        for name, value in published["consumesCounters"][0]["counters"].items():
            left[name] -= amount(value)
    return left


def amount(value: dict[str, str]) -> int:
    match = re.fullmatch(r"(\d+)(Ki|Mi|Gi|Ti|Pi)?", value["value"])
    assert match is not None
    return int(match[1]) << 10 * ["", "Ki", "Mi", "Gi", "Ti", "Pi"].index(match[2] or "")


@given(products, st.data())
def test_the_scheduler_admits_exactly_what_fits_one_after_another(product: str, data: st.DataObject) -> None:
    profiles = SharedProfiles.parse(data.draw(st.sampled_from(["", "1c.3g.40gb,2c.4g.40gb", "1c.2g.12gb,1c.4g.24gb"])))
    gpu, shared = profiles.applied_to(gpu_of(product), {}), data.draw(shared_memories)
    every = claimable(gpu, 0, data.draw(share_counts), shared)
    few = data.draw(st.lists(st.sampled_from(every), min_size=1, max_size=4))
    drawn = data.draw(st.lists(st.sampled_from(few), max_size=8))
    exclusive = {device.name: device for device in drawn if device.kind not in OF_SEVERAL}
    devices = [*exclusive.values(), *(device for device in drawn if device.kind in OF_SEVERAL)]
    left = counters_left(devices, counters_of_gpu(gpu))
    has_memory = shared is None or sum(d.spot.at for d in devices if d.kind is DeviceKind.SHARED) <= shared.gib
    claims = Counter(device.spot for device in devices if device.kind is DeviceKind.SHARED_PARTITION)
    has_slices = all(count <= spot.kind.instances for spot, count in claims.items())
    fits = min(left.values()) >= 0 and has_memory and has_slices
    assert fits == (admitted(devices) == devices)
    assert not fits or not any(in_the_way(device, devices[:place]) for place, device in enumerate(devices))


@given(products, st.data())
def test_the_memory_of_devices_that_fit_together_never_exceeds_that_of_the_gpu(
    product: str, data: st.DataObject
) -> None:
    gpu = gpu_of(product)
    every = devices_of(gpu, 0, data.draw(share_counts))
    others = devices_of(gpu, 0, data.draw(share_counts))  # published before the number of shares changed
    fitting = admitted(data.draw(st.permutations([*every, *others])))
    left = counters_left(fitting, counters_of_gpu(gpu))
    assert left["memory"] >= 0
    if fitting[0].kind is DeviceKind.FULL:
        assert left["memory"] == 0


@pytest.mark.parametrize("product", [*PRODUCTS, "NVIDIA L40S"])
def test_a_partition_takes_its_capacity_of_memory_and_a_share_its_part(product: str) -> None:
    gpu = gpu_of(product)
    for device in devices_of(gpu, 0, 10):
        whole = amount(counters_of_gpu(gpu)["memory"])
        taken = whole - counters_left([device], counters_of_gpu(gpu))["memory"]
        if device.profile is not None:
            assert taken == device.profile.memory_bytes
        else:
            assert whole >= gpu.memory_bytes
            assert whole / device.shares - MIB < taken <= whole / device.shares


@given(products, st.lists(st.tuples(st.integers(0, MOST_SHARES - 1), st.integers(2, MOST_SHARES)), max_size=40))
def test_a_gpu_is_never_given_out_more_than_once_however_often_the_number_of_shares_changes(
    product: str, given_out: list[tuple[int, int]]
) -> None:
    gpu = gpu_of(product)
    taken: list[Device] = []
    for index, shares in given_out:
        share = share_device(gpu, 0, index % shares, shares)
        if GpuState.of(gpu, taken).fits(share) and share.name not in {held.name for held in taken}:
            taken.append(share)
    assert min(counters_left(taken, counters_of_gpu(gpu)).values()) >= 0
    assert sum(1 / share.shares for share in taken) <= 1.04
    for other in devices_of(gpu, 0):
        assert not taken or not GpuState.of(gpu, taken).fits(other)


@given(st.integers(0, 1 << 60))
def test_quantities_are_canonical_and_exact(number: int) -> None:
    match = re.fullmatch(r"(\d+)(Ki|Mi|Gi|Ti|Pi)?", quantity(number))
    assert match is not None
    power = ["", "Ki", "Mi", "Gi", "Ti", "Pi"].index(match[2] or "")
    assert int(match[1]) * 1024**power == number
    assert number == 0 or power == 5 or int(match[1]) % 1024


@given(st.lists(st.integers(0, 9), unique=True, max_size=8), st.dictionaries(st.integers(0, 9), st.integers(0, 9)))
def test_numbers_are_unique_and_held_ones_stay(minors: list[int], kept: dict[int, int]) -> None:
    by_uuid = {f"GPU-{minor}": number for minor, number in kept.items()}
    unique_kept = {uuid: number for uuid, number in by_uuid.items() if list(by_uuid.values()).count(number) == 1}
    numbers = number_gpus([gpu_of(H100, minor) for minor in minors], unique_kept)
    assert len(set(numbers.values())) == len(minors)
    assert all(numbers[uuid] == number for uuid, number in unique_kept.items() if uuid in numbers)
    gone = {number for uuid, number in unique_kept.items() if uuid not in numbers}
    assert not gone & set(numbers.values())


@pytest.mark.parametrize("driver", ["gpu.tessera.dev", "gpu.nvidia.com"])
@pytest.mark.parametrize("node", ["node-a", "ip-10-0-0-1.eu.internal", "n" * 200, "a" * 241 + ".b"])
def test_names_are_pinned_and_fit_the_api_for_every_node_name(node: str, driver: str) -> None:
    pool = Pool(node, driver)
    names = [pool.name, *(pool.counter_slice(number) for number in (0, 8)), *(pool.device_slice(n) for n in (0, 2))]
    assert len(set(names)) == 5
    assert all(len(name) <= 253 and SUBDOMAIN.fullmatch(name) for name in names)
    if len(node) < 60:
        assert pool.name == f"{node}-{driver}"
        assert pool.counter_slice(0) == f"00000-{node}-{driver}-counters"
        assert pool.device_slice(3) == f"00101-{node}-{driver}-devices"
        assert pool.device_slice(3, divided=True) == f"00501-{node}-{driver}-devices"


def test_a_slice_object_is_complete() -> None:
    made = slice_object("s", {"devices": []}, POOL, 3, 2, {"kind": "Node", "name": "node-a", "uid": "u"})
    assert made["metadata"] == {"name": "s", "ownerReferences": [{"kind": "Node", "name": "node-a", "uid": "u"}]}
    assert made["spec"] == {
        "driver": "gpu.tessera.dev",
        "nodeName": "node-a",
        "pool": {"name": "node-a-gpu.tessera.dev", "generation": 3, "resourceSliceCount": 2},
        "devices": [],
    }


def test_a_full_h100_takes_every_slice_and_only_media_extensions_are_limited_apart() -> None:
    counters = counters_of_gpu(gpu_of())
    slices = {f"memory-slice-{i}": {"value": "840"} for i in range(8)}
    assert counters == slices | {"ofa-engines": {"value": "1"}, "memory": {"value": "81559Mi"}}


def test_profiles_with_and_without_media_engines_get_different_names() -> None:
    gpu = gpu_of("NVIDIA RTX PRO 6000 Blackwell Server Edition")
    labels = {profile.name: profile.label for profile in gpu.profiles}
    assert labels["1g.24gb+me"] == "1g24gbme"
    assert labels["1g.24gb-me"] == "1g24gbnome"
    assert len(set(labels.values())) == len(labels)
