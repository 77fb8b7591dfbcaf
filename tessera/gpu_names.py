"""Finding the GPU that somebody means, among those that the cluster's nodes tell of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from driver.errors import StateError, UsageError
from driver.kube.plans import GpuNodePlan
from driver.model.health import Trouble, read_time
from driver.model.plan import ClearedFaults
from driver.model.plan_gpus import states_of
from driver.slices.build import UNHEALTHY

NUMBER = re.compile(r"gpu-(\d+)(?:-|$)")

SHOWN = 3
"""Names that an error suggests."""


@dataclass(frozen=True, slots=True)
class GpuName:
    """A GPU by node, by the number in its device names, and by UUID."""

    node: str
    number: int
    uuid: str

    def __str__(self) -> str:
        return f"{self.node}/gpu-{self.number}"


@dataclass(frozen=True, slots=True)
class Fault:
    """What a node says is wrong with a GPU; ``stamp`` is None where no operator can clear it."""

    value: str
    stamp: int | None


def names_of(slices: Iterable[Mapping[str, Any]], plans: Iterable[GpuNodePlan]) -> list[GpuName]:
    """Every GPU: by what is published, and by plans, for one on which nothing is published at present."""
    found = {}
    for plan in plans:
        for state in _states(plan):
            found[state.gpu.uuid] = GpuName(plan.metadata.name, state.number, state.gpu.uuid)
    for node, device in _devices(slices):
        uuid, number = _uuid(device), NUMBER.match(device["name"])
        if uuid is not None and number is not None:
            found[uuid] = GpuName(node, int(number[1]), uuid)
    return sorted(found.values(), key=lambda name: (name.node, name.number))


def find(text: str, names: Sequence[GpuName]) -> GpuName:
    """The GPU called ``text``: a UUID or NODE/gpu-N. Raises UsageError with the nearest names there are."""
    spelled = {spelling: name for name in names for spelling in (str(name), name.uuid)}
    if text in spelled:
        return spelled[text]
    near = get_close_matches(text, spelled, SHOWN, cutoff=0.3) or list(map(str, names))[:SHOWN]
    hint = ", ".join(dict.fromkeys(f"{spelled[each]} ({spelled[each].uuid})" for each in near))
    there = f"nearest: {hint}" if hint else "no node tells of any GPU: does a node plugin run, is --driver-name right?"
    raise UsageError(f"GPU {text!r}: there is none of this name; accepted: a UUID (GPU-...) or NODE/gpu-N; {there}")


def faults_of(name: GpuName, slices: Iterable[Mapping[str, Any]], plan: GpuNodePlan | None) -> list[Fault]:
    """What is wrong with a GPU, by the taints of its devices and by what its node wrote in the plan."""
    found = set()
    for node, device in _devices(slices):
        if node == name.node and _uuid(device) == name.uuid:
            taints = (taint for taint in device.get("taints") or () if taint["key"] == UNHEALTHY)
            found |= {_told(taint.get("value", ""), read_time(taint.get("timeAdded", ""))) for taint in taints}
    for text in plan.status.faults if plan else ():
        told = ClearedFaults.parse(text)
        if told is not None and told.gpu == name.uuid:
            found.add(_told(text.split(" ")[2].rstrip(":"), told.stamp))
    return sorted(found, key=lambda fault: (fault.stamp or 0, fault.value))


def _told(value: str, stamp: int | None) -> Fault:
    return Fault(value, None if value in set(Trouble) else stamp)


def _states(plan: GpuNodePlan) -> Sequence[Any]:
    try:
        return states_of(plan.status.inventory)
    except StateError:
        return ()


def _devices(slices: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    for item in slices:
        for device in item["spec"].get("devices") or ():
            yield item["spec"].get("nodeName", ""), device


def _uuid(device: Mapping[str, Any]) -> str | None:
    attributes = device.get("attributes", {})
    for key in ("parentUUID", "uuid"):
        if key in attributes:
            return str(attributes[key].get("string"))
    return None
