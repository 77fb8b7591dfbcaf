"""What the kernel knows about a GPU and NVML does not say."""

from __future__ import annotations

import re
from pathlib import Path

PCI_ROOT = re.compile(r"pci[0-9a-f]{4}:[0-9a-f]{2}")


def pci_address(nvml_bus_id: str) -> str:
    """NVML's ``00000000:1B:00.0`` as the kernel spells it: ``0000:1b:00.0``.

    Only the four leading digits of the domain go; a non-zero domain stays.
    """
    domain, rest = nvml_bus_id.lower().split(":", 1)
    return f"{domain[-4:]}:{rest}"


def pcie_root(root: Path, address: str) -> str | None:
    """The PCIe root complex above a device, spelled ``pci0000:1a``, or None if unknown.

    This is the value of the standard attribute ``resource.kubernetes.io/pcieRoot`` (KEP-4381).
    """
    link = root / "sys/bus/pci/devices" / address
    try:
        parts = link.readlink().parts
    except OSError:
        return None
    return next((part for part in parts if PCI_ROOT.fullmatch(part)), None)


def numa_node(root: Path, address: str) -> int | None:
    """The NUMA node a PCI device is attached to, or None where the kernel says -1 or nothing."""
    path = root / "sys/bus/pci/devices" / address / "numa_node"
    try:
        node = int(path.read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def local_cpus(root: Path, address: str) -> str | None:
    """The CPUs near a PCI device, as the kernel lists them (``0-55,112-167``), or None if it doesn't."""
    try:
        return (root / "sys/bus/pci/devices" / address / "local_cpulist").read_text().strip() or None
    except OSError:
        return None
