"""``tessera topology``: distances between GPUs and NICs of this node, partitions and MIG profiles of its GPUs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from driver.config.node_configs import CONFIGS_KEY, NODE_CONFIGS, read_configs
from driver.errors import FatalError
from driver.hardware.host import GpuFault
from driver.hardware.pci_distance import Nic, Place, find_nics, level, links_between, place_of
from driver.kube.client import KubeClient
from driver.kube.get_and_list import config_map_text, read_all
from driver.kube.types import Node
from driver.model.gpu import Gpu, Partition
from driver.model.shared_memory import SharedMemory
from kubelet_plugin.inventory.open_hardware import open_host
from kubelet_plugin.plan.instructions import NODES_PATH
from kubelet_plugin.settings import node_settings
from tessera.cluster_options import client_of, find_plans, with_kubeconfig
from tessera.config_preview import as_table, preview, read_file
from tessera.tables_and_drawings import Span, columns, draw_slices, show, with_output

RELATIONS_LEGEND = """\
NV#   joined by # NVLinks                         PHB   over one PCIe host bridge (CPU)
PIX   at most one PCIe switch between them        NODE  over host bridges of one NUMA node
PXB   several PCIe switches between them          SYS   over the link between NUMA nodes"""


GPU_COLUMNS = {
    "GPU": "index",
    "NAME": "productName",
    "BUS ID": "pciBusID",
    "PCIE ROOT": "pcieRoot",
    "NVLINK CLIQUE": "nvlinkClique",
    "FABRIC CLIQUE": "fabricClique",
    "MIG": "migMode",
    "UUID": "uuid",
}
"""Keys of the JSON output by column of the table of GPUs."""


@dataclass(frozen=True)
class Topology:
    """The output of the command: ``places`` are of GPUs and NICs, ``partitions`` and ``shared`` of each GPU."""

    gpus: Sequence[Gpu]
    nics: Sequence[Nic]
    places: Sequence[Place]
    partitions: Sequence[Sequence[Partition]]
    faults: Sequence[GpuFault]
    shared: Sequence[SharedMemory | None]

    def relation(self, one: int, other: int) -> str:
        gpus = one != other and max(one, other) < len(self.gpus)
        links = links_between(self.gpus[one], self.gpus[other]) if gpus else 0
        return f"NV{links}" if links else level(self.places[one], self.places[other]).value


@click.command()
@click.option("--gpus", help="Source of the GPUs: nvml, sim:NAME or sim:FILE.  [default: nvml]")
@click.option("--host-root", type=click.Path(path_type=Path), help="The host's root directory as this process sees it.")
@click.option("--shared", help="Show how claims would share GPUs by memory: as `tessera node --shared`.")
@click.option("--nvml-library", type=click.Path(path_type=Path), help="Path of libnvidia-ml.so.1.  [default: searched]")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="Show instead which settings each node of the cluster would get from the nodeConfigs in this file of values.",
)
@with_kubeconfig
@click.option("--namespace", default="tessera", show_default=True, help="Namespace of the release, for --config.")
@with_output("table", "json")
def topology(output: str, config: Path | None, kubeconfig: Path | None, namespace: str, **flags: Any) -> None:
    """Show the distances between GPUs and NICs, NVLink cliques, the partitions of each GPU, and its MIG profiles.

    Only reads. With --gpus sim:NAME and no --host-root a temporary node is simulated. With --config: what an edit of
    nodeConfigs would change, node by node (exit code 1 if a node could not have its configuration).

    \b
    Examples:
      tessera topology
      tessera topology --gpus sim:dgx-h100
      tessera topology --shared "NVIDIA L4=time-slicing"
      tessera topology --config values.yaml
    """
    if config is not None:
        _show_preview(output, config, client_of(kubeconfig, "tessera-command"), namespace)
        return
    settings = node_settings(node_name="this-node", sim_latency="zero", **flags)
    with open_host(settings, lasting=False) as (host, paths):
        discovery, nics = host.discover(), find_nics(paths.root)
        places = [place_of(paths.root, gpu.pci_bus_id) for gpu in discovery.gpus] + [nic.place for nic in nics]
        partitions = [host.partitions(gpu) for gpu in discovery.gpus]
    for name in settings.shared.unmatched(discovery.gpus):
        click.secho(f"--shared {name}: no GPU here has that name", fg="yellow", err=True)
    sharing = settings.sharing
    shared = [sharing.memory_of(gpu, sharing.strategy_of(gpu)) for gpu in discovery.gpus]
    layout = Topology(discovery.gpus, nics, places, partitions, discovery.faults, shared)
    gpus = [_gpu_as_json(layout, index) for index in range(len(layout.gpus))]
    show(output, gpus, _as_text(layout, gpus))


def _show_preview(output: str, file: Path, client: KubeClient, namespace: str) -> None:
    then = read_file(file)
    now = read_configs(config_map_text(client, namespace, NODE_CONFIGS, CONFIGS_KEY))
    nodes = {node.metadata.name: node.metadata.labels for node in read_all(client, NODES_PATH, Node)}
    rows = preview(now, then, nodes, find_plans(client) or [])
    show(output, rows, as_table(rows))
    if any(row["error"] for row in rows):
        sys.exit(FatalError.exit_code)


def _as_text(found: Topology, gpus: Sequence[dict[str, Any]]) -> str:
    parts = [_matrix(found), "", RELATIONS_LEGEND]
    if found.nics:
        parts += ["", "\n".join(f"NIC{n}  {nic.name}  {nic.place.address}" for n, nic in enumerate(found.nics))]
    rows = [[_known(gpu[key]) for key in GPU_COLUMNS.values()] for gpu in gpus]
    parts += ["", columns(list(GPU_COLUMNS), rows), ""]
    for gpu in gpus:
        spans = [Span(found["start"], found["size"], found["profile"] or "?") for found in gpu["partitions"]]
        parts.append(f"GPU{gpu['index']:<3} {draw_slices(gpu['memorySlices'], spans, width=8)}")
    if any(found.shared):
        memory = [gpu["shared"] or {"strategy": None, "gib": None} for gpu in gpus]
        rows = [[str(gpu["index"]), *map(_known, of.values())] for gpu, of in zip(gpus, memory, strict=True)]
        parts += ["", columns(["GPU", "SHARED BY", "GIB FOR CLAIMS"], rows)]
    if profiles := dict.fromkeys((gpu.product_name, profile) for gpu in found.gpus for profile in gpu.profiles):
        rows = [
            [product, profile.name, str(profile.max_instances), f"{profile.memory_bytes / 2**30:.1f} GiB"]
            for product, profile in profiles
        ]
        parts += ["", columns(["PRODUCT", "MIG PROFILE", "FIT ON A GPU", "MEMORY"], rows)]
    parts += [f"{fault}: left out: {fault.reason}" for fault in found.faults]
    return "\n".join(parts)


def _matrix(found: Topology) -> str:
    names = [*(f"GPU{gpu.index}" for gpu in found.gpus), *(f"NIC{n}" for n in range(len(found.nics)))]
    rows = []
    for i, (name, place) in enumerate(zip(names, found.places, strict=True)):
        affinity = (place.cpus or "-", _known(place.numa_node)) if i < len(found.gpus) else ("", "")
        rows.append([name, *(found.relation(i, j) for j in range(len(names))), *affinity])
    return columns(["", *names, "CPU AFFINITY", "NUMA"], rows)


def _gpu_as_json(found: Topology, index: int) -> dict[str, Any]:
    gpu, place, count = found.gpus[index], found.places[index], len(found.gpus)
    shared = found.shared[index]
    names = {profile.id: profile.name for profile in gpu.profiles}
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "productName": gpu.product_name,
        "pciBusID": gpu.pci_bus_id,
        "pcieRoot": gpu.pcie_root,
        "numaNode": gpu.numa_node,
        "cpuAffinity": place.cpus,
        "nvlinkClique": gpu.nvlink_clique,
        "fabricClique": gpu.fabric_clique,
        "migMode": gpu.mig_mode.value,
        "memorySlices": gpu.memory_slices,
        "profiles": [
            {"name": profile.name, "maxInstances": profile.max_instances, "memoryBytes": profile.memory_bytes}
            for profile in gpu.profiles
        ],
        "shared": None if shared is None else {"strategy": shared.strategy.value, "gib": shared.gib},
        "gpus": {other.uuid: found.relation(index, j) for j, other in enumerate(found.gpus) if j != index},
        "nics": {nic.name: found.relation(index, count + n) for n, nic in enumerate(found.nics)},
        "partitions": [
            {"profile": names.get(partition.profile_id), **asdict(partition.placement), "uuid": partition.uuid}
            for partition in found.partitions[index]
        ],
    }


def _known(value: object) -> str:
    return "-" if value is None else str(value)
