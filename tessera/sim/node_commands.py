"""``tessera sim``: lists simulated nodes, shows their GPUs and partitions, and runs fleets of them."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from driver.config.flag_values import SIMULATED_NODES, check_driver_name
from driver.config.log_options import with_logs
from driver.errors import UsageError
from driver.model.plan import PlanMode
from driver.simulator.description import known_descriptions
from driver.simulator.node import SimulatedNode, describe
from tessera.cluster_options import check_flag, client_of, with_driver_name, with_kubeconfig
from tessera.sim.fault import fault, find_roots, with_host_root
from tessera.sim.load import claim_devices, load
from tessera.tables_and_drawings import Span, cell_width, columns, draw_placement, draw_slices, show, with_output

FLEET_NODE_LIMIT = 10_000
FLEET_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,48}[a-z0-9])?")
"""Valid names of a fleet: the prefix of its nodes' names, and the value of a label."""

FLEET_MODES = {"follow": PlanMode.PLANNED, "alone": PlanMode.STANDALONE}
STATE_INTERVAL_SECONDS = 10.0


@click.group()
def sim() -> None:
    """Work with simulated GPU nodes: try Tessera without a GPU.

    \b
    Examples:
      tessera node --node-name n1 --kubeconfig ~/.kube/config --gpus sim:dgx-h100
      tessera sim smi
      tessera sim fault lose --gpu 3
      tessera sim load default/train --sm 0.8 --memory 7Gi
    """


sim.add_command(fault)
sim.add_command(load)


@sim.command("list")
@with_output("table", "json")
def list_nodes(output: str) -> None:
    """List the nodes that --gpus sim:NAME accepts.

    \b
    Examples:
      tessera sim list
      tessera sim list -o json
    """
    summaries: list[dict[str, Any]] = [
        {
            "name": node.name,
            "description": node.summary,
            "product": node.product,
            "gpuCount": len(node.gpus),
            "memoryMiB": node.gpu_product.memory_mib,
            "driverVersion": node.driver_version,
            "memorySlices": node.gpu_product.memory_slices,
            "migProfiles": [profile.name for profile in node.gpu_product.profiles],
            "estimates": list(node.gpu_product.estimates),
        }
        for node in known_descriptions().values()
    ]
    rows = []
    for node in summaries:
        memory = f"{node['memoryMiB'] / 1024:.1f} GiB"
        rows.append([node["name"], node["product"], str(node["gpuCount"]), memory, node["description"]])
    show(output, summaries, columns(["NAME", "PRODUCT", "GPUS", "MEMORY", "DESCRIPTION"], rows))


@sim.command()
@with_host_root(f"every node under {SIMULATED_NODES}")
@with_output("table", "json")
def smi(host_root: Path | None, output: str) -> None:
    """Print the GPUs and partitions of simulated nodes, and the claims that hold them.

    Only reads: safe while a node plugin works on the same node.

    \b
    Examples:
      tessera sim smi
      tessera sim smi --host-root /tmp/node-1 -o json
    """
    nodes = [SimulatedNode.attach(root) for root in ([host_root] if host_root else find_roots(SIMULATED_NODES))]
    described = [(node, describe(node, holders(node.root))) for node in nodes]
    text = "\n\n".join(render(node, gpus) for node, gpus in described)
    show(output, [gpu for _, gpus in described for gpu in gpus], text)


