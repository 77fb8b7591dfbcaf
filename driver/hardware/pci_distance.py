"""PCI places of GPUs and NICs and the distance between them, from sysfs.

The levels are those of ``nvidia-smi topo -m``: PIX at most one PCIe switch between them, PXB several,
PHB the host bridge, NODE two host bridges of one NUMA node, SYS the link between NUMA nodes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from pathlib import Path

from driver.model.gpu import Gpu

PCI_ROOT = re.compile(r"pci[0-9a-f]{4}:[0-9a-f]{2}")


def pci_address(nvml_bus_id: str) -> str:
    """NVML's ``00000000:1B:00.0`` in the kernel's form: ``0000:1b:00.0``.

    Only the four leading digits of the domain are removed; a non-zero domain stays.
    """
    domain, rest = nvml_bus_id.lower().split(":", 1)
    return f"{domain[-4:]}:{rest}"


def pcie_root(root: Path, address: str) -> str | None:
    """The PCIe root complex of a device, such as ``pci0000:1a``, or None if unknown.

    This is the value of the standard attribute ``resource.kubernetes.io/pcieRoot`` (KEP-4381).
    """
    return next((part for part in _sysfs_path(root, address) if PCI_ROOT.fullmatch(part)), None)


def numa_node(root: Path, address: str) -> int | None:
    """The NUMA node of a PCI device, or None if unknown."""
    text = _sysfs_text(root, address, "numa_node")
    return int(text) if text.isdecimal() else None


def _sysfs_path(root: Path, address: str) -> tuple[str, ...]:
    """The folders above a PCI device and its own, from the root complex down; empty if unknown."""
    try:
        return (root / "sys/bus/pci/devices" / address).readlink().parts
    except OSError:
        return ()


def _sysfs_text(root: Path, address: str, name: str) -> str:
    try:
        return (root / "sys/bus/pci/devices" / address / name).read_text().strip()
    except OSError:
        return ""


SWITCH_BRIDGES = 2
"""A PCIe switch shows as two bridges on the way: one down-port to each device below its common up-port."""


class Level(StrEnum):
    """Distance between two devices, from near to far."""

    SELF = "X"
    PIX = "PIX"
    PXB = "PXB"
    PHB = "PHB"
    NODE = "NODE"
    SYS = "SYS"


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a PCI device: root complex, path of bridges down to the device, NUMA node and CPUs.

    ``cpus`` is the kernel's list of CPUs near it, such as ``0-55,112-167``.
    """

    address: str
    root: str | None
    path: tuple[str, ...]
    numa_node: int | None
    cpus: str | None


@dataclass(frozen=True, slots=True)
class Nic:
    """An RDMA NIC by the name of its device (``mlx5_0``)."""

    name: str
    place: Place


def place_of(root: Path, address: str) -> Place:
    """Return the place of a PCI device; unknown values are None or empty."""
    parts, top = _sysfs_path(root, address), pcie_root(root, address)
    path = parts[parts.index(top) + 1 :] if top in parts else ()
    cpus = _sysfs_text(root, address, "local_cpulist") or None
    return Place(address, top, tuple(path), numa_node(root, address), cpus)


def find_nics(root: Path) -> list[Nic]:
    """Return the node's RDMA devices in the order of their numbers."""
    folder = root / "sys/class/infiniband"
    try:
        names = sorted((entry.name for entry in folder.iterdir()), key=lambda name: (len(name), name))
    except OSError:
        return []
    addresses = ((name, _pci_address_of(folder / name)) for name in names)
    return [Nic(name, place_of(root, address)) for name, address in addresses if address is not None]


def level(one: Place, other: Place) -> Level:
    if one.address == other.address:
        return Level.SELF
    if one.root is None or one.root != other.root:
        same_node = one.numa_node is not None and one.numa_node == other.numa_node
        return Level.NODE if same_node else Level.SYS
    common = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one.path, other.path, strict=False))))
    if not common:
        return Level.PHB
    bridges = len(one.path) + len(other.path) - 2 * common - 2
    return Level.PIX if bridges <= SWITCH_BRIDGES else Level.PXB


def links_between(one: Gpu, other: Gpu) -> int:
    """Count the NVLinks between two GPUs, direct or through the node's switches.

    Through switches every link of the narrower GPU reaches the other (NVSwitch is non-blocking).
    """
    if one.nvlink is None or other.nvlink is None or one.nvlink_clique != other.nvlink_clique:
        return 0
    ends = (one.nvlink.peers.get(other.pci_bus_id), other.nvlink.peers.get(one.pci_bus_id))
    direct = min(filter(None, ends), default=0)
    return direct or min(end.nvlink.peers.get("switch", 0) for end in (one, other) if end.nvlink is not None)


def _pci_address_of(device: Path) -> str | None:
    """The PCI device behind a class device: the entry above ``infiniband/<name>``."""
    try:
        return device.resolve().parent.parent.name
    except OSError:
        return None
