"""GPUs by the names that people use, and the faults that nodes report of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from driver.clock import read_time
from driver.errors import UsageError
from driver.kube.slice_types import ResourceSlice, SliceDevice
from driver.kube.types import GpuNodePlan
from driver.model.gpu_events_and_conditions import ConditionType
from driver.model.plan import ClearedFaults
from driver.slices.build import UNHEALTHY
from tessera.gpu_sources import readable_reports

NUMBER_IN_NAME = re.compile(r"gpu-(\d+)(?:-|$)")

SUGGESTIONS = 3


@dataclass(frozen=True, slots=True)
class GpuName:
    """A GPU by node, by the number in its device names, and by UUID."""

    node: str
    number: int
    uuid: str

    def __str__(self) -> str:
        return f"{self.node}/gpu-{self.number}"

    def has(self, device: str) -> bool:
        """Whether the device of that name, of its node, is the GPU or a part of it."""
        number = NUMBER_IN_NAME.match(device)
        return number is not None and int(number[1]) == self.number


@dataclass(frozen=True, slots=True)
class ReportedFault:
    """A fault that a node reports of a GPU; ``stamp`` is None if an operator can't clear it."""

    value: str
    stamp: int | None


def names_of(slices: Iterable[ResourceSlice], plans: Iterable[GpuNodePlan]) -> list[GpuName]:
    """All GPUs: by published devices, and by plans for GPUs without a published device."""
    names = {}
    for plan in plans:
        node = plan.metadata.name
        for state in readable_reports(plan):
            names[node, state.gpu.uuid] = GpuName(node, state.number, state.gpu.uuid)
    for node, device in _devices(slices):
        uuid, number = device.gpu_uuid, NUMBER_IN_NAME.match(device.name)
        if uuid is not None and number is not None:
            names[node, uuid] = GpuName(node, int(number[1]), uuid)
    return sorted(names.values(), key=lambda name: (name.node, name.number))


def find(text: str, names: Sequence[GpuName]) -> GpuName:
    """The GPU with the name ``text``: a UUID or NODE/gpu-N. Raises UsageError with the nearest names.

    A UUID that several nodes report is refused, because the cordon of one GPU must not end up on another node.
    """
    same = [str(name) for name in names if name.uuid == text]
    if len(same) > 1:
        raise UsageError(f"GPU {text!r}: several nodes have a GPU with this UUID: {', '.join(same)}; name one of these")
    spelled = {spelling: name for name in names for spelling in (str(name), name.uuid)}
    if text in spelled:
        return spelled[text]
    near = get_close_matches(text, spelled, SUGGESTIONS, cutoff=0.3) or list(map(str, names))[:SUGGESTIONS]
    hint = ", ".join(dict.fromkeys(f"{spelled[spelling]} ({spelled[spelling].uuid})" for spelling in near))
    nearest = f"nearest: {hint}" if hint else "no node reports a GPU: check that a node plugin runs, and --driver-name"
    raise UsageError(f"GPU {text!r}: no GPU has this name; accepted: a UUID (GPU-...) or NODE/gpu-N; {nearest}")


def faults_of(name: GpuName, slices: Iterable[ResourceSlice], plan: GpuNodePlan | None) -> list[ReportedFault]:
    """Faults of a GPU, by the taints of its devices and by the plan's status."""
    faults = set()
    for node, device in _devices(slices):
        if node == name.node and device.gpu_uuid == name.uuid:
            taints = (taint for taint in device.taints if taint.key == UNHEALTHY)
            faults |= {_fault(taint.value, read_time(taint.time_added)) for taint in taints}
    for text in plan.status.faults if plan else ():
        parsed = ClearedFaults.parse(text)
        if parsed is not None and parsed.gpu == name.uuid:
            words = text.split(" ", 3)
            faults.add(_fault(words[2].rstrip(":") if len(words) > 2 else "unknown", parsed.stamp))
    return sorted(faults, key=lambda fault: (fault.stamp or 0, fault.value))


def _fault(value: str, stamp: int | None) -> ReportedFault:
    return ReportedFault(value, None if value in set(ConditionType) else stamp)


def _devices(slices: Iterable[ResourceSlice]) -> Iterable[tuple[str, SliceDevice]]:
    for item in slices:
        for device in item.spec.devices:
            yield item.spec.node_name, device
