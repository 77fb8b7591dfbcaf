"""The file tree of a simulated node: sysfs, procfs with MIG capabilities, device nodes, the driver's libraries.

Files are under the node's root at the path that they have on a real machine. Building is repeatable: existing files
stay, missing ones are created. ``/dev/nvidia-caps`` is absent, as on hosts without nvidia-modprobe; the ``access``
files below ``/proc/driver/nvidia/capabilities`` name the minors of the capability devices. The numbering is that of
the kernel module (its ``mig-minors``): 1 and 2 for config and monitor, then for each GPU 15 GPU
instances of one minor each, every one followed by its 8 compute instances.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import stat
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from driver.simulator import smi_tool
from driver.simulator.description import GpuDescription, NodeDescription, PciPlace
from driver.simulator.mps import control_program, server_program

_LIBC = ctypes.CDLL(None, use_errno=True)
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE


def make_folder(path: str | Path) -> None:
    """Create a directory with mode 0755, and its parents; an existing one is not changed."""
    try:
        os.mkdir(path, 0o755)  # noqa: PTH102 - a node has a thousand files, and a Path costs as much as the call
    except FileNotFoundError:
        make_folder(os.path.dirname(path))  # noqa: PTH120
        make_folder(path)
    except FileExistsError:
        return
    os.chmod(path, 0o755)  # noqa: PTH101, S103 - whatever the umask


def write_file(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file atomically, unless it already has that content."""
    content = text.encode()
    folder, name = os.path.split(path)
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            if file.read() == content:
                return
    except FileNotFoundError:
        make_folder(folder)
    temporary = f"{folder}/.{name}.new"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        os.write(descriptor, content)
        os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)
    os.replace(temporary, path)  # noqa: PTH105


def swap_in(new: str, path: str) -> None:
    """Atomically replace ``path`` by the file ``new``.

    The files are exchanged if the file system supports it: after a rename over an existing file, ext4 starts to write
    the new file to disk, and the next change would wait for that.

    :raises OSError: the file cannot be replaced
    """
    if _LIBC.renameat2(_HERE, new.encode(), _HERE, path.encode(), _EXCHANGE) == 0:
        os.unlink(new)  # noqa: PTH108 - a Path costs as much as the call
    else:
        os.replace(new, path)  # noqa: PTH105


def link(path: Path, target: str) -> None:
    """Create a symbolic link, unless it exists."""
    if not os.path.islink(path):  # noqa: PTH114
        make_folder(os.path.dirname(path))  # noqa: PTH120
        os.symlink(target, path)  # noqa: PTH211


Instances = Mapping[int, Sequence[int]]
"""Ids of compute instances by id of their GPU instance."""

CONFIG_MINOR = 1
MONITOR_MINOR = 2
_FIRST_MINOR = 3
_COMPUTE_INSTANCES = 8
_GPU_INSTANCES = 15


def gpu_instance_minor(gpu: int, gi: int) -> int:
    """Minor of the capability device of a GPU instance."""
    return _FIRST_MINOR + (gpu * _GPU_INSTANCES + gi) * (1 + _COMPUTE_INSTANCES)


def compute_instance_minor(gpu: int, gi: int, ci: int) -> int:
    return gpu_instance_minor(gpu, gi) + 1 + ci


def access_text(minor: int) -> str:
    """Content of an ``access`` file. 292 is mode 0444 in decimal, as the kernel module prints it."""
    return f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"


class Capabilities:
    """The MIG capability files of a node's GPUs. Only the holder of a GPU's lock may call a method for it.

    The content of an instance's file depends only on its id. So the folder of a destroyed instance is kept until the
    id is used again: creating and removing files would be the most expensive work of a simulated GPU.
    """

    def __init__(self, root: Path) -> None:
        self._base = str(root / "proc/driver/nvidia/capabilities")
        self._aside = str(root / "sim/capabilities")

    def add(self, gpu: int, instances: Instances) -> None:
        """Create the files that ``instances`` lack."""
        for relative, minor in _wanted(gpu, instances):
            folder = f"{self._base}/gpu{gpu}/mig/{relative}"
            if os.access(f"{folder}/access", os.F_OK):
                continue
            # A folder that a killed process left incomplete is completed here.
            if not _moved(self._kept(gpu, relative), folder) or not os.access(f"{folder}/access", os.F_OK):
                write_file(Path(folder, "access"), access_text(minor), 0o444)

    def remove_stale(self, gpu: int, instances: Instances) -> None:
        """Remove the files that belong to none of ``instances``."""
        needed = {relative for relative, _ in _wanted(gpu, instances)}
        folder = f"{self._base}/gpu{gpu}/mig"
        # Compute instances first: their folders are kept separately.
        stale = [f"{gi}/{ci}" for gi in _folders(folder) for ci in _folders(f"{folder}/{gi}")]
        for relative in (*stale, *_folders(folder)):
            if relative not in needed:
                kept = self._kept(gpu, relative)
                if not _moved(f"{folder}/{relative}", kept):
                    make_folder(Path(self._aside))
                    if not _moved(f"{folder}/{relative}", kept):
                        shutil.rmtree(f"{folder}/{relative}")

    def _kept(self, gpu: int, relative: str) -> str:
        return f"{self._aside}/gpu{gpu}-{relative.replace('/', '-')}"


