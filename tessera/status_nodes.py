"""Checks of ``tessera status`` about nodes and what they publish (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from driver.errors import StateError
from driver.kube.heartbeat import HEARTBEAT, SILENT_S
from driver.kube.transport import Object
from driver.model.plan import PlanMode
from driver.model.plan_gpus import GpuState, states_of
from driver.slices.names import Pool
from kubelet_plugin.neighbours import OWNED, Signs, neighbours_of
from tessera.status_cluster import NODE, age_of, tell_pods
from tessera.status_finding import Finding, Told
from tessera.status_picture import Picture, results_of

GPU_LABELS = (
    "gpu.tessera.dev/node",
    "nvidia.com/gpu.present",
    *(f"feature.node.kubernetes.io/pci-{each}.present" for each in ("10de", "0302_10de", "0300_10de")),
)
"""Any of them, with the value true, or GKE_LABEL: the chart's node plugin runs there."""
GKE_LABEL = "cloud.google.com/gke-accelerator"
UNWELL = ("unavailable", "unhealthy")


def plugins(picture: Picture) -> Told:
    names = {item["metadata"]["name"]: item for item in picture.nodes}
    serving = [name for name in picture.gpu_nodes if picture.slices_of(name)]
    yield f"{len(serving)} of {len(picture.gpu_nodes)} nodes publish"
    yield from tell_pods(picture, NODE)
    for name in picture.gpu_nodes:
        if names and name not in names:
            yield Finding(name, "has slices or a plan, but there is no such Node", "delete them, or register the node")
    for name, node in names.items():
        if not picture.slices_of(name) and (name in picture.gpu_nodes or _has_gpus(node)):
            remedy = f"is the plugin there and ready? kubectl -n {picture.namespace} get pods -o wide; read its log"
            yield Finding(name, "publishes nothing", remedy)


def slices(picture: Picture) -> Told:
    yield f"{len(picture.slices)} ResourceSlices"
    for node in picture.gpu_nodes:
        specs = [item["spec"] for item in picture.slices_of(node)]
        newest = max((spec["pool"]["generation"] for spec in specs), default=0)
        there = [spec for spec in specs if spec["pool"]["generation"] == newest]
        wanted = there[0]["pool"]["resourceSliceCount"] if there else 0
        if len(there) != wanted:
            message = f"its pool is incomplete: {len(there)} of {wanted} slices, so the scheduler skips it"
            yield Finding(node, message, "look again in a minute; if it stays, restart the node's plugin")


def held(picture: Picture) -> Told:
    devices = {
        (item["spec"]["pool"]["name"], device["name"]): device
        for item in picture.slices
        for device in item["spec"].get("devices") or ()
    }
    taken = {
        (str(result["pool"]), str(result["device"])): claim
        for claim in picture.claims
        for result in results_of(claim)
        if result["driver"] == picture.driver
    }
    free = [device for name, device in devices.items() if name not in taken and not device.get("taints")]
    yield f"{len(taken)} held"
    yield f"{len(free)} offered"
    if any(device.get("attributes", {}).get("simulated", {}).get("bool") for device in devices.values()):
        yield "simulated GPUs among them"
    for name in sorted(taken.keys() - devices.keys()):
        claim = taken[name]["metadata"]
        message = (
            f"{name[1]} of pool {name[0]} is held by claim {claim['namespace']}/{claim['name']}, but not published"
        )
        yield Finding(name[1], message, "start the node's plugin; until then its memory may be given out twice")


def health(picture: Picture) -> Told:
    ill: dict[str, str] = {}
    for item in picture.slices:
        for device in item["spec"].get("devices") or ():
            for taint in device.get("taints") or ():
                word = taint["key"].partition("/")[2]
                if word in UNWELL:
                    gpu = f"{item['spec'].get('nodeName')}/{'-'.join(device['name'].split('-')[:2])}"
                    ill.setdefault(gpu, "=".join(filter(None, (word, taint.get("value")))))
    yield f"{len(ill)} GPUs unwell"
    for gpu, what in sorted(ill.items()):
        yield Finding(
            gpu, f"is {what}: no new pods get it", f"docs/health.md says what to do; then tessera uncordon {gpu}"
        )


