"""What the simulated H100 accepts and refuses: placements, capacity, ids, busy instances, MIG mode."""

from __future__ import annotations

from ctypes import byref, c_uint
from pathlib import Path
from typing import Any

import pynvml
import pytest

from driver.simulator import mig_rules
from driver.simulator.machine import Process, SimulatedGpuState
from driver.simulator.node import SimulatedNode
from driver.simulator.nvml import SimulatedNvml
from driver.simulator.products import facts, find_product
from tests.support.nvml_client import (
    G1,
    G1_DOUBLE,
    G1_ME,
    G2,
    G3,
    G4,
    G7,
    create,
    cut,
    enable_mig,
    gpu_instances,
    mig_uuids,
    one_h100,
    placements,
    process_on,
    profile_infos,
    profiles_by_name,
    remaining_capacity,
    remove,
    spanning_ci_profile,
    start_process,
)

H100 = next(row for row in facts("mig_geometry")["products"] if row["product"] == "NVIDIA H100 80GB HBM3")


@pytest.fixture
def node(tmp_path: Path) -> SimulatedNode:
    return one_h100(tmp_path)


@pytest.fixture
def nvml(node: SimulatedNode) -> SimulatedNvml:
    return node.nvml


@pytest.fixture
def gpu(nvml: SimulatedNvml) -> Any:
    """The GPU, MIG mode on."""
    return enable_mig(nvml)


def capacity(nvml: SimulatedNvml, gpu: Any) -> dict[int, int]:
    ids = [info.id for info in profile_infos(nvml, gpu)]
    product, state = nvml.machine.product, nvml.machine.gpu_state(nvml.nvmlDeviceGetMinorNumber(gpu))
    return {number: remaining_capacity(product, state, product.by_id[number]) for number in ids}


def refused(code: int) -> Any:
    return pytest.raises(pynvml.nvmlExceptionClass(code))


NO_ROOM = pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES


def test_geometry_is_the_facts(nvml: SimulatedNvml) -> None:
    gpu = nvml.nvmlDeviceGetHandleByIndex(0)
    told = {
        info.name: (info.id, info.sliceCount, info.instanceCount, info.multiprocessorCount, info.memorySizeMB)
        for info in profile_infos(nvml, gpu)
    }
    assert told == {
        f"MIG {row['name']}": (
            row["gi_profile_id"],
            row["slice_count"],
            row["max_instances"],
            row["multiprocessors"],
            row["memory_mb"],
        )
        for row in H100["profiles"]
    }
    for row in H100["profiles"]:
        expected = [(placement["start"], placement["size"]) for placement in row["placements"]]
        assert placements(nvml, gpu, row["gi_profile_id"]) == expected


def test_with_mig_off_geometry_is_known_but_nothing_can_be_made_or_listed(nvml: SimulatedNvml) -> None:
    gpu, count = nvml.nvmlDeviceGetHandleByIndex(0), c_uint()
    assert placements(nvml, gpu, G3) == [(0, 4), (4, 4)]
    for call in (
        lambda: create(nvml, gpu, G3, 0, 4),
        lambda: nvml.nvmlDeviceGetGpuInstances(gpu, G3, (pynvml.c_nvmlGpuInstance_t * 2)(), count),
        lambda: nvml.nvmlDeviceGetGpuInstanceById(gpu, 1),
    ):
        with refused(pynvml.NVML_ERROR_NOT_SUPPORTED):
            call()


def test_an_empty_gpu_has_the_capacity_that_the_facts_allow(nvml: SimulatedNvml, gpu: Any) -> None:
    assert capacity(nvml, gpu) == {row["gi_profile_id"]: row["max_instances"] for row in H100["profiles"]}


def test_capacity_shrinks_with_what_is_taken(nvml: SimulatedNvml, gpu: Any) -> None:
    create(nvml, gpu, G3, 4, 4)
    assert capacity(nvml, gpu) == {G1: 4, G1_ME: 1, G1_DOUBLE: 2, G2: 2, G3: 1, G4: 1, G7: 0}
    create(nvml, gpu, G1_ME, 0, 1)
    assert capacity(nvml, gpu) == {G1: 3, G1_ME: 0, G1_DOUBLE: 1, G2: 1, G3: 0, G4: 0, G7: 0}


