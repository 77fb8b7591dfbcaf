"""The files a GPU node shows: sysfs and procfs, device nodes, the driver's libraries.

Everything lies under the node's root at the path it has on a real machine. Building is repeatable: what is
there stays, what is missing is made. ``/dev/nvidia-caps`` is absent, as on hosts without
nvidia-modprobe: who needs a capability device must take its number from ``capabilities``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import sys
import uuid
from pathlib import Path

from . import smi_tool
from .capabilities import CONFIG_MINOR, MONITOR_MINOR, access_text, minors_text
from .description import GpuDescription, NodeDescription, Place
from .files import link, make_folder, write_file

LIBRARY_FOLDER = "usr/lib/x86_64-linux-gnu"

# As a host with driver 580 lists them. 195 is nvidia's registered major, the others are assigned at load.
_PROC_DEVICES = """\
Character devices:
  1 mem
  5 /dev/tty
 10 misc
195 nvidia
195 nvidia-modeset
195 nvidiactl
234 nvidia-nvswitch
235 nvidia-caps
236 nvidia-caps-imex-channels
511 nvidia-uvm

Block devices:
259 blkext
"""

# Transfer rate of one lane by PCIe generation, as sysfs prints it.
_LINK_SPEED = {
    3: "8.0 GT/s PCIe",
    4: "16.0 GT/s PCIe",
    5: "32.0 GT/s PCIe",
    6: "64.0 GT/s PCIe",
}

_CLASS_3D_CONTROLLER = "0x030200"
_CLASS_INFINIBAND = "0x020700"
_CLASS_BRIDGE = "0x060400"
_NVIDIA = "0x10de"
_MELLANOX = "0x15b3"
_CONNECTX_7 = "0x1021"
_BROADCOM = "0x1000"
_PCIE_SWITCH = "0xc030"


def build(description: NodeDescription, root: Path) -> None:
    """Make what is missing of the node's files.

    :raises OSError: ``root`` can't be written
    """
    for nic in description.nics:
        parents = _bridges_in_sysfs(nic, root / "sys")
        _nic_in_sysfs(nic.pci_bus_id, nic.rdma_device, _place_files(nic), parents, root / "sys")
    for index, gpu in enumerate(description.gpus):
        _gpu_in_sysfs(description, gpu, root / "sys")
        _gpu_in_procfs(description, index, root / "proc")
        _device_node(root / f"dev/nvidia{index}")
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"):
        _device_node(root / "dev" / name)
    _procfs(description, root / "proc")
    _driver_files(description, root)


def remove_gpu(gpu: GpuDescription, root: Path) -> None:
    """Take a GPU out of sysfs and procfs; :func:`build` brings it back. Its device node stays, as on hardware."""
    bus_id = sysfs_bus_id(gpu.pci_bus_id)
    link = root / "sys/bus/pci/devices" / bus_id
    if link.exists():
        shutil.rmtree(link.resolve())
    link.unlink(missing_ok=True)
    shutil.rmtree(root / "proc/driver/nvidia/gpus" / bus_id, ignore_errors=True)


def write_boot_id(root: Path) -> None:
    """Give the node a new boot id."""
    write_file(_boot_id(root), f"{uuid.uuid4()}\n", 0o444)


def sysfs_bus_id(bus_id: str) -> str:
    """The kernel's spelling: at least four digits of domain, lower case, as ``0000:1b:00.0``."""
    domain, _, rest = bus_id.partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _gpu_in_sysfs(description: NodeDescription, gpu: GpuDescription, sys: Path) -> None:
    product = description.gpu_product
    common = _place_files(gpu)
    highest = _LINK_SPEED[product.pcie_generation]
    current = _LINK_SPEED[min(product.pcie_generation, description.pcie_generation or product.pcie_generation)]
    parents = _bridges_in_sysfs(gpu, sys)
    files = {
        "vendor": _NVIDIA,
        "device": f"{product.pci_device_id >> 16:#06x}",
        "class": _CLASS_3D_CONTROLLER,
        "current_link_speed": current,
        "current_link_width": "16",
        "max_link_speed": highest,
        "max_link_width": "16",
    }
    _pci_device(sys, parents, sysfs_bus_id(gpu.pci_bus_id), files | common)
    if gpu.nic is not None:
        _nic_in_sysfs(gpu.nic.pci_bus_id, gpu.nic.rdma_device, common, parents, sys)


