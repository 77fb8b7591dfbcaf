"""The most that devices of claims used in a period, from Prometheus; the partitions of products, from plans."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from deviceclasses.chart_classes import SHARED_GPU, profile_classes
from driver.model.reported_gpus import GpuReport
from driver.model.shared_memory import GIB
from tessera.usage.advice import DeviceHistory, ProfileClass
from tessera.usage.prometheus import ALLOCATED_METRIC, HOUR, Prometheus, growth
from tessera.usage.report import GpuOfNode

HISTORY_LABELS = ("namespace", "pod", "claim", "class", "profile", "device", "gpu", "node")
JUDGED = '{pod!="",device!~".*-share-[0-9]+"}'
"""Devices of a claim of several pods belong to no workload; equal shares have no memory of their own."""
PART_OF_GPU = re.compile(r"gpu-\d+-shared\b.*")
"""What a claim has of a shared GPU, whose activity is that of the GPU."""

MOMENTS = 1440
"""How often in a period it is looked whether a device was measured: every 7 minutes of a week."""
SHORTEST_STEP_SECONDS = 60

SLICES_METRIC, MEMORY_METRIC = "tessera_claim_slices", "tessera_claim_memory_used_bytes"
SM_METRIC, DRAM_METRIC = "tessera_claim_sm_active_ratio", "tessera_claim_dram_active_ratio"

PLAIN_PROFILE = re.compile(r"\d+g\.\d+gb")


def read_history(prometheus: Prometheus, seconds: float) -> list[DeviceHistory]:
    """The devices of all claims of single pods. Raises EnvironmentFault and FatalError."""
    period, step = f"{seconds:.0f}s", max(round(seconds / MOMENTS), SHORTEST_STEP_SECONDS)
    by = f"max by ({', '.join(HISTORY_LABELS)})"

    def read(expression: str) -> Mapping[tuple[str, ...], float]:
        samples = prometheus.query(expression)
        return {tuple(labels.get(label, "") for label in HISTORY_LABELS): value for labels, value in samples}

    def most(metric: str) -> Mapping[tuple[str, ...], float]:
        return read(f"{by} (max_over_time({metric}{JUDGED}[{period}]))")

    memory, sm, dram, slices = most(MEMORY_METRIC), most(SM_METRIC), most(DRAM_METRIC), most(SLICES_METRIC)
    measured = read(f"{by} (count_over_time({MEMORY_METRIC}{JUDGED}[{period}:{step}s]))")
    age = read(f"{by} (time() - min_over_time(timestamp({SLICES_METRIC}{JUDGED})[{period}:{step}s]))")
    growths = prometheus.query(growth(ALLOCATED_METRIC, seconds))  # its labels are without the pod
    names = [label for label in HISTORY_LABELS if label != "pod"]
    allocated = {tuple(labels.get(name, "") for name in names): value / HOUR for labels, value in growths}
    return [
        DeviceHistory(
            namespace=key[0],
            pod=key[1],
            device_class=key[3],
            profile=key[4],
            gpu=GpuOfNode(key[7], key[6]),
            slices=held_slices,
            slice_hours=allocated.get((key[0], *key[2:]), 0.0),
            measured_hours=measured.get(key, 0.0) * step / HOUR,
            age_hours=age.get(key, 0.0) / HOUR,
            memory=memory.get(key),
            sm=None if is_part else sm.get(key),
            dram=None if is_part else dram.get(key),
            is_part=is_part,
        )
        for key, held_slices in slices.items()
        for is_part in (PART_OF_GPU.fullmatch(key[5]) is not None,)
        if held_slices > 0
    ]


def parts_of(reports: Iterable[GpuReport]) -> dict[str, list[ProfileClass]]:
    """The amounts of memory that a claim can have of a shared GPU, by product."""
    products = {report.gpu.product_name: report for report in reports if report.shared is not None}
    return {
        product: [
            ProfileClass(
                f"{SHARED_GPU} ({gib}Gi)",
                f"{gib}Gi",
                report.gpu.memory_slices * gib * GIB / report.gpu.memory_bytes,
                0,
                gib * GIB,
            )
            for gib in range(1, (report.shared.gib if report.shared is not None else 0) + 1)
        ]
        for product, report in products.items()
    }


def geometries_of(reports: Iterable[GpuReport]) -> dict[str, list[ProfileClass]]:
    """The partitions for which the chart has a class, by product."""
    products, classes = {}, profile_classes()
    for gpu in {report.gpu.product_name: report.gpu for report in reports}.values():
        products[gpu.product_name] = [
            ProfileClass(
                classes[profile.name],
                profile.name,
                profile.placements[0].size,
                profile.compute_slices,
                profile.memory_bytes,
            )
            for profile in gpu.profiles
            if PLAIN_PROFILE.fullmatch(profile.name) and profile.name in classes and profile.placements
        ]
    return products