@pytest.mark.parametrize(
    ("profile", "start", "size"),
    [(G3, 2, 4), (G3, 0, 3), (G4, 4, 4), (G2, 6, 2), (G1, 7, 1), (G7, 0, 7), (G1_DOUBLE, 1, 2), (99, 0, 1)],
)
def test_a_placement_or_profile_that_is_never_legal_is_an_invalid_argument(
    nvml: SimulatedNvml, gpu: Any, profile: int, start: int, size: int
) -> None:
    with refused(pynvml.NVML_ERROR_INVALID_ARGUMENT):
        create(nvml, gpu, profile, start, size)


def test_a_taken_placement_is_insufficient_resources(nvml: SimulatedNvml, gpu: Any) -> None:
    create(nvml, gpu, G2, 4, 2)
    for profile, start, size in ((G3, 4, 4), (G1, 5, 1), (G1_DOUBLE, 4, 2), (G7, 0, 8)):
        with refused(NO_ROOM):
            create(nvml, gpu, profile, start, size)
    create(nvml, gpu, G1_DOUBLE, 6, 2)


def test_there_is_one_instance_with_media_engines(nvml: SimulatedNvml, gpu: Any) -> None:
    create(nvml, gpu, G1_ME, 3, 1)
    with refused(NO_ROOM):
        create(nvml, gpu, G1_ME, 0, 1)
    create(nvml, gpu, G1, 0, 1)


def test_seven_single_slices_fill_the_gpu(nvml: SimulatedNvml, gpu: Any) -> None:
    for start in range(7):
        create(nvml, gpu, G1, start, 1)
    assert sorted(start for _, start, _ in gpu_instances(nvml, gpu).values()) == list(range(7))
    with refused(NO_ROOM):
        create(nvml, gpu, G1, 3, 1)


def test_an_id_says_nothing_about_where_its_instance_lies(nvml: SimulatedNvml, gpu: Any) -> None:
    upper = create(nvml, gpu, G3, 4, 4)
    first = nvml.nvmlGpuInstanceGetInfo(upper).id
    nvml.nvmlGpuInstanceDestroy(upper)
    assert nvml.nvmlGpuInstanceGetInfo(create(nvml, gpu, G3, 0, 4)).id == first
    assert nvml.nvmlGpuInstanceGetInfo(create(nvml, gpu, G3, 4, 4)).id != first


def test_cutting_the_same_placement_again_gives_another_uuid(nvml: SimulatedNvml, gpu: Any) -> None:
    first = cut(nvml, gpu, G3, 4, 4)
    remove(nvml, first)
    second = cut(nvml, gpu, G3, 4, 4)
    assert first.uuid.startswith("MIG-")
    assert first.uuid != second.uuid


def test_mig_device_indices_keep_their_gaps(nvml: SimulatedNvml, gpu: Any) -> None:
    cuts = [cut(nvml, gpu, G1, start, 1) for start in range(3)]
    remove(nvml, cuts[1])
    assert mig_uuids(nvml, gpu) == {0: cuts[0].uuid, 2: cuts[2].uuid}
    again = cut(nvml, gpu, G1, 5, 1)
    assert mig_uuids(nvml, gpu) == {0: cuts[0].uuid, 1: again.uuid, 2: cuts[2].uuid}


def test_a_gpu_instance_goes_after_its_compute_instances(nvml: SimulatedNvml, gpu: Any) -> None:
    partition = cut(nvml, gpu, G4, 0, 4)
    with refused(pynvml.NVML_ERROR_IN_USE):
        nvml.nvmlGpuInstanceDestroy(partition.gpu_instance)
    remove(nvml, partition)


def test_a_partition_with_a_process_is_in_use_until_the_process_ends(node: SimulatedNode, gpu: Any) -> None:
    nvml = node.nvml
    partition = cut(nvml, gpu, G3, 0, 4)
    with process_on(node, partition.uuid), refused(pynvml.NVML_ERROR_IN_USE):
        nvml.nvmlComputeInstanceDestroy(partition.compute_instance)
    remove(nvml, partition)