@sim.command()
@click.option(
    "--nodes", type=click.IntRange(1, FLEET_NODE_LIMIT), default=100, show_default=True, help="Number of nodes."
)
@click.option(
    "--gpus", default="dgx-h100", show_default=True, help="GPUs of each node: NAME (`tessera sim list`) or FILE."
)
@click.option("--name", default="sim", show_default=True, help="Prefix of the nodes' names: NAME-0000, ...")
@with_kubeconfig
@with_driver_name
@click.option("--namespace", default="tessera", show_default=True, help="Namespace of the controller's heartbeat.")
@click.option(
    "--mode",
    type=click.Choice(list(FLEET_MODES)),
    default="follow",
    show_default=True,
    help="follow: offer what the plans list, or whatever fits without a heartbeat; alone: always whatever fits.",
)
@click.option("--leases/--no-leases", default=True, show_default=True, help="Renew the nodes' Leases, as kubelets do.")
@with_logs("warning")
def fleet(
    *,
    nodes: int,
    gpus: str,
    name: str,
    kubeconfig: Path | None,
    driver_name: str,
    namespace: str,
    mode: str,
    leases: bool,
) -> None:
    """Run many simulated GPU nodes in one process.

    Needs a cluster admin, and a cluster that has no other pods. Ctrl-C removes the nodes with their slices and plans.

    \b
    Examples:
      tessera sim fleet --nodes 100 --kubeconfig ~/.kube/config
      tessera sim fleet --nodes 1000 --gpus dgx-h100 --name big --no-leases
    """
    from tessera.sim.fleet.fleet import discover, running_fleet
    from tessera.sim.fleet.simulated_plugin import FleetSettings

    if not FLEET_NAME.fullmatch(name):
        raise UsageError(f"--name {name}: lower-case letters, digits and inner dashes, at most 50, such as sim")
    check_flag("--driver-name", driver_name, check_driver_name)
    settings = FleetSettings(name, nodes, discover(gpus), driver_name, namespace, FLEET_MODES[mode], leases)
    client, printed = client_of(kubeconfig, "tessera-fleet"), ""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with running_fleet(client, settings) as running:
            while True:
                if printed != str(running):
                    printed = str(running)
                    click.echo(f"{time.strftime('%H:%M:%S')}  {printed}")
                time.sleep(STATE_INTERVAL_SECONDS)
    except KeyboardInterrupt:
        click.echo("all objects of the fleet are removed")


def holders(root: Path) -> dict[str, str]:
    """The claims that hold devices of a simulated node: "namespace/name" by UUID of GPU or MIG device."""
    claims: dict[str, list[str]] = {}
    for claim, uuids in claim_devices(root):
        for uuid in uuids:
            claims.setdefault(uuid, []).append(claim)
    return {uuid: ", ".join(names) for uuid, names in claims.items()}


def render(node: SimulatedNode, gpus: Sequence[dict[str, Any]]) -> str:
    description = node.description
    title = (
        f"{click.style(description.name, bold=True)}   {len(gpus)} x {description.product}   "
        f"driver {description.driver_version}   CUDA {description.cuda_driver_version}   simulated in {node.root}"
    )
    rows = []
    for gpu in gpus:
        mode = gpu["migMode"] if gpu["migMode"] == gpu["migModePending"] else f"{gpu['migMode']}*"
        memory = f"{gpu['memoryUsed']} / {gpu['memoryTotal']} MiB"
        names = (str(gpu["index"]), gpu["name"], gpu["uuid"], gpu["pciBusId"])
        rows.append([*names, memory, mode, gpu["holder"] or "-"])
    lines = [title, columns(["GPU", "NAME", "UUID", "BUS ID", "MEMORY", "MIG", "HOLDER"], rows)]
    if any(gpu["migMode"] != gpu["migModePending"] for gpu in gpus):
        lines.append("* another MIG mode is pending: it needs a GPU reset")
    for name, field in (("Time-slice", "timeSlice"), ("Compute mode", "computeMode")):
        changed = [f"GPU {gpu['index']} {gpu[field]}" for gpu in gpus if gpu[field].upper() != "DEFAULT"]
        if changed:
            lines.append(f"{name}: {', '.join(changed)}")
    return "\n".join([*lines, *_render_partitions(description.gpu_product.memory_slices, gpus)])


def _render_partitions(slices: int, gpus: Sequence[dict[str, Any]]) -> list[str]:
    rows: list[list[str]] = []
    spans: dict[int, list[Span]] = {}
    for gpu in gpus:
        for device in gpu["migDevices"]:
            start, size = device["placement"]["start"], device["placement"]["size"]
            compute = "-" if device["computeInstance"] is None else str(device["computeInstance"])
            drawn = f"{draw_placement(slices, start, size)} {start}:{size}"
            row = [str(gpu["index"]), str(device["gpuInstance"]), compute, device["profile"], drawn]
            rows.append([*row, device["uuid"] or "-", device["holder"] or "-"])
            spans.setdefault(gpu["index"], []).append(Span(start, size, device["profile"]))
    if not rows:
        return ["No partitions."]
    width = cell_width(span for spans_of_gpu in spans.values() for span in spans_of_gpu)
    drawings = [f"GPU {index}  {draw_slices(slices, of_gpu, width)}" for index, of_gpu in spans.items()]
    return [columns(["GPU", "GI", "CI", "PROFILE", "PLACEMENT", "MIG UUID", "HOLDER"], rows), *drawings]