def _moved(source: str, target: str) -> bool:
    """Try to move a folder; False if source or target directory does not exist."""
    try:
        os.rename(source, target)  # noqa: PTH104 - a Path costs as much as the call
    except OSError:
        return False
    return True


def _wanted(gpu: int, instances: Instances) -> Iterator[tuple[str, int]]:
    for gi, compute in instances.items():
        yield f"gi{gi}", gpu_instance_minor(gpu, gi)
        for ci in compute:
            yield f"gi{gi}/ci{ci}", compute_instance_minor(gpu, gi, ci)


def _folders(path: str) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(path) if entry.is_dir()]
    except FileNotFoundError:
        return []


CGROUPS = "sys/fs/cgroup"
MACHINE_CGROUPS = f"{CGROUPS}/machine"
"""A link to the cgroup v2 hierarchy of the machine that runs the node: its kubelet puts pods there."""

_MACHINE_MOUNTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
"""Where a machine has cgroup v2: alone, or together with cgroup v1."""

LIBRARY_FOLDER = "usr/lib/x86_64-linux-gnu"

_CLASS_3D_CONTROLLER = "0x030200"
_CLASS_INFINIBAND = "0x020700"
_CLASS_BRIDGE = "0x060400"
_NVIDIA = "0x10de"
_MELLANOX = "0x15b3"
_CONNECTX_7 = "0x1021"
_BROADCOM = "0x1000"
_PCIE_SWITCH = "0xc030"


def build(description: NodeDescription, root: Path) -> None:
    """Create the missing files of a node. Raises OSError: ``root`` can't be written."""
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
    if description.limits_memory and description.cgroups != "v1":
        _cgroups(description, root)
    _driver_files(description, root)


def remove_gpu(gpu: GpuDescription, root: Path) -> None:
    """Remove a GPU from sysfs and procfs; :func:`build` restores it. Its device node stays, as on hardware."""
    bus_id = sysfs_bus_id(gpu.pci_bus_id)
    link = root / "sys/bus/pci/devices" / bus_id
    if link.exists():
        shutil.rmtree(link.resolve())
    link.unlink(missing_ok=True)
    shutil.rmtree(root / "proc/driver/nvidia/gpus" / bus_id, ignore_errors=True)


def write_boot_id(root: Path) -> None:
    write_file(_boot_id(root), f"{uuid.uuid4()}\n", 0o444)


def sysfs_bus_id(bus_id: str) -> str:
    """The kernel's form of a PCI bus id: at least four digits of domain, lower case, as ``0000:1b:00.0``."""
    domain, _, rest = bus_id.partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _gpu_in_sysfs(description: NodeDescription, gpu: GpuDescription, sys: Path) -> None:
    product = description.gpu_product
    common = _place_files(gpu)
    parents = _bridges_in_sysfs(gpu, sys)
    files = {"vendor": _NVIDIA, "device": f"{product.pci_device_id >> 16:#06x}", "class": _CLASS_3D_CONTROLLER}
    _pci_device(sys, parents, sysfs_bus_id(gpu.pci_bus_id), files | common)
    if gpu.nic is not None:
        _nic_in_sysfs(gpu.nic.pci_bus_id, gpu.nic.rdma_device, common, parents, sys)


def _bridges_in_sysfs(place: PciPlace, sys: Path) -> list[str]:
    """Create the bridges above a device; return the names of its parent folders."""
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


def _place_files(place: PciPlace) -> dict[str, str]:
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
    # As a host with driver 580 lists them. 195 is nvidia's registered major, the others are assigned at load.
    write_file(proc / "devices", (Path(__file__).parent / "data" / "proc_devices").read_text("ascii"), 0o444)
    mig = proc / "driver/nvidia/capabilities/mig"
    write_file(mig / "config", access_text(CONFIG_MINOR), 0o400)
    write_file(mig / "monitor", access_text(MONITOR_MINOR), 0o444)
    if not _boot_id(proc.parent).exists():
        write_boot_id(proc.parent)


def _cgroups(description: NodeDescription, root: Path) -> None:
    is_dmem = description.cgroups == "dmem"
    write_file(root / CGROUPS / "cgroup.controllers", "memory pids dmem\n" if is_dmem else "memory pids misc\n", 0o444)
    if is_dmem:
        bus_ids = [sysfs_bus_id(gpu.pci_bus_id) for gpu in description.gpus]
        size = description.gpu_product.memory_mib << 20
        text = "".join(f"nvidia/{bus_id}/vidmem {size}\n" for bus_id in bus_ids)
        write_file(root / CGROUPS / "dmem.capacity", text, 0o444)
    mount = next((path for path in _MACHINE_MOUNTS if Path(path, "cgroup.controllers").exists()), None)
    if mount is not None:
        link(root / MACHINE_CGROUPS, mount)


def _boot_id(root: Path) -> Path:
    return root / "proc/sys/kernel/random/boot_id"


def _device_node(path: Path) -> None:
    # The null device swallows what a container writes. Without the right to create one, an empty file replaces it.
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
    for path, module in ((control_program.PROGRAM, control_program), (server_program.SERVER_PROGRAM, server_program)):
        write_file(root / path, _mps_script(module), 0o755)


def _mps_script(module: ModuleType) -> str:
    """A program of MPS. It needs no shell, which the image of the MPS daemons' pods does not have."""
    return f"""\
#!{sys.executable} -SI
import sys

sys.path.append({str(Path(__file__).parents[2])!r})
from {module.__name__} import main

main()
"""


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