def mode(picture: Picture) -> Told:
    plans = picture.plans or {}
    alone = [name for name, plan in plans.items() if plan.status.mode is PlanMode.ALONE and picture.slices_of(name)]
    yield f"{len(plans) - len(alone)} nodes follow the controller, {len(alone)} stand alone"
    ages = [(picture.now - at).total_seconds() for at in picture.planned_at.values()]
    if ages:
        yield f"plans were written {max(0.0, min(ages)):.0f} to {max(0.0, *ages):.0f} s ago"
    beat = age_of(picture, picture.leases.get(HEARTBEAT))
    for name in sorted(alone) if beat is not None and beat <= SILENT_S else ():
        remedy = "it follows within two minutes of hearing the controller; after that read the log of its plugin"
        yield Finding(name, "stands alone although a controller is there", remedy)
    for name, plan in sorted(plans.items()):
        if plan.status.mode is PlanMode.PLANNED and plan.status.observed_generation < plan.metadata.generation:
            behind = plan.metadata.generation - plan.status.observed_generation
            yield Finding(name, f"is {behind} versions of its plan behind", "restart its plugin if it stays so")
        for refused in plan.status.refused[:1]:
            more = f" and {len(plan.status.refused) - 1} more" if len(plan.status.refused) > 1 else ""
            yield Finding(
                name, f"can't offer what its plan says: {refused}{more}", "the next plan takes it into account"
            )


def neighbours(picture: Picture) -> Told:
    found: list[str] = []
    for node in picture.nodes:
        name = str(node["metadata"]["name"])
        signs = _signs(picture, node)
        refused = _refused_gpus(picture, name)
        for each in neighbours_of(signs, picture.driver) if name in picture.gpu_nodes else ():
            found.append(f"{each.name} on {name}")
            both = (each.gpus or frozenset()) & _published_gpus(picture, name)
            if both or refused:
                shared = (
                    f"{len(both)} GPUs are in its slices and in ours" if both else f"{refused} GPUs are not offered"
                )
                message = f"{each}: {shared}"
                yield Finding(
                    name, message, "remove it there, or leave it its GPUs: --exclude-gpus (docs/soundness.md)"
                )
    yield "; ".join(found) or "none"


def _has_gpus(node: Object) -> bool:
    labels = node["metadata"].get("labels") or {}
    return GKE_LABEL in labels or any(labels.get(label) == "true" for label in GPU_LABELS)


def _signs(picture: Picture, node: Object) -> Signs:
    specs = [item["spec"] for item in picture.others if item["spec"].get("nodeName") == node["metadata"]["name"]]
    theirs = frozenset(uuid for spec in specs for uuid in _gpus_in(spec)) if specs else None
    allocatable = node.get("status", {}).get("allocatable") or {}
    return Signs(allocatable, node["metadata"].get("labels") or {}, theirs)


def _gpus_in(spec: Mapping[str, Any]) -> Iterator[str]:
    for device in spec.get("devices") or ():
        for key in ("uuid", "parentUUID"):
            uuid = str(device.get("attributes", {}).get(key, {}).get("string", ""))
            if uuid.startswith("GPU-"):
                yield uuid


def _published_gpus(picture: Picture, node: str) -> frozenset[str]:
    return frozenset(uuid for item in picture.slices_of(node) for uuid in _gpus_in(item["spec"]))


def _refused_gpus(picture: Picture, node: str) -> int:
    """How many GPUs its plugin leaves to neighbours, as it tells in its plan; without a plan one where nothing of the
    node can be had and nothing is held."""
    plan = (picture.plans or {}).get(node)
    if plan is not None and plan.status.inventory:
        return sum((state.fault or "").endswith(OWNED) for state in _states(plan.status.inventory))
    devices = [device for item in picture.slices_of(node) for device in item["spec"].get("devices") or ()]
    taken = any(
        result["pool"] == Pool(node, picture.driver).name for claim in picture.claims for result in results_of(claim)
    )
    return int(not taken and all(device.get("taints") for device in devices))


def _states(inventory: str) -> Sequence[GpuState]:
    try:
        return states_of(inventory)
    except StateError:
        return ()
