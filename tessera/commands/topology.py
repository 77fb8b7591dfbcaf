"""``tessera topology``: distances between GPUs and NICs of this node, and the partitions of its GPUs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from driver.hardware.host import GpuFault, Host
from driver.hardware.topology import Nic, Place, find_nics, level, links_between, place_of
from driver.model.gpu import Gpu, Partition
from kubelet_plugin.inventory.hardware import open_host
from kubelet_plugin.settings import node_settings
from tessera.output import columns
from tessera.slice_layout import Span, draw_slices

LEGEND = """\
NV#   joined by # NVLinks                         PHB   over one PCIe host bridge (CPU)
PIX   at most one PCIe switch between them        NODE  over host bridges of one NUMA node
PXB   several PCIe switches between them          SYS   over the link between NUMA nodes"""


@dataclass(frozen=True)
class Topology:
    """The output of the command. ``gpus``, ``places`` and ``partitions`` have the same indices."""

    gpus: Sequence[Gpu]
    places: Sequence[Place]
    partitions: Sequence[Sequence[Partition]]
    nics: Sequence[Nic]
    faults: Sequence[GpuFault]


@click.command()
@click.option("--gpus", help="nvml, sim:NAME or sim:FILE.  [default: nvml]")
@click.option("--host-root", type=click.Path(path_type=Path), help="Where this process sees the host's root directory.")
@click.option("--nvml-library", type=click.Path(path_type=Path), help="libnvidia-ml.so.1, if the linker can't find it.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def topology(output: str, **flags: Any) -> None:
    """Show the distances between GPUs and NICs, NVLink cliques, and the partitions of each GPU.

    Only reads. With --gpus sim:NAME and no --host-root a temporary node is simulated.

    \b
    Examples:
      tessera topology
      tessera topology --gpus sim:dgx-h100
      tessera topology --gpus sim:dgx-h100 --host-root /var/lib/tessera/sim/n1 -o json
    """
    settings = node_settings(node_name="this-node", sim_latency="zero", **flags)
    with open_host(settings, lasting=False) as (host, paths):
        found = read_topology(host, paths.root)
    click.echo(json.dumps(as_json(found), indent=2) if output == "json" else as_text(found))


def read_topology(host: Host, root: Path) -> Topology:
    """Read everything from the hardware. Raises HardwareError."""
    discovery = host.discover()
    return Topology(
        gpus=discovery.gpus,
        places=[place_of(root, gpu.pci_bus_id) for gpu in discovery.gpus],
        partitions=[host.partitions(gpu) for gpu in discovery.gpus],
        nics=find_nics(root),
        faults=discovery.faults,
    )


def relation(found: Topology, one: int, other: int) -> str:
    """The entry of the matrix for two GPUs, by index."""
    links = links_between(found.gpus[one], found.gpus[other]) if one != other else 0
    return f"NV{links}" if links else level(found.places[one], found.places[other]).value


def as_text(found: Topology) -> str:
    parts = [_matrix(found), "", LEGEND]
    if found.nics:
        parts += ["", "\n".join(f"NIC{n}  {nic.name}  {nic.place.address}" for n, nic in enumerate(found.nics))]
    parts += ["", _gpus(found), "", _layout(found)]
    parts += [f"{fault}: left out: {fault.reason}" for fault in found.faults]
    return "\n".join(parts)


def as_json(found: Topology) -> list[dict[str, Any]]:
    """One object per GPU."""
    return [_gpu_as_json(found, index) for index in range(len(found.gpus))]


def _matrix(found: Topology) -> str:
    gpus = [f"GPU{gpu.index}" for gpu in found.gpus]
    nics = [f"NIC{n}" for n in range(len(found.nics))]
    rows = [
        [
            name,
            *(relation(found, i, j) for j in range(len(gpus))),
            *(level(found.places[i], nic.place).value for nic in found.nics),
            found.places[i].cpus or "-",
            _known(found.places[i].numa_node),
        ]
        for i, name in enumerate(gpus)
    ]
    rows += [
        [
            name,
            *(level(nic.place, place).value for place in found.places),
            *(level(nic.place, other.place).value for other in found.nics),
            "",
            "",
        ]
        for name, nic in zip(nics, found.nics, strict=True)
    ]
    return columns(["", *gpus, *nics, "CPU AFFINITY", "NUMA"], rows)


def _gpus(found: Topology) -> str:
    rows = [
        [
            str(gpu.index),
            gpu.product_name,
            gpu.pci_bus_id,
            _known(gpu.pcie_root),
            _known(gpu.nvlink_clique),
            _known(gpu.fabric_clique),
            gpu.mig_mode.value,
            gpu.uuid,
        ]
        for gpu in found.gpus
    ]
    return columns(["GPU", "NAME", "BUS ID", "PCIE ROOT", "NVLINK CLIQUE", "FABRIC CLIQUE", "MIG", "UUID"], rows)


def _layout(found: Topology) -> str:
    """Each GPU's memory slices, drawn."""
    lines = []
    for gpu, partitions in zip(found.gpus, found.partitions, strict=True):
        names = {profile.id: profile.name for profile in gpu.profiles}
        spans = [Span(p.placement.start, p.placement.size, names.get(p.profile_id, "?")) for p in partitions]
        lines.append(f"GPU{gpu.index:<3} {draw_slices(gpu.memory_slices, spans, width=8)}")
    return "\n".join(lines)


def _gpu_as_json(found: Topology, index: int) -> dict[str, Any]:
    gpu, place = found.gpus[index], found.places[index]
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
        "gpus": {other.uuid: relation(found, index, j) for j, other in enumerate(found.gpus) if j != index},
        "nics": {nic.name: level(place, nic.place).value for nic in found.nics},
        "partitions": [
            {
                "profile": names.get(partition.profile_id),
                "start": partition.placement.start,
                "size": partition.placement.size,
                "uuid": partition.uuid,
            }
            for partition in found.partitions[index]
        ],
    }


def _known(value: object) -> str:
    return "-" if value is None else str(value)
