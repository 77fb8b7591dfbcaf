"""A second DRA driver, for RDMA NICs: what it would publish for a simulated node.

It spells ``resource.kubernetes.io/pcieRoot`` as NIC drivers do, from the node's sysfs, and knows nothing of GPUs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from driver.hardware.pci_distance import Nic, find_nics

NIC_DRIVER = "nic.example.com"
NIC_CLASS = "rdma-nic"


def nic_class() -> dict[str, Any]:
    """The DeviceClass an admin of that driver would install."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": NIC_CLASS},
        "spec": {"selectors": [{"cel": {"expression": f'device.driver == "{NIC_DRIVER}"'}}]},
    }


def nic_slice(node: str, root: Path) -> dict[str, Any]:
    """One slice with every RDMA NIC of the node whose host root is ``root``."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{node}-{NIC_DRIVER}"},
        "spec": {
            "driver": NIC_DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [_device(nic) for nic in find_nics(root)],
        },
    }


def nic_device(rdma_name: str) -> str:
    """The device's name: a DNS label, which ``mlx5_0`` is not."""
    return rdma_name.replace("_", "-")


def _device(nic: Nic) -> dict[str, Any]:
    attributes: dict[str, dict[str, Any]] = {
        "rdmaDevice": {"string": nic.name},
        "resource.kubernetes.io/pciBusID": {"string": nic.place.address},
    }
    if nic.place.root is not None:
        attributes["resource.kubernetes.io/pcieRoot"] = {"string": nic.place.root}
    if nic.place.numa_node is not None:
        attributes["resource.kubernetes.io/numaNode"] = {"int": nic.place.numa_node}
    return {"name": nic_device(nic.name), "attributes": attributes}
