"""Advice on sizes: what would have fitted, and what can't be judged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from driver.model.reported_gpus import GpuReport
from driver.model.shared_memory import SharedMemory, SharingStrategy
from tessera.usage.advice import Advice, DeviceHistory, ProfileClass, advise, owner_of
from tessera.usage.peak_usage import parts_of
from tessera.usage.report import GpuOfNode, GpuSlices
from tests.support.gpus import gpu_of
from tests.support.usage_pages import GIB, H100

GPU = GpuOfNode("n", "gpu-0")
SIZES = (
    ("1g.10gb", 1, 1, 10),
    ("1g.20gb", 2, 1, 20),
    ("2g.20gb", 2, 2, 20),
    ("3g.40gb", 4, 3, 40),
    ("7g.80gb", 8, 7, 80),
)
GEOMETRY = [
    ProfileClass(f"gpu-inference-{profile.replace('.', '-')}", profile, slices, compute, memory * GIB)
    for profile, slices, compute, memory in SIZES
]
SHARED = SharedMemory(SharingStrategy.TIME_SLICING, 79 * GIB)
PARTS = parts_of([GpuReport(gpu_of(H100), 0, shared=SHARED)])
DAYS = DeviceHistory(
    "team-a", "serve-6b7f8c9d4f-x2x9z", "gpu-training", "none", GPU, 8, 8 * 72, 71, 72, memory=7 * GIB, sm=0.1, dram=0.1
)


def advice(*devices: DeviceHistory, margin: float = 0.2) -> Advice:
    [found] = advise(devices, {GPU: GpuSlices(H100, 8)}, {H100: GEOMETRY}, PARTS, margin)
    return found


@pytest.mark.parametrize(
    ("memory", "size"), [(3, "gpu-shared (4Gi)"), (0.1, "gpu-shared (1Gi)"), (15, "gpu-shared (18Gi)"), (17, None)]
)
def test_a_part_of_a_shared_gpu_is_compared_with_the_most_memory_that_was_used(memory: float, size: str | None) -> None:
    requested = next(part for part in PARTS[H100] if part.profile == "20Gi")
    slices = requested.slices
    part = replace(DAYS, device_class="gpu-shared", slices=slices, slice_hours=slices * 72, is_part=True)
    found = advice(replace(part, memory=memory * GIB, sm=None, dram=None))
    assert found.workload.profile == "20Gi"
    assert (found.best.device_class if found.best else None) == size


@pytest.mark.parametrize(
    ("pod", "owner"),
    [
        ("serve-6b7f8c9d4f-x2x9z", "serve"),
        ("agent-x2x9z", "agent"),
        ("db-0", "db"),
        ("train-3-x2x9z", "train"),
        ("nightly-29345678-x2x9z", "nightly"),
        ("notebook", "notebook"),
        ("my-notebook", "my-notebook"),
    ],
)
def test_pods_of_one_owner_are_one_workload(pod: str, owner: str) -> None:
    assert owner_of(pod) == owner


@pytest.mark.parametrize(
    ("memory", "sm", "dram", "profile"),
    [
        (7, 0.1, 0.1, "1g.10gb"),
        (9, 0.1, 0.1, "1g.20gb"),  # 9 GiB and 20 % are more than 10
        (7, 0.2, 0.1, "2g.20gb"),  # 0.2 x 7 compute slices are more than one
        (7, 0.1, 0.3, "3g.40gb"),  # 0.3 x 8 memory slices are more than two
        (7, None, None, "1g.10gb"),
        (70, 0.1, 0.1, None),
        (7, 0.9, 0.1, None),
    ],
)
def test_the_smallest_class_with_room_for_memory_and_activity_is_advised(
    memory: int, sm: float | None, dram: float | None, profile: str | None
) -> None:
    found = advice(replace(DAYS, memory=memory * GIB, sm=sm, dram=dram))
    assert (None if found.best is None else found.best.profile) == profile
    assert (found.refusal is None) == (profile is not None)


def test_the_greatest_use_of_all_pods_of_a_workload_counts() -> None:
    found = advice(DAYS, replace(DAYS, pod="serve-6b7f8c9d4f-b4c5d", memory=18 * GIB), replace(DAYS, sm=0.3))
    assert found.best is not None
    assert found.best.profile == "3g.40gb"
    assert found.memory == 18 * GIB
    assert found.activity == 0.3


def test_what_is_saved_are_the_slices_less_for_the_same_time() -> None:
    found = advice(DAYS)
    assert found.slice_hours == 8 * 72
    assert found.saved == pytest.approx(7 * 72)


def test_the_compute_of_a_partition_counts_as_part_of_the_partition() -> None:
    found = advice(replace(DAYS, profile="3g.40gb", slices=4, slice_hours=4 * 72, sm=0.6, dram=0.2))
    assert found.best is not None
    assert found.best.profile == "2g.20gb"


@pytest.mark.parametrize(
    ("device", "refusal"),
    [
        (replace(DAYS, age_hours=23), "only 23 h of data"),
        (replace(DAYS, measured_hours=60), "no measurement in 17 % of its time"),
        (replace(DAYS, memory=None), "its memory is unknown"),
        (replace(DAYS, gpu=GpuOfNode("n", "gpu-9")), "no partitions of its GPU are known"),
    ],
)
def test_what_can_not_be_judged_is_refused_with_the_reason(device: DeviceHistory, refusal: str) -> None:
    found = advice(device)
    assert found.best is None
    assert found.refusal is not None
    assert found.refusal.startswith(refusal)
    assert found.saved == 0


def test_what_saves_most_comes_first() -> None:
    small = replace(DAYS, pod="small", slice_hours=8 * 30, measured_hours=30)
    assert [
        each.workload.name for each in advise([small, DAYS], {GPU: GpuSlices(H100, 8)}, {H100: GEOMETRY}, PARTS, 0.2)
    ] == [
        "serve",
        "small",
    ]
