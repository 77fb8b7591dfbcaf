"""The check of ``tessera status`` about the health of GPUs and about cordons (pure).

With a controller, an unhealthy GPU that no claim holds is soon in no slice: then the plan's status has its faults.
"""

from __future__ import annotations

from collections.abc import Mapping

from driver.kube.types import GpuNodePlan, ResourceSlice, SliceDevice
from kubelet_plugin.coexistence.other_drivers import OWNED
from tessera.gpu_names import GpuName, faults_of, names_of, states
from tessera.output import shortened
from tessera.status.nodes import offered
from tessera.status.snapshot import CheckOutput, Finding, Listing, StatusSnapshot

FAULT_TAINTS = ("unavailable", "unhealthy")

SELF_CLEARING: Mapping[str, str] = {
    "unhealthy=stuck": "a partition of an ended claim can't be removed: end the process that still uses it "
    "(nvidia-smi on the node; the Event UnprepareFailed of the claim says why); it is tried again every 10 s",
    "unhealthy=lost": "a partition of a running claim is gone: make room for it on the GPU, or delete the claim's pod",
    "unavailable": "the GPU does not answer: docs/health.md; it is used again as soon as it does",
}
"""Remedies of faults that the node plugin ends by itself; ``tessera uncordon`` has no effect on them."""

CORDONED = "cordoned"
"""First word of the fault of a cordoned GPU."""


def health(snapshot: StatusSnapshot) -> CheckOutput:
    unhealthy, cordons = _unhealthy(snapshot), _cordons(snapshot)
    lines = [f"{gpu} ({reason})" if reason else gpu for gpu, reason in sorted(cordons.items())]
    yield f"{len(unhealthy)} unhealthy"
    yield f"{len(lines)} cordoned" + (f": {shortened(lines)}" if lines else "")
    for gpu, fault in sorted(unhealthy.items()):
        yield Finding(gpu, f"is {fault}: no new pods get it", _remedy(gpu, fault))
    gpus = _served_gpus(snapshot)
    unusable = unhealthy.keys() | cordons.keys()
    if cordons and gpus and gpus <= unusable and snapshot.has_read(Listing.CLAIMS) and not offered(snapshot):
        message = "are cordoned or unhealthy: nothing is offered to new pods"
        yield Finding("all GPUs", message, f"tessera uncordon {min(cordons)}")


def _remedy(gpu: str, fault: str) -> str:
    """Remedy of a fault: an operator must clear it unless it ends with its cause."""
    cause = next((each for each in SELF_CLEARING if fault.startswith(each)), None)
    return SELF_CLEARING[cause] if cause else f"see docs/health.md; then tessera uncordon {gpu}"


def _unhealthy(snapshot: StatusSnapshot) -> dict[str, str]:
    """The fault of each unhealthy GPU: by taints, and by the plan for GPUs that are in no slice."""
    unhealthy: dict[str, str] = {}
    for item in snapshot.slices:
        for device in item.spec.devices:
            for taint in device.taints:
                key = taint.key.partition("/")[2]
                if key in FAULT_TAINTS:
                    unhealthy.setdefault(_gpu_of(item, device), "=".join(filter(None, (key, taint.value))))
    for plan in _served(snapshot):
        for state in states(plan):
            name = GpuName(plan.metadata.name, state.number, state.gpu.uuid)
            if fault := _reported_fault(name, state.fault or "", plan):
                unhealthy.setdefault(str(name), fault)
    return unhealthy


def _reported_fault(name: GpuName, fault: str, plan: GpuNodePlan) -> str:
    """The fault that the plan's status has of a GPU; empty if it is cordoned or reserved for another driver."""
    value, _, reason = fault.partition(": ")
    if fault and value != CORDONED and not fault.endswith(OWNED):
        return f"unhealthy={value}" if reason and " " not in value else f"unavailable: {fault}"
    return next((f"unhealthy={each.value}" for each in faults_of(name, (), plan)), "")


def _cordons(snapshot: StatusSnapshot) -> dict[str, str]:
    """The reason of each cordoned GPU, by plans."""
    plans = snapshot.plans or {}
    names = {name.uuid: str(name) for name in names_of(snapshot.slices, plans.values())}
    return {
        names.get(uuid, f"{node}/{uuid}"): reason
        for node, plan in plans.items()
        for uuid, reason in plan.spec.cordons.items()
    }


def _served(snapshot: StatusSnapshot) -> list[GpuNodePlan]:
    """Plans of nodes that publish; those of other nodes are outdated."""
    return [plan for name, plan in (snapshot.plans or {}).items() if snapshot.slices_of(name)]


def _served_gpus(snapshot: StatusSnapshot) -> set[str]:
    """GPUs of nodes that publish, by devices and by plans."""
    published = {_gpu_of(item, device) for item in snapshot.slices for device in item.spec.devices}
    return published | {str(name) for name in names_of(snapshot.slices, _served(snapshot))}


def _gpu_of(item: ResourceSlice, device: SliceDevice) -> str:
    """The GPU of a device as NODE/gpu-N."""
    return f"{item.spec.node_name}/{'-'.join(device.name.split('-')[:2])}"
