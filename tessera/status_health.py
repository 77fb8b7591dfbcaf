"""The check of ``tessera status`` about the health of GPUs, and cordons (pure).

Where a controller decides, a GPU that is unwell and that nobody holds is soon in no slice: then its plan tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from driver.kube.plans import GpuNodePlan
from driver.kube.transport import Object
from kubelet_plugin.neighbours import OWNED
from tessera.gpu_names import GpuName, faults_of, names_of
from tessera.status_finding import Finding, Told, first
from tessera.status_nodes import offered, states
from tessera.status_picture import Picture, What

UNWELL = ("unavailable", "unhealthy")
"""Taints of a fault."""

CORDONED = "cordoned"
"""The first word of why a GPU can't be used that an operator keeps from use."""


def health(picture: Picture) -> Told:
    ill, cordons = _unwell(picture), _cordons(picture)
    lines = [f"{gpu} ({reason})" if reason else gpu for gpu, reason in sorted(cordons.items())]
    yield f"{len(ill)} unwell"
    yield f"{len(lines)} cordoned" + (f": {first(lines)}" if lines else "")
    for gpu, what in sorted(ill.items()):
        yield Finding(
            gpu, f"is {what}: no new pods get it", f"docs/health.md says what to do; then tessera uncordon {gpu}"
        )
    gpus = _served_gpus(picture)
    kept = ill.keys() | cordons.keys()
    if cordons and gpus and gpus <= kept and picture.has_read(What.CLAIMS) and not offered(picture):
        message = "are cordoned or unwell: nothing is offered to new pods"
        yield Finding("all GPUs", message, f"tessera uncordon {min(cordons)}")


def _unwell(picture: Picture) -> dict[str, str]:
    """What is wrong with each GPU that a fault keeps from use: by taints, and by the plan for what is in no slice."""
    ill: dict[str, str] = {}
    for item in picture.slices:
        for device in item["spec"].get("devices") or ():
            for taint in device.get("taints") or ():
                word = taint["key"].partition("/")[2]
                if word in UNWELL:
                    ill.setdefault(_gpu_of(item, device), "=".join(filter(None, (word, taint.get("value")))))
    for plan in _served(picture):
        for state in states(plan.status.inventory):
            name = GpuName(plan.metadata.name, state.number, state.gpu.uuid)
            if told := _told(name, state.fault or "", plan):
                ill.setdefault(str(name), told)
    return ill


def _told(name: GpuName, fault: str, plan: GpuNodePlan) -> str:
    """What its node wrote of a GPU in the plan; nothing of one that is only cordoned or somebody else's."""
    word, _, reason = fault.partition(": ")
    if fault and word != CORDONED and not fault.endswith(OWNED):
        return f"unhealthy={word}" if reason and " " not in word else f"unavailable: {fault}"
    return next((f"unhealthy={each.value}" for each in faults_of(name, (), plan)), "")


def _cordons(picture: Picture) -> dict[str, str]:
    """Why each GPU is cordoned, by plans."""
    plans = picture.plans or {}
    names = {name.uuid: str(name) for name in names_of(picture.slices, plans.values())}
    return {
        names.get(uuid, f"{node}/{uuid}"): reason
        for node, plan in plans.items()
        for uuid, reason in plan.spec.cordons.items()
    }


def _served(picture: Picture) -> list[GpuNodePlan]:
    """Plans of nodes that publish: the others' tell of earlier times."""
    return [plan for name, plan in (picture.plans or {}).items() if picture.slices_of(name)]


def _served_gpus(picture: Picture) -> set[str]:
    """GPUs of nodes that publish, by devices and, where none of theirs is there, by plans."""
    published = {_gpu_of(item, device) for item in picture.slices for device in item["spec"].get("devices") or ()}
    return published | {str(name) for name in names_of(picture.slices, _served(picture))}


def _gpu_of(item: Object, device: Mapping[str, Any]) -> str:
    """As commands take it."""
    return f"{item['spec'].get('nodeName')}/{'-'.join(device['name'].split('-')[:2])}"