def test_compute_instances_share_a_gpu_instance(nvml: SimulatedNvml, gpu: Any) -> None:
    instance = create(nvml, gpu, G3, 0, 4)
    one, two = pynvml.NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE, pynvml.NVML_COMPUTE_INSTANCE_PROFILE_2_SLICE
    shared = pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
    info = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, one, shared)
    assert (info.name, info.instanceCount, info.multiprocessorCount) == ("MIG 1c.3g.40gb", 3, 16)

    first = nvml.nvmlGpuInstanceCreateComputeInstance(instance, one)
    second = nvml.nvmlGpuInstanceCreateComputeInstance(instance, one)
    ids = [nvml.nvmlComputeInstanceGetInfo_v2(handle).id for handle in (first, second)]
    assert ids == [0, 1]
    assert len(set(mig_uuids(nvml, gpu).values())) == 2
    with refused(NO_ROOM):
        nvml.nvmlGpuInstanceCreateComputeInstance(instance, two)

    handles, count = (pynvml.c_nvmlComputeInstance_t * 3)(), c_uint()
    nvml.nvmlGpuInstanceGetComputeInstances(instance, one, handles, byref(count))
    assert [nvml.nvmlComputeInstanceGetInfo_v2(handle).id for handle in handles[: count.value]] == ids
    by_id = nvml.nvmlGpuInstanceGetComputeInstanceById(instance, 1)
    assert nvml.nvmlComputeInstanceGetInfo_v2(by_id).placement.start == 1
    with refused(pynvml.NVML_ERROR_NOT_FOUND):
        nvml.nvmlGpuInstanceGetComputeInstanceById(instance, 5)


def test_a_compute_profile_larger_than_its_gpu_instance_is_refused(nvml: SimulatedNvml, gpu: Any) -> None:
    instance, seven = create(nvml, gpu, G2, 0, 2), pynvml.NVML_COMPUTE_INSTANCE_PROFILE_7_SLICE
    with refused(pynvml.NVML_ERROR_INVALID_ARGUMENT):
        nvml.nvmlGpuInstanceCreateComputeInstance(instance, seven)
    with refused(pynvml.NVML_ERROR_NOT_SUPPORTED):
        nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, seven, 0)
    with refused(pynvml.NVML_ERROR_INVALID_ARGUMENT):
        nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, 1, 1)


def test_management_calls_refuse_a_mig_devices_handle(nvml: SimulatedNvml, gpu: Any) -> None:
    device = nvml.nvmlDeviceGetHandleByUUID(cut(nvml, gpu, G7, 0, 8).uuid)
    with refused(pynvml.NVML_ERROR_INVALID_ARGUMENT):
        nvml.nvmlDeviceGetMigMode(device)
    with refused(pynvml.NVML_ERROR_NOT_SUPPORTED):
        nvml.nvmlDeviceGetPciInfo(device)


def test_hopper_toggles_at_once(nvml: SimulatedNvml) -> None:
    gpu = nvml.nvmlDeviceGetHandleByIndex(0)
    assert nvml.nvmlDeviceGetMigMode(gpu) == [0, 0]
    assert nvml.nvmlDeviceSetMigMode(gpu, 1) == pynvml.NVML_SUCCESS
    assert nvml.nvmlDeviceGetMigMode(gpu) == [1, 1]
    assert nvml.nvmlDeviceSetMigMode(gpu, 0) == pynvml.NVML_SUCCESS
    assert nvml.nvmlDeviceGetMigMode(gpu) == [0, 0]


def test_mig_mode_stays_on_while_instances_exist(nvml: SimulatedNvml, gpu: Any) -> None:
    instance = create(nvml, gpu, G1, 0, 1)
    with refused(pynvml.NVML_ERROR_IN_USE):
        nvml.nvmlDeviceSetMigMode(gpu, 0)
    assert nvml.nvmlDeviceGetMigMode(gpu) == [1, 1]
    nvml.nvmlGpuInstanceDestroy(instance)
    assert nvml.nvmlDeviceSetMigMode(gpu, 0) == pynvml.NVML_SUCCESS


def test_a_gpu_somebody_uses_says_in_use_in_the_status_not_the_return_code(node: SimulatedNode) -> None:
    nvml, gpu = node.nvml, node.nvml.nvmlDeviceGetHandleByIndex(0)
    with process_on(node, nvml.nvmlDeviceGetUUID(gpu)):
        assert nvml.nvmlDeviceSetMigMode(gpu, 1) == pynvml.NVML_ERROR_IN_USE
        assert nvml.nvmlDeviceGetMigMode(gpu) == [0, 1]
    assert nvml.nvmlDeviceSetMigMode(gpu, 1) == pynvml.NVML_SUCCESS
    assert nvml.nvmlDeviceGetMigMode(gpu) == [1, 1]


