"""``tessera preempt``: which pods would have to end so that a waiting pod gets its devices. It never evicts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from controller.demand.pending_claims import Queue
from controller.eviction.evictor import Evictor
from controller.eviction.gpu_policy import GpuPolicies, GpuPolicy, parse_policy, read_policies
from controller.eviction.preemption import PreemptionSearch
from controller.eviction.preemption_preview import ChosenVictims, Preview, preview_of, read_running
from controller.eviction.recent_evictions import RecentEvictions
from controller.eviction.victim_search import EvictionCost, Preemption
from controller.report.claim_explainer import key_of
from controller.report.cluster_view import read_cluster
from driver.errors import NOT_FOUND, ApiError, FatalError, accepted_status
from driver.kube.client import KubeClient
from driver.kube.controller_heartbeat import last_heartbeat
from driver.kube.types import Pod
from tessera.cluster_options import access_of, with_driver_name, with_kubeconfig
from tessera.simulate.sources import policies_of_files
from tessera.tables_and_drawings import columns, counted, printable, show, with_output


@click.command()
@click.argument("name")
@click.option("-n", "--namespace", help="Namespace of NAME.  [default: that of the context]")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    help="File or folder with manifests of GpuPolicy, or - for standard input.  [default: those of the cluster]",
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

    NAME is a claim, or pod/NAME. Nothing is evicted, and nothing is written to the cluster: the command tries what the
    GpuPolicies of the cluster, or those of files, would allow. It shows the cheapest set of victims, what the second
    best would cost, and why other pods are spared. Costs are compared in this order: highest priority of a victim,
    pods that are not known to be idle, all pods, time for which idle ones have been idle, hours of GPU time that are
    lost, memory slices that are freed.

    Exit code 0: there is such a set; 1: there is none.

    \b
    Examples:
      tessera preempt my-claim -n team-a
      tessera preempt my-claim -n team-a --policy policies.yaml
      tessera preempt pod/my-pod -n team-a --policy policies/ -o json
    """
    access = access_of(kubeconfig)
    client = KubeClient(access, "tessera-preempt")
    allowing = GpuPolicies(policies_of_files(policies) if policies else _of_cluster(client))
    view = read_cluster(client, driver_name)
    pod = _waiting_pod(view.queue, name, namespace or access.namespace)
    evictor = Evictor(client, None, _recent(client))
    search = PreemptionSearch(view.queue, pod, read_running(client), allowing, client.clock)
    preview = preview_of(search, evictor)
    second = None if preview.preemption is None else preview.search.second(preview.preemption)
    waits_for = None if preview.preemption is None else _why_not_now(preview.search, preview.preemption, evictor)
    show(output, {**_as_json(preview, second), "waitsFor": waits_for}, _as_text(preview, second, waits_for))
    sys.exit(0 if preview.preemption is not None else 1)


def _of_cluster(client: KubeClient) -> list[GpuPolicy]:
    with accepted_status(NOT_FOUND):
        policies = read_policies(client)
        return [parse_policy(manifest, f"GpuPolicy {manifest['metadata']['name']}") for manifest in policies]
    raise FatalError("CustomResourceDefinition gpupolicies is not installed (crd.install)")


def _recent(client: KubeClient) -> RecentEvictions:
    """Which pods were evicted lately, so that their owners lose no more; none if this account may not read that."""
    heartbeat = last_heartbeat(client)
    recent = RecentEvictions(client, "" if heartbeat is None else heartbeat.namespace)
    with suppress(ApiError):
        recent.refresh()
    return recent


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


def _why_not_now(search: PreemptionSearch, preemption: Preemption, evictor: Evictor) -> str | None:
    """Why the controller does not evict these pods at present; None: it does."""
    chosen = ChosenVictims.of(search, preemption)
    if not chosen.is_active:
        names = ", ".join(sorted({policy.metadata.name for _, policy in chosen.victims}))
        return f"their policies only report it (mode or action): {names}"
    return chosen.limit(evictor)


def _as_json(preview: Preview, second: Preemption | None) -> dict[str, Any]:
    preemption, search = preview.preemption, preview.search
    return {
        "pod": str(search.pod.metadata.key),
        "priority": search.pod.spec.priority,
        "obstacle": preview.obstacle,
        "node": None if preemption is None else preemption.node,
        "isCheapest": None if preemption is None else preemption.is_cheapest,
        "cost": None if preemption is None else _cost(preemption.cost),
        "victims": [
            {"pods": unit.pods, "claims": sorted(unit.claims), "cost": _cost(unit.cost)}
            for unit in (() if preemption is None else preemption.units)
        ],
        "second": None if second is None else {"node": second.node, "cost": _cost(second.cost)},
        "spared": [spared._asdict() for spared in search.spared],
        "shortOf": search.short_of,
        "unexamined": preview.unexamined,
    }


def _cost(cost: EvictionCost) -> dict[str, Any]:
    pods = {"pods": cost.pods, "idlePods": cost.pods - cost.busy}
    return {"priority": cost.priority, **pods, "gpuHours": cost.gpu_hours, "slices": cost.slices}


def _as_text(preview: Preview, second: Preemption | None, waits_for: str | None = None) -> str:
    pod, preemption = preview.search.pod, preview.preemption
    parts = [f"pod {printable(str(pod.metadata.key))} waits for devices with priority {pod.spec.priority}"]
    if preview.obstacle is not None:
        return "\n".join([*parts, f"no pod would be evicted for it: {printable(preview.obstacle)}"])
    if preemption is None:
        parts.append("no set of pods that may be evicted makes room for it")
    else:
        parts += _of_victims(preemption, second)
        parts += [f"the controller does not evict them now: {printable(waits_for)}"] if waits_for is not None else []
    if preview.unexamined:
        fields = ", ".join(preview.unexamined)
        parts.append(f"not examined: {fields} of the pod, which may keep it from the node all the same")
    for node, resource in sorted(preview.search.short_of.items()):
        parts.append(f"node {node} is short of {printable(resource)} for it, whichever pods are evicted")
    if preview.search.spared:
        rows = [[node, _names(pods), printable(why)] for node, pods, why in preview.search.spared]
        parts += ["", columns(["NODE", "SPARED", "WHY"], rows)]
    return "\n".join([*parts, "", "Nothing was evicted: this command only shows."])


def _of_victims(preemption: Preemption, second: Preemption | None) -> Iterator[str]:
    how = "the cheapest set" if preemption.is_cheapest else "a set of which no pod is superfluous"
    yield f"on node {preemption.node} there is room if these end, {how}: {_in_words(preemption.cost)}"
    yield ""
    costs = [(unit.pods, unit.cost) for unit in preemption.units]
    rows = [[_names(pods), f"{cost.priority}", f"{cost.gpu_hours:g}", f"{cost.slices:g}"] for pods, cost in costs]
    yield columns(["PODS", "PRIORITY", "GPU HOURS", "SLICES"], rows)
    yield ""
    if second is not None:
        yield f"the second best is on node {second.node}: {_in_words(second.cost)}"


def _in_words(cost: EvictionCost) -> str:
    lost = f"{cost.gpu_hours:g} GPU hours lost, {cost.slices:g} memory slices freed"
    idle = f" ({cost.pods - cost.busy} idle)" if cost.busy < cost.pods else ""
    return f"{counted(cost.pods, 'pod')}{idle} of priority {cost.priority} at most, {lost}"


def _names(pods: Sequence[str]) -> str:
    return printable(", ".join(pods)) or "-"
