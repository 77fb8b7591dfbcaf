"""The smallest partition, or part of a shared GPU, into which a workload would have fitted, by its peak (pure)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import NamedTuple

from tessera.usage.report import GpuOfNode, GpuSlices

MIN_HOURS = 24.0
"""A workload is judged after a day: less says nothing of what it needs at other times of the day."""
MAX_GAP = 0.1
"""Greatest part of its time in which a workload may have no measurement."""

WHOLE = "none"
"""Value of the label ``profile`` of what is no partition."""

SAFE = "[bcdfghjklmnpqrstvwxz2456789]"
GENERATED = re.compile(rf"(.+)-{SAFE}{{5}}")
HASH = re.compile(rf"(.+)-{SAFE}{{8,10}}")
ORDINAL = re.compile(r"(.+)-[0-9]+")
"""What Kubernetes adds to the names of pods: of Jobs and ReplicaSets; to those of ReplicaSets; of StatefulSets,
indexed Jobs and the Jobs of CronJobs."""


class ProfileClass(NamedTuple):
    """A profile of a product with a class of its own, or an amount of a shared GPU's memory."""

    device_class: str
    profile: str
    slices: float
    compute_slices: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceHistory:
    """A device of a claim in the period: the most it used, and how long it was prepared, measured, and first seen ago.

    None: never known. Activities are parts of the device. ``is_part``: of a shared GPU's memory.
    """

    namespace: str
    pod: str
    device_class: str
    profile: str
    gpu: GpuOfNode
    slices: float
    slice_hours: float
    measured_hours: float
    age_hours: float
    memory: float | None = None
    sm: float | None = None
    dram: float | None = None
    is_part: bool = False

    @property
    def hours(self) -> float:
        return self.slice_hours / self.slices


class Workload(NamedTuple):
    """What is judged together: devices of one size that pods of one owner have."""

    namespace: str
    name: str
    device_class: str
    profile: str
    slices: float
    product: str


@dataclass(frozen=True, slots=True)
class Advice:
    """The result for a workload: the smallest class that fits, or ``refusal``, the reason why there is none.

    ``saved``: slice-hours less in the period. ``activity`` None: unknown, so that the class is chosen by memory only.
    """

    workload: Workload
    memory: float | None
    activity: float | None
    slice_hours: float
    best: ProfileClass | None = None
    refusal: str | None = None

    @property
    def saved(self) -> float:
        if self.best is None:
            return 0.0
        return self.slice_hours * (1 - self.best.slices / self.workload.slices)


def owner_of(pod: str) -> str:
    """The name of the workload: the pod's name without what Kubernetes adds to that of its owner.

    Owners of pods that have ended can't be read from the API server any more.
    """
    if (generated := GENERATED.fullmatch(pod)) is not None:
        pod = generated[1]
        if (hashed := HASH.fullmatch(pod)) is not None:
            return hashed[1]
    ordinal = ORDINAL.fullmatch(pod)
    return pod if ordinal is None else ordinal[1]


def advise(
    devices: Iterable[DeviceHistory],
    gpus: Mapping[GpuOfNode, GpuSlices],
    geometries: Mapping[str, Sequence[ProfileClass]],
    parts: Mapping[str, Sequence[ProfileClass]],
    margin: float,
) -> list[Advice]:
    """Advice for each workload, what saves most first.

    ``geometries``: the profiles of each product, ``parts`` what claims can have of a shared GPU. ``margin``: room above
    the most that was used, 0.2 for 20 %.
    """
    groups: dict[Workload, list[DeviceHistory]] = defaultdict(list)
    for device in devices:
        gpu, profile = gpus.get(device.gpu), device.profile
        product = "" if gpu is None else gpu.product
        if device.is_part and product in parts:
            profile = min(parts[product], key=lambda part: abs(part.slices - device.slices)).profile
        kind = device.device_class, profile, device.slices
        groups[Workload(device.namespace, owner_of(device.pod), *kind, product)].append(device)
    advices = [
        _advice(workload, group, (parts if group[0].is_part else geometries).get(workload.product, ()), margin)
        for workload, group in groups.items()
    ]
    return sorted(advices, key=lambda each: (-each.saved, -each.slice_hours, each.workload))


def _advice(
    workload: Workload, devices: Sequence[DeviceHistory], candidates: Sequence[ProfileClass], margin: float
) -> Advice:
    memory = max((device.memory for device in devices if device.memory is not None), default=None)
    sm = max((device.sm for device in devices if device.sm is not None), default=None)
    dram = max((device.dram for device in devices if device.dram is not None), default=None)
    activity = max((ratio for ratio in (sm, dram) if ratio is not None), default=None)
    advice = Advice(workload, memory, activity, fsum(device.slice_hours for device in devices))
    if (refusal := _refusal(devices, candidates, workload)) is not None or memory is None:
        return replace(advice, refusal=refusal or "its memory is unknown")
    compute_slices = {candidate.profile: candidate.compute_slices for candidate in candidates}
    compute = compute_slices.get(workload.profile, max(compute_slices.values())) * (sm or 0.0)
    fitting = [
        candidate
        for candidate in candidates
        if candidate.slices < workload.slices
        and candidate.memory_bytes >= memory * (1 + margin)
        and candidate.compute_slices >= compute
        and candidate.slices >= workload.slices * (dram or 0.0)
    ]
    if not fitting:
        return replace(advice, refusal="it has the smallest class that fits")
    return replace(advice, best=min(fitting, key=lambda each: (each.slices, each.compute_slices, each.profile)))


def _refusal(devices: Sequence[DeviceHistory], candidates: Sequence[ProfileClass], workload: Workload) -> str | None:
    """Why a workload can't be judged."""
    age = max(device.age_hours for device in devices)
    prepared = fsum(device.hours for device in devices)
    gap = 1 - fsum(device.measured_hours for device in devices) / prepared if prepared > 0 else 1.0
    if age < MIN_HOURS:
        return f"only {age:.0f} h of data; {MIN_HOURS:.0f} h are needed"
    if gap > MAX_GAP:
        return f"no measurement in {gap * 100:.0f} % of its time; at most {MAX_GAP * 100:.0f} % may lack"
    if not candidates:
        return f"no partitions of {workload.product or 'its GPU'} are known"
    return None