def test_ampere_needs_a_reset_and_keeps_its_mode_over_a_reboot() -> None:
    a100 = find_product("NVIDIA A100-SXM4-80GB")
    assert a100 is not None
    waiting, status = mig_rules.switch_mode(a100, SimulatedGpuState(), True)
    assert (status, waiting.mig_enabled, waiting.mig_pending) == (pynvml.NVML_ERROR_RESET_REQUIRED, False, True)
    assert mig_rules.reset(waiting).mig_enabled
    assert mig_rules.reboot(a100, waiting).mig_enabled
    withdrawn, status = mig_rules.switch_mode(a100, waiting, False)
    assert (status, withdrawn) == (pynvml.NVML_SUCCESS, SimulatedGpuState())


def test_a_gpu_somebody_uses_is_not_reset() -> None:
    with refused(pynvml.NVML_ERROR_IN_USE):
        mig_rules.reset(SimulatedGpuState(processes=(Process(1, 0),)))


def test_a_product_without_mig_does_not_support_it() -> None:
    t4 = find_product("Tesla T4")
    assert t4 is not None
    with refused(pynvml.NVML_ERROR_NOT_SUPPORTED):
        mig_rules.switch_mode(t4, SimulatedGpuState(), True)


def test_all_media_engines_leave_room_only_for_instances_without() -> None:
    product = find_product("NVIDIA RTX PRO 6000 Blackwell Server Edition")
    assert product is not None
    everything, without, plain = (
        profiles_by_name(product)[name] for name in ("1g.24gb+me.all", "1g.24gb-me", "1g.24gb")
    )
    state, _ = mig_rules.create_gpu_instance(
        product, SimulatedGpuState(mig_enabled=True), everything.id, (0, everything.size)
    )
    assert remaining_capacity(product, state, plain) == 0
    assert remaining_capacity(product, state, everything) == 0
    assert remaining_capacity(product, state, without) == 3


def test_a_reboot_clears_instances_and_hoppers_mig_mode(node: SimulatedNode, gpu: Any) -> None:
    nvml, boot_id = node.nvml, node.root / "proc/sys/kernel/random/boot_id"
    partition, before = cut(nvml, gpu, G3, 0, 4), boot_id.read_text()
    start_process(node, partition.uuid, pid=7)
    node.reboot()
    assert nvml.nvmlDeviceGetMigMode(gpu) == [0, 0]
    assert boot_id.read_text() != before
    enable_mig(nvml)
    assert gpu_instances(nvml, gpu) == {}


def test_a_reset_keeps_hoppers_mig_mode_but_no_instance(node: SimulatedNode, gpu: Any) -> None:
    cut(node.nvml, gpu, G3, 0, 4)
    node.reset_gpu(0)
    assert node.nvml.nvmlDeviceGetMigMode(gpu) == [1, 1]
    assert gpu_instances(node.nvml, gpu) == {}


def test_profiles_of_each_known_product_fit_alone() -> None:
    names = [row["product"] for row in facts("mig_geometry")["products"]]
    products = [product for name in names if (product := find_product(name)) and product.profiles]
    assert len(products) > 10
    for product in products:
        for profile in product.profiles:
            state = SimulatedGpuState(mig_enabled=True)
            assert remaining_capacity(product, state, profile) == profile.max_instances, (
                product.name,
                profile,
            )
            for _ in range(profile.max_instances):
                place = (mig_rules.free_starts(product, state, profile)[0], profile.size)
                state, instance = mig_rules.create_gpu_instance(product, state, profile.id, place)
                state, _ = mig_rules.create_compute_instance(product, state, instance, profile.whole_ci_profile)
            assert len({gi.id for gi in state.instances}) == profile.max_instances


def test_a_client_of_the_real_module_cuts_finds_and_removes_a_partition(tmp_path: Path) -> None:
    nvml = one_h100(tmp_path).nvml
    device = enable_mig(nvml)
    partition = cut(nvml, device, G3, 4, 4)

    assert list(gpu_instances(nvml, device).values()) == [(G3, 4, 4)]
    assert mig_uuids(nvml, device) == {0: partition.uuid}
    mig = nvml.nvmlDeviceGetHandleByUUID(partition.uuid)
    assert nvml.nvmlDeviceGetUUID(mig) == partition.uuid

    remove(nvml, partition)
    assert gpu_instances(nvml, device) == {}
    assert mig_uuids(nvml, device) == {}


def test_the_double_memory_slice_needs_its_own_compute_profile(tmp_path: Path) -> None:
    nvml = one_h100(tmp_path).nvml
    device = enable_mig(nvml)
    instance = create(nvml, device, G1_DOUBLE, 6, 2)
    assert spanning_ci_profile(nvml, device, instance) == nvml.NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1
