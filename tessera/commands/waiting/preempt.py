"""``tessera preempt``: which pods would have to end so that a waiting pod gets its devices. It never evicts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from controller.demand.pending_claims import Queue
from controller.eviction.evictor import Evictor
from controller.eviction.gpu_policy import GpuPolicies, GpuPolicy, parse_policy
from controller.eviction.preemption import Preemption, PreemptionSearch, RunningPods
from controller.eviction.recent_evictions import RecentEvictions
from controller.eviction.victim_search import EvictionCost, VictimUnit
from controller.report.claim_explainer import key_of
from controller.report.cluster_view import ClusterView, read_cluster
from deviceclasses.lint.documents import Document, read_documents
from driver.errors import ApiError, FatalError, UsageError
from driver.kube.client import KubeClient
from driver.kube.get_and_list import list_claims, read_all
from driver.kube.types import Node, Pod
from tessera.cluster_options import access_of, with_driver_name, with_kubeconfig
from tessera.tables_and_drawings import columns, counted, printable, show, with_output

BOUND = {"fieldSelector": "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"}

MAX_ROUNDS = 32
"""Searches after each of which pods are left out that the API server or a limit of the controller protects."""


@dataclass(frozen=True)
class Preview:
    """What the command found for ``pod``. ``obstacle``: why no pod would be evicted for it."""

    pod: Pod
    obstacle: str | None
    preemption: Preemption | None
    search: PreemptionSearch
    unexamined: Sequence[str]


@click.command()
@click.argument("name")
@click.option("-n", "--namespace", help="Namespace of NAME.  [default: that of the context]")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    required=True,
    help="File or folder with manifests of GpuPolicy, or - for standard input.",
)
@with_kubeconfig
@with_driver_name
@with_output("text", "json")
def preempt(
    *,
    name: str,
    namespace: str | None,
    policies: Sequence[str],
    kubeconfig: Path | None,
    driver_name: str,
    output: str,
) -> None:
    """Show which pods would have to end so that a waiting pod of higher priority gets its devices.

    NAME is a claim, or pod/NAME. Nothing is evicted, and nothing is written to the cluster: the command tries what a
    GpuPolicy would allow. It shows the cheapest set of victims, what the second best would cost, and why other pods are
    spared. Costs are compared in this order: highest priority of a victim, pods, hours of GPU time that are lost,
    memory slices that are freed.

    Exit code 0: there is such a set; 1: there is none.

    \b
    Examples:
      tessera preempt my-claim -n team-a --policy policies.yaml
      tessera preempt pod/my-pod -n team-a --policy policies/ -o json
    """
    read = GpuPolicies(_policies(policies))
    access = access_of(kubeconfig)
    client = KubeClient(access, "tessera-preempt")
    view = read_cluster(client, driver_name)
    pod = _waiting_pod(view.queue, name, namespace or access.namespace)
    preview = _preview(client, view, pod, read)
    show(output, _as_json(preview), _as_text(preview))
    sys.exit(0 if preview.preemption is not None else 1)


def _policies(paths: Sequence[str]) -> Iterator[GpuPolicy]:
    for path in paths:
        for document in read_documents(path):
            if not isinstance(document, Document):
                raise UsageError(f"--policy {path}: {document.message}")
            yield parse_policy(document.content, f"--policy {document.file}, document {document.number}")


def _waiting_pod(queue: Queue, name: str, namespace: str) -> Pod:
    """The waiting pod that NAME means. Raises FatalError: there is none."""
    kind, slash, rest = name.partition("/")
    is_pod = bool(slash) and kind in {"pod", "pods", "po"}
    key = key_of(rest if slash and (is_pod or kind in {"claim", "resourceclaim"}) else name, namespace)
    for pending in queue.pending:
        for pod in pending.pods:
            if (pod.metadata.key if is_pod else pending.claim.metadata.key) == key:
                return pod
    what = "pod" if is_pod else "claim with a pod"
    raise FatalError(f"no {what} named {key.name} waits for devices in namespace {key.namespace} (tessera why)")


def _preview(client: KubeClient, view: ClusterView, pod: Pod, policies: GpuPolicies) -> Preview:
    bound, nodes = read_all(client, "/api/v1/pods", Pod, BOUND), read_all(client, "/api/v1/nodes", Node)
    running = RunningPods(bound, list_claims(client), nodes)
    search = PreemptionSearch(view.queue, pod, running, policies, view.clock)
    namespace, name = pod.metadata.key
    unexamined = _unexamined(client.find(f"/api/v1/namespaces/{namespace}/pods/{name}") or {})
    obstacle = search.obstacle()
    if obstacle is not None:
        return Preview(pod, obstacle, None, search, unexamined)
    evictor = Evictor(client, None, RecentEvictions(client, ""))
    for _ in range(MAX_ROUNDS):
        preemption = search.best()
        if preemption is None or not _spare_protected(search, evictor, preemption, running):
            return Preview(pod, None, preemption, search, unexamined)
    return Preview(pod, None, None, search, unexamined)


def _spare_protected(search: PreemptionSearch, evictor: Evictor, preemption: Preemption, running: RunningPods) -> bool:
    """Leave out units that are protected now, such as by a PodDisruptionBudget. Returns whether there were any."""
    before = len(search.protected)
    for unit in preemption.victims.units:
        by_namespace = groupby(unit.pods, key=lambda name: name.partition("/")[0])
        for _, names in by_namespace:
            try:
                protection = evictor.protection([running.pods[key_of(name, "")] for name in names])
            except ApiError as error:
                search.protected[unit.pods] = f"what protects it can't be read: {error}"
                continue
            if protection is not None:
                search.protected[unit.pods] = protection.reason
    return len(search.protected) > before


def _unexamined(pod: Mapping[str, Any]) -> list[str]:
    """Fields of the waiting pod that may keep it from a node, and that the search does not look at."""
    spec = pod.get("spec") or {}
    affinity = spec.get("affinity") or {}
    containers = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
    present = {
        "affinity.podAffinity": affinity.get("podAffinity"),
        "affinity.podAntiAffinity": affinity.get("podAntiAffinity"),
        "topologySpreadConstraints": spec.get("topologySpreadConstraints"),
        "persistentVolumeClaim": [volume for volume in spec.get("volumes") or () if "persistentVolumeClaim" in volume],
        "hostPort": [port for container in containers for port in container.get("ports") or () if port.get("hostPort")],
    }
    return [field for field, value in present.items() if value]


def _as_json(preview: Preview) -> dict[str, Any]:
    preemption, search = preview.preemption, preview.search
    return {
        "pod": str(preview.pod.metadata.key),
        "priority": preview.pod.spec.priority,
        "obstacle": preview.obstacle,
        "node": None if preemption is None else preemption.node,
        "isCheapest": None if preemption is None else preemption.victims.is_cheapest,
        "cost": None if preemption is None else _cost(preemption.victims.cost),
        "victims": [] if preemption is None else [_victim(unit) for unit in preemption.victims.units],
        "second": None
        if preemption is None or preemption.second is None
        else {"node": preemption.second[0], "cost": _cost(preemption.second[1])},
        "spared": [spared._asdict() for spared in search.spared],
        "shortOf": search.short_of,
        "unexamined": preview.unexamined,
    }


def _cost(cost: EvictionCost) -> dict[str, Any]:
    return {"priority": cost.priority, "pods": cost.pods, "gpuHours": cost.gpu_hours, "slices": cost.slices}


def _victim(unit: VictimUnit) -> dict[str, Any]:
    return {"pods": unit.pods, "claims": sorted(unit.claims), "cost": _cost(unit.cost)}


def _as_text(preview: Preview) -> str:
    pod, preemption = preview.pod, preview.preemption
    parts = [f"pod {printable(str(pod.metadata.key))} waits for devices with priority {pod.spec.priority}"]
    if preview.obstacle is not None:
        return "\n".join([*parts, f"no pod would be evicted for it: {preview.obstacle}"])
    if preemption is None:
        parts.append("no set of pods that may be evicted makes room for it")
    else:
        parts += _of_victims(preemption)
    if preview.unexamined:
        fields = ", ".join(preview.unexamined)
        parts.append(f"not examined: {fields} of the pod, which may keep it from the node all the same")
    for node, resource in sorted(preview.search.short_of.items()):
        parts.append(f"node {node} has too little {resource} for it, whichever pods are evicted")
    if preview.search.spared:
        rows = [[node, _names(pods), printable(why)] for node, pods, why in preview.search.spared]
        parts += ["", columns(["NODE", "SPARED", "WHY"], rows)]
    return "\n".join([*parts, "", "Nothing was evicted: this command only shows."])


def _of_victims(preemption: Preemption) -> Iterator[str]:
    how = "the cheapest set" if preemption.victims.is_cheapest else "a set of which no pod is superfluous"
    yield f"on node {preemption.node} there is room if these end, {how}: {_in_words(preemption.victims.cost)}"
    yield ""
    rows = [[_names(unit.pods), *_cells(unit.cost)] for unit in preemption.victims.units]
    yield columns(["PODS", "PRIORITY", "GPU HOURS", "SLICES"], rows)
    yield ""
    if preemption.second is not None:
        node, cost = preemption.second
        yield f"the second best is on node {node}: {_in_words(cost)}"


def _in_words(cost: EvictionCost) -> str:
    lost = f"{cost.gpu_hours:g} GPU hours lost, {cost.slices:g} memory slices freed"
    return f"{counted(cost.pods, 'pod')} of priority {cost.priority} at most, {lost}"


def _cells(cost: EvictionCost) -> list[str]:
    return [str(cost.priority), f"{cost.gpu_hours:g}", f"{cost.slices:g}"]


def _names(pods: Sequence[str]) -> str:
    return printable(", ".join(pods)) or "-"
