"""``tessera cordon`` and ``uncordon``: exclude a GPU from new pods, and admit it again.

Both write to the GpuNodePlan of the GPU's node, which its plugin follows with or without a controller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from driver.kube.client import Object
from driver.model.plan import ClearedFaults, PlanSpec
from tessera.cluster_options import client_of, with_driver_name, with_kubeconfig
from tessera.commands.maintenance.plan_editor import PlanEditor, other_lines
from tessera.gpu_names_and_faults import GpuName, faults_of, find
from tessera.tables_and_drawings import show, with_output


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
    cluster = PlanEditor(client_of(kubeconfig, "tessera-command"), driver_name)
    name = find(gpu, cluster.names())
    why = cluster.cordon(name, reason)
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
    cluster = PlanEditor(client_of(kubeconfig, "tessera-command"), driver_name)
    name = find(gpu, cluster.names())
    faults = faults_of(name, cluster.slices, cluster.plans.get(name.node))
    stamps = [fault.stamp for fault in faults if fault.stamp is not None]
    cordoned = any(name.uuid == text.partition(" ")[0] for text in cluster.spec(name.node).cordoned)

    def uncordoned(spec: PlanSpec) -> Object:
        cleared = (
            [*other_lines(spec.cleared, name), str(ClearedFaults(name.uuid, max(stamps)))] if stamps else spec.cleared
        )
        return {"cordoned": other_lines(spec.cordoned, name), "cleared": list(cleared)}

    if cordoned or stamps:
        cluster.edit(name.node, uncordoned)
    # The taints of devices and the plan's status report the same faults.
    dealt = list(dict.fromkeys(fault.value for fault in faults if fault.stamp is not None))
    remaining = list(dict.fromkeys(fault.value for fault in faults if fault.stamp is None))
    facts = {"cordoned": False, "cleared": dealt, "left": remaining}
    _say(output, name, _outcome(name, cordoned, dealt, remaining), facts)


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
