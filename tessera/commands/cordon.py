"""``tessera cordon`` and ``uncordon``: exclude a GPU from new pods, and admit it again.

Both write to the GpuNodePlan of the GPU's node, which its plugin follows with or without a controller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from driver.errors import CONFLICT, EnvironmentFault, StateError, accepted_status
from driver.kube.client import Object
from driver.kube.slice_types import ResourceSlice
from driver.kube.typed_reads import read_all
from driver.kube.types import GpuNodePlan
from driver.model.plan import API_VERSION, KIND, PATH, ClearedFaults, PlanSpec
from driver.slices.publisher import SLICES
from tessera.cluster_options import client_of, find_plans, with_driver_name, with_kubeconfig
from tessera.gpu_names_and_faults import GpuName, faults_of, find, names_of
from tessera.tables_and_drawings import show, with_output

WRITE_ATTEMPTS = 5
"""Attempts to write a plan, which the controller may change at the same time."""


@click.command()
@click.argument("gpu", metavar="GPU")
@click.option("--reason", help="Shown by `tessera status`.  [default: unchanged]")
@with_kubeconfig
@with_driver_name
@with_output("text", "json")
def cordon(gpu: str, reason: str | None, kubeconfig: Path | None, driver_name: str, output: str) -> None:
    """Exclude a GPU from new pods: each of its devices gets the taint gpu.tessera.dev/cordoned. Running pods stay.

    GPU is a UUID, or NODE/gpu-N with the number in its device names.

    \b
    Examples:
      tessera cordon node-a/gpu-3 --reason "fan replacement on Friday"
      tessera cordon GPU-0f3c9d1e-7a41-4b8e-9c60-1d2e3f4a5b6c
    """
    cluster = PlanEditor(kubeconfig, driver_name)
    name = find(gpu, cluster.names())

    def cordoned(spec: PlanSpec) -> Object:
        line = f"{name.uuid} {_reason(spec, name, reason)}".rstrip()
        return {"cordoned": [*_others(spec.cordoned, name), line]}

    cluster.edit(name.node, cordoned)
    why = _reason(cluster.spec(name.node), name, reason)
    kept = f", as before: {why}" if why and reason is None else ""
    _say(output, name, f"cordoned {name} ({name.uuid}){kept}", {"cordoned": True, "reason": why})


@click.command()
@click.argument("gpu", metavar="GPU")
@with_kubeconfig
@with_driver_name
@with_output("text", "json")
def uncordon(gpu: str, kubeconfig: Path | None, driver_name: str, output: str) -> None:
    """Admit new pods to a GPU again: end its cordon, and clear the faults that it reports now.

    Faults that happen later stay, and so does the fault of a GPU that does not answer.

    \b
    Examples:
      tessera uncordon node-a/gpu-3
      tessera uncordon GPU-0f3c9d1e-7a41-4b8e-9c60-1d2e3f4a5b6c -o json
    """
    cluster = PlanEditor(kubeconfig, driver_name)
    name = find(gpu, cluster.names())
    faults = faults_of(name, cluster.slices, cluster.plans.get(name.node))
    stamps = [fault.stamp for fault in faults if fault.stamp is not None]
    cordoned = any(name.uuid == text.partition(" ")[0] for text in cluster.spec(name.node).cordoned)

    def uncordoned(spec: PlanSpec) -> Object:
        cleared = [*_others(spec.cleared, name), str(ClearedFaults(name.uuid, max(stamps)))] if stamps else spec.cleared
        return {"cordoned": _others(spec.cordoned, name), "cleared": list(cleared)}

    if cordoned or stamps:
        cluster.edit(name.node, uncordoned)
    # The taints of devices and the plan's status report the same faults.
    dealt = list(dict.fromkeys(fault.value for fault in faults if fault.stamp is not None))
    remaining = list(dict.fromkeys(fault.value for fault in faults if fault.stamp is None))
    facts = {"cordoned": False, "cleared": dealt, "left": remaining}
    _say(output, name, _outcome(name, cordoned, dealt, remaining), facts)


class PlanEditor:
    """The slices of one driver and the plans of all nodes, read when the command starts.

    Raises ApiError if they can't be read, EnvironmentFault without a cluster.
    """

    def __init__(self, kubeconfig: Path | None, driver_name: str) -> None:
        self._client = client_of(kubeconfig, "tessera-command")
        try:
            selector = {"fieldSelector": f"spec.driver={driver_name}"}
            self.slices = list(read_all(self._client, SLICES, ResourceSlice, selector))
            plans = find_plans(self._client)
        except msgspec.MsgspecError as error:
            raise StateError(f"a ResourceSlice or {KIND} can't be read: {error}") from error
        if plans is None:
            remedy = "install the chart's CRD (docs/install.md)"
            raise EnvironmentFault(f"{KIND}, which stores cordons, is not installed: {remedy}")
        self.plans = {plan.metadata.name: plan for plan in plans}

    def names(self) -> list[GpuName]:
        return names_of(self.slices, self.plans.values())

    def spec(self, node: str) -> PlanSpec:
        return self.plans[node].spec if node in self.plans else PlanSpec()

    def edit(self, node: str, change: Callable[[PlanSpec], Object]) -> None:
        """Patch the plan's spec with the result of ``change``; create the plan if the node has none."""
        for _ in range(WRITE_ATTEMPTS - 1):
            with accepted_status(CONFLICT):
                return self._write(node, change)
            self.plans[node] = msgspec.convert(self._client.get_object(f"{PATH}/{node}"), GpuNodePlan)
        return self._write(node, change)

    def _write(self, node: str, change: Callable[[PlanSpec], Object]) -> None:
        body = {"spec": change(self.spec(node))}
        plan = self.plans.get(node)
        if plan is not None:
            version = {"metadata": {"resourceVersion": plan.metadata.resource_version}}
            self._client.patch(f"{PATH}/{node}", {**version, **body})
            return
        uid = self._client.get_object(f"/api/v1/nodes/{node}")["metadata"]["uid"]
        owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}
        metadata = {"name": node, "ownerReferences": [owner]}
        self._client.create(PATH, {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, **body})


def _reason(spec: PlanSpec, name: GpuName, reason: str | None) -> str:
    """The reason on one line; by default the reason of an earlier cordon."""
    return spec.cordons.get(name.uuid, "") if reason is None else " ".join(reason.split())


def _others(lines: Sequence[str], name: GpuName) -> list[str]:
    """The lines about other GPUs."""
    return [text for text in lines if text.partition(" ")[0] != name.uuid]


def _outcome(name: GpuName, cordoned: bool, cleared: Sequence[str], left: Sequence[str]) -> str:
    gpu = f"{name} ({name.uuid})"
    if cordoned:
        lines = [f"uncordoned {gpu}", *(f"cleared: {value}" for value in cleared)]
    elif cleared:
        lines = [f"cleared on {gpu}: {', '.join(cleared)}", "it was not cordoned"]
    else:
        lines = [f"{gpu} was not cordoned"]
    lines += [f"not cleared: {value}; the node plugin ends it when its cause is gone" for value in left]
    return "\n".join(lines)


def _say(output: str, name: GpuName, text: str, facts: Mapping[str, Any]) -> None:
    named = {"node": name.node, "gpu": f"gpu-{name.number}", "uuid": name.uuid}
    show(output, [{**named, **facts}], text)
