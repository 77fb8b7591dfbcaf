"""Checks of ``tessera status`` about nodes and what they publish (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from driver.errors import StateError
from driver.kube.heartbeat import HEARTBEAT, SILENT_S
from driver.kube.plans import GpuNodePlan
from driver.kube.transport import Object
from driver.model.plan import PlanMode
from driver.model.plan_gpus import GpuState, states_of
from driver.slices.names import Pool
from kubelet_plugin.neighbours import OWNED, Signs, neighbours_of
from tessera.status_cluster import age_of
from tessera.status_finding import Finding, Told, some
from tessera.status_picture import Picture, results_of


def slices(picture: Picture) -> Told:
    yield some(len(picture.slices), "ResourceSlice")
    for node in picture.gpu_nodes:
        specs = [item["spec"] for item in picture.slices_of(node)]
        newest = max((spec["pool"]["generation"] for spec in specs), default=0)
        there = [spec for spec in specs if spec["pool"]["generation"] == newest]
        wanted = there[0]["pool"]["resourceSliceCount"] if there else 0
        if len(there) != wanted:
            message = f"its pool is incomplete: {len(there)} of {wanted} slices, so the scheduler skips it"
            yield Finding(node, message, "look again in a minute; if it stays, restart the node's plugin")


def held(picture: Picture) -> Told:
    devices, taken = _devices(picture), _taken(picture)
    yield f"{len(taken)} held"
    yield f"{len(offered(picture))} offered"
    if any(device.get("attributes", {}).get("simulated", {}).get("bool") for device in devices.values()):
        yield "simulated GPUs among them"
    for name in sorted(taken.keys() - devices.keys()):
        claim = taken[name]["metadata"]
        message = f"of pool {name[0]} is held by claim {claim['namespace']}/{claim['name']}, but not published"
        yield Finding(name[1], message, "start the node's plugin; until then its memory may be given out twice")


def mode(picture: Picture) -> Told:
    plans = picture.plans or {}
    serving = {str(item["spec"].get("nodeName", "")) for item in picture.slices} - {""}
    alone = {name for name in serving if name not in plans or plans[name].status.mode is PlanMode.ALONE}
    follow = len(serving - alone)
    yield f"{some(follow, 'node follows', 'nodes follow')} the controller"
    yield f"{len(alone)} {'stands' if len(alone) == 1 else 'stand'} alone"
    if idle := len(plans.keys() - serving):
        yield f"{some(idle, 'plan')} of nodes that publish nothing"
    yield from _ages([(picture.now - at).total_seconds() for name, at in picture.planned_at.items() if name in serving])
    beat = age_of(picture, picture.leases.get(HEARTBEAT))
    for name in sorted(alone & plans.keys()) if beat is not None and beat <= SILENT_S else ():
        remedy = "it follows within two minutes of hearing the controller; after that read the log of its plugin"
        yield Finding(name, "stands alone although a controller is there", remedy)
    for name in sorted(serving & plans.keys()):
        yield from _behind(name, plans[name])


def _ages(ages: Sequence[float]) -> Told:
    if ages:
        youngest, oldest = (f"{max(0.0, age):.0f}" for age in (min(ages), max(ages)))
        span = youngest if youngest == oldest else f"{youngest} to {oldest}"
        yield f"{'plan was' if len(ages) == 1 else 'plans were'} written {span} s ago"


def _behind(name: str, plan: GpuNodePlan) -> Told:
    behind = plan.metadata.generation - plan.status.observed_generation
    if plan.status.mode is PlanMode.PLANNED and behind > 0:
        yield Finding(name, f"is {some(behind, 'version')} of its plan behind", "restart its plugin if it stays so")
    for refused in plan.status.refused[:1]:
        more = f" and {len(plan.status.refused) - 1} more" if len(plan.status.refused) > 1 else ""
        yield Finding(name, f"can't offer what its plan says: {refused}{more}", "the next plan takes it into account")


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
                    f"{some(len(both), 'GPU is', 'GPUs are')} in its slices and in ours"
                    if both
                    else f"{some(refused, 'GPU is', 'GPUs are')} not offered"
                )
                message = f"{each}: {shared}"
                yield Finding(
                    name, message, "remove it there, or leave it its GPUs: --exclude-gpus (docs/soundness.md)"
                )
    yield "; ".join(found) or "none"


def _devices(picture: Picture) -> dict[tuple[str, str], Mapping[str, Any]]:
    """What is published, by pool and name."""
    return {
        (item["spec"]["pool"]["name"], device["name"]): device
        for item in picture.slices
        for device in item["spec"].get("devices") or ()
    }


def _taken(picture: Picture) -> dict[tuple[str, str], Object]:
    """The claim that holds each device, by pool and name."""
    return {
        (str(result["pool"]), str(result["device"])): claim
        for claim in picture.claims
        for result in results_of(claim)
        if result["driver"] == picture.driver
    }


def offered(picture: Picture) -> list[tuple[str, str]]:
    """What anybody new can have."""
    taken = _taken(picture)
    return [name for name, device in _devices(picture).items() if name not in taken and not device.get("taints")]


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
        return sum((state.fault or "").endswith(OWNED) for state in states(plan.status.inventory))
    devices = [device for item in picture.slices_of(node) for device in item["spec"].get("devices") or ()]
    taken = any(
        result["pool"] == Pool(node, picture.driver).name for claim in picture.claims for result in results_of(claim)
    )
    return int(not taken and all(device.get("taints") for device in devices))


def states(inventory: str) -> Sequence[GpuState]:
    """What a plan's status tells of GPUs, as far as it can be read."""
    try:
        return states_of(inventory)
    except StateError:
        return ()