def _bridges_in_sysfs(place: Place, sys: Path) -> list[str]:
    """Make the bridges above a device; the names of the folders it lies in."""
    parents = [place.pcie_root, *(sysfs_bus_id(bridge) for bridge in place.bridges)]
    for depth in range(1, len(parents)):
        bridge = {"vendor": _BROADCOM, "device": _PCIE_SWITCH, "class": _CLASS_BRIDGE, **_place_files(place)}
        _pci_device(sys, parents[:depth], parents[depth], bridge)
    return parents


def _nic_in_sysfs(nvml_bus_id: str, rdma_device: str, common: dict[str, str], parents: list[str], sys: Path) -> None:
    bus_id = sysfs_bus_id(nvml_bus_id)
    files = {"vendor": _MELLANOX, "device": _CONNECTX_7, "class": _CLASS_INFINIBAND}
    folder = _pci_device(sys, parents, bus_id, files | common)
    make_folder(folder / "infiniband" / rdma_device)
    target = os.path.relpath(folder / "infiniband" / rdma_device, sys / "class/infiniband")
    link(sys / "class/infiniband" / rdma_device, target)


def _place_files(place: Place) -> dict[str, str]:
    return {"numa_node": str(place.numa_node), "local_cpulist": place.cpus}


def _pci_device(sys: Path, parents: list[str], bus_id: str, files: dict[str, str]) -> Path:
    folder = sys.joinpath("devices", *parents, bus_id)
    for name, content in files.items():
        write_file(folder / name, f"{content}\n", 0o444)
    link(sys / "bus/pci/devices" / bus_id, "/".join(["../../../devices", *parents, bus_id]))
    return folder


def _gpu_in_procfs(description: NodeDescription, index: int, proc: Path) -> None:
    bus_id = sysfs_bus_id(description.gpus[index].pci_bus_id)
    information = (
        f"Model: \t\t {description.product}\n"
        f"GPU UUID: \t {description.gpu_uuid(index)}\n"
        "Bus Type: \t PCIe\n"
        f"Bus Location: \t {bus_id}\n"
        f"Device Minor: \t {index}\n"
        "GPU Excluded:\t No\n"
    )
    write_file(proc / f"driver/nvidia/gpus/{bus_id}/information", information, 0o444)
    if description.gpu_product.mig_capable:
        make_folder(proc / f"driver/nvidia/capabilities/gpu{index}/mig")


def _procfs(description: NodeDescription, proc: Path) -> None:
    version = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {description.driver_version}  (simulated)\n"
    write_file(proc / "driver/nvidia/version", version, 0o444)
    write_file(proc / "devices", _PROC_DEVICES, 0o444)
    mig = proc / "driver/nvidia/capabilities/mig"
    write_file(mig / "config", access_text(CONFIG_MINOR), 0o400)
    write_file(mig / "monitor", access_text(MONITOR_MINOR), 0o444)
    write_file(proc / "driver/nvidia-caps/mig-minors", minors_text(len(description.gpus)), 0o444)
    if not _boot_id(proc.parent).exists():
        write_boot_id(proc.parent)


def _boot_id(root: Path) -> Path:
    return root / "proc/sys/kernel/random/boot_id"


def _device_node(path: Path) -> None:
    # The null device swallows what a container writes. Where nobody may make one, a file has the name at least.
    if path.exists():
        return
    make_folder(path.parent)
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except OSError:
        write_file(path, "")
    else:
        path.chmod(0o666)


def _driver_files(description: NodeDescription, root: Path) -> None:
    version = description.driver_version
    folder = root / LIBRARY_FOLDER
    for name in ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler"):
        write_file(folder / f"{name}.so.{version}", f"{name} {version}, simulated\n", 0o755)
        link(folder / f"{name}.so.1", f"{name}.so.{version}")
    write_file(root / "usr/bin/nvidia-smi", _smi_script(description), 0o755)


def _smi_script(description: NodeDescription) -> str:
    """The program on the host; in a container, where Python and the node's directory are away, a line of text."""
    tool = f"{shlex.quote(sys.executable)} -I -S {shlex.quote(smi_tool.__file__)}"
    banner = f"nvidia-smi: simulated by Tessera, driver {description.driver_version}, node {description.name}"
    return f"""\
#!/bin/sh
case "$1" in
  compute-policy|-i|-c) exec {tool} "${{0%/usr/bin/nvidia-smi}}" "$@" ;;
esac
echo "{banner}"
"""
