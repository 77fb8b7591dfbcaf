"""``tessera cordon`` and ``uncordon``: keep a GPU from new pods, and bring it back.

What they write is in the GpuNodePlan of the GPU's node, which its plugin follows with or without a controller.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from driver.errors import CONFLICT, NOT_FOUND, ApiError, EnvironmentFault, StateError
from driver.kube.claims import GROUP
from driver.kube.paging import objects
from driver.kube.plans import GpuNodePlan
from driver.kube.transport import Object
from driver.model.plan import API_VERSION, KIND, PATH, ClearedFaults, PlanSpec
from tessera.asking import client_of, with_driver_name, with_kubeconfig
from tessera.gpu_names import Fault, GpuName, faults_of, find, names_of

USER_AGENT = "tessera-command"
TRIES = 5
"""Writes of one plan: the controller may change it at the same time."""

_options = (
    click.argument("gpu", metavar="GPU"),
    with_kubeconfig,
    with_driver_name,
    click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True),
)


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_options):
        command = option(command)
    return command


@click.command()
@click.option("--reason", help="Shown to whoever wonders.  [default: the one that it has]")
@_with_options
def cordon(gpu: str, reason: str | None, kubeconfig: Path | None, driver_name: str, output: str) -> None:
    """Keep new pods off a GPU: every device of it gets the taint gpu.tessera.dev/cordoned. What runs is left alone.

    GPU is a UUID, or NODE/gpu-N with the number that device names have.

    \b
    Examples:
      tessera cordon node-a/gpu-3 --reason "fan replacement on Friday"
      tessera cordon GPU-0f3c9d1e-7a41-4b8e-9c60-1d2e3f4a5b6c
      tessera cordon node-a/gpu-3 -o json
    """
    cluster = Cluster(kubeconfig, driver_name)
    name = find(gpu, cluster.names())
    cluster.edit(name.node, lambda spec: _cordoned(spec, name, reason))
    why = _reason(cluster.spec(name.node), name, reason)
    kept = f", as before: {why}" if why and reason is None else ""
    _say(output, name, f"cordoned {name} ({name.uuid}){kept}", {"cordoned": True, "reason": why})


@click.command()
@_with_options
def uncordon(gpu: str, kubeconfig: Path | None, driver_name: str, output: str) -> None:
    """Give a GPU to new pods again: end its cordon, and call the faults that it shows now dealt with.

    A fault that happens after it was shown stays, and so does a GPU that does not answer.

    \b
    Examples:
      tessera uncordon node-a/gpu-3
      tessera uncordon GPU-0f3c9d1e-7a41-4b8e-9c60-1d2e3f4a5b6c -o json
    """
    cluster = Cluster(kubeconfig, driver_name)
    name = find(gpu, cluster.names())
    faults = faults_of(name, cluster.slices, cluster.plans.get(name.node))
    stamps = [fault.stamp for fault in faults if fault.stamp is not None]
    cordoned = any(name.uuid == text.partition(" ")[0] for text in cluster.spec(name.node).cordoned)
    if cordoned or stamps:
        cleared = [str(ClearedFaults(name.uuid, max(stamps)))] if stamps else []
        cluster.edit(name.node, lambda spec: _uncordoned(spec, name, cleared))
    dealt = _values(fault for fault in faults if fault.stamp is not None)
    left = _values(fault for fault in faults if fault.stamp is None)
    _say(output, name, _told(name, cordoned, dealt, left), {"cordoned": False, "cleared": dealt, "left": left})


class Cluster:
    """The slices of one driver and the plans of all nodes, as they are when the command starts.

    Raises ApiError where they can't be read, EnvironmentFault where there is no cluster to ask.
    """

    def __init__(self, kubeconfig: Path | None, driver_name: str) -> None:
        self._client = client_of(kubeconfig, USER_AGENT)
        self.slices = self._list(f"{GROUP}/resourceslices", {"fieldSelector": f"spec.driver={driver_name}"})
        try:
            found = [msgspec.convert(item, GpuNodePlan) for item in self._list(PATH, {})]
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            raise EnvironmentFault(
                f"the cluster knows no {KIND}, where cordons are kept: install the chart's CRD (docs/install.md)"
            ) from error
        except msgspec.ValidationError as error:
            raise StateError(f"a {KIND} can't be read: {error}") from error
        self.plans = {plan.metadata.name: plan for plan in found}

    def names(self) -> list[GpuName]:
        return names_of(self.slices, self.plans.values())

    def spec(self, node: str) -> PlanSpec:
        return self.plans[node].spec if node in self.plans else PlanSpec()

    def edit(self, node: str, change: Callable[[PlanSpec], Object]) -> None:
        """Merge what ``change`` makes of the plan's spec into it; a node without a plan gets one."""
        for tries_left in reversed(range(TRIES)):
            try:
                self._write(node, change)
                return
            except ApiError as error:
                if error.status != CONFLICT or not tries_left:
                    raise
            found = self._client.get_object(f"{PATH}/{node}")
            self.plans[node] = msgspec.convert(found, GpuNodePlan)

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

    def _list(self, path: str, selector: Mapping[str, str]) -> list[Object]:
        return list(objects(self._client, path, selector))


def _cordoned(spec: PlanSpec, name: GpuName, reason: str | None) -> Object:
    line = f"{name.uuid} {_reason(spec, name, reason)}".rstrip()
    return {"cordoned": [*_others(spec.cordoned, name), line]}


def _reason(spec: PlanSpec, name: GpuName, reason: str | None) -> str:
    """On one line; the reason of an earlier cordon where none is given."""
    return spec.cordons.get(name.uuid, "") if reason is None else " ".join(reason.split())


def _uncordoned(spec: PlanSpec, name: GpuName, cleared: Sequence[str]) -> Object:
    kept = spec.cleared if not cleared else _others(spec.cleared, name)
    return {"cordoned": _others(spec.cordoned, name), "cleared": [*kept, *cleared]}


def _others(lines: Sequence[str], name: GpuName) -> list[str]:
    """The lines about other GPUs."""
    return [text for text in lines if text.partition(" ")[0] != name.uuid]


def _values(faults: Iterable[Fault]) -> list[str]:
    """Each once: the taints of a GPU's devices and its node's plan tell the same."""
    return list(dict.fromkeys(fault.value for fault in faults))


def _told(name: GpuName, cordoned: bool, dealt: Sequence[str], left: Sequence[str]) -> str:
    gpu = f"{name} ({name.uuid})"
    if cordoned:
        lines = [f"uncordoned {gpu}", *(f"dealt with: {value}" for value in dealt)]
    elif dealt:
        lines = [f"dealt with on {gpu}: {', '.join(dealt)}", "it was not cordoned"]
    else:
        lines = [f"{gpu} was not cordoned"]
    return "\n".join([*lines, *(f"still there: {value}, which the node plugin itself ends" for value in left)])


def _say(output: str, name: GpuName, text: str, facts: Mapping[str, Any]) -> None:
    named = {"node": name.node, "gpu": f"gpu-{name.number}", "uuid": name.uuid}
    click.echo(json.dumps([{**named, **facts}], indent=2) if output == "json" else text)
