"""Device nodes and MIG capability files, as the NVIDIA kernel module lays them out.

Sources: NVIDIA driver README ("Device nodes"), MIG user guide ("Device nodes and capabilities").
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from driver.errors import HardwareError
from driver.hardware.host_paths import HOST, HostPaths, device_root, resolve_inside
from driver.model.gpu import Gpu, Partition

CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
REQUIRED_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm")
"""CUDA cannot initialise without these; the others are optional."""

CAPABILITIES = "/proc/driver/nvidia/capabilities"
MONITORING = f"{CAPABILITIES}/mig/monitor"
"""The capability to monitor the partitions of all GPUs."""

MODPROBE = "usr/bin/nvidia-modprobe"
MODPROBE_TIMEOUT_SECONDS = 15.0
"""Timeout of one run, which loads a kernel module at most."""

IN_ROOT = "import os, sys; os.chroot(sys.argv[1]); os.chdir('/'); os.execv(sys.argv[2], sys.argv[2:])"
"""Runs a program of another root directory; the image may lack chroot(1)."""

NVIDIA_UVM = re.compile(rb"^\s*(\d+) nvidia-uvm$", re.MULTILINE)
NVIDIA_CAPS = re.compile(rb"^\s*(\d+) nvidia-caps$", re.MULTILINE)
DEVICE_FILE_MINOR = re.compile(rb"^DeviceFileMinor:\s*(\d+)$", re.MULTILINE)

LONGEST_FILE = 1 << 16
"""More bytes than the files of procfs have that are read here; the kernel returns such a file in one piece."""


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A character device for a container.

    ``path`` is the path inside the container, ``host_path`` the path of the node for the container runtime. A node that
    need not exist on the host has ``major`` and ``minor`` instead of ``host_path``.
    """

    path: str
    host_path: str | None = None
    major: int | None = None
    minor: int | None = None


class DeviceNodes:
    """The device nodes that containers need to use a GPU or a partition. Methods raise HardwareError."""

    def __init__(self, paths: HostPaths, driver_root: Path) -> None:
        self._paths = paths
        self._driver_root = driver_root
        self._host = str(paths.root).rstrip("/")

    def of_gpu(self, gpu: Gpu) -> Sequence[DeviceNode]:
        """The GPU's node and the control nodes. A node that CUDA needs must exist."""
        root = self._root()
        needed = (f"/dev/nvidia{gpu.minor}", *CONTROL_NODES)
        present = [path for path in needed if os.access(f"{self._host}{root}{path}", os.F_OK)]
        if missing := [path for path in (needed[0], *REQUIRED_NODES) if path not in present]:
            raise HardwareError(
                f"device node {', '.join(missing)} is missing under {self._paths.here(root)}: "
                f"found {', '.join(present) or 'none'}; nvidia-modprobe creates them"
            )
        runtime = str(self._paths.runtime_root).rstrip("/")
        return [DeviceNode(path, host_path=f"{runtime}{root}{path}") for path in present]

    def make_uvm(self) -> None:
        """Make the node of the nvidia-uvm module if it is missing: hosts make it when the first program uses CUDA."""
        path = f"{self._host}{self._root()}/dev/nvidia-uvm"
        if os.access(path, os.F_OK):
            return
        root = self._paths.here(str(self._driver_root))
        tool = resolve_inside(root, MODPROBE)
        if tool is not None:
            output = self._run_modprobe(root, tool)
            if not os.access(path, os.F_OK):
                raise HardwareError(
                    f"{path} is missing, and nvidia-modprobe -u does not make it: {output or 'no output'}"
                )
            return
        try:
            major = self._number("/proc/devices", NVIDIA_UVM, "line for nvidia-uvm: load the kernel module nvidia-uvm")
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, 0))
            os.chmod(path, 0o666)  # noqa: PTH101, S103 - whatever the umask
        except HardwareError as error:
            raise HardwareError(f"{path} is missing: {error}") from error
        except OSError as error:
            raise HardwareError(f"{path} is missing and can't be made: {error.strerror}") from error

    def _run_modprobe(self, root: Path, tool: str) -> str:
        """Run nvidia-modprobe of the driver below ``root``; return its output."""
        # Below "/host" it would make the node in this container. A simulated node has no libraries to run in its root.
        inside = root != HOST and self._paths.runtime_root == HOST
        program = [sys.executable, "-I", "-S", "-c", IN_ROOT, str(root), f"/{tool}"] if inside else [str(root / tool)]
        try:
            result = subprocess.run(
                [*program, "-u", "-c=0"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=MODPROBE_TIMEOUT_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        return " ".join(result.stdout.decode(errors="replace").split())[-200:]

    def _root(self) -> str:
        """The root of the device nodes, as a prefix of paths."""
        return "" if self._driver_root == HOST else device_root(self._paths, self._driver_root).rstrip("/")

    def of_partition(self, gpu: Gpu, partition: Partition) -> Sequence[DeviceNode]:
        """The GPU's nodes plus the capability nodes of both instances.

        Capability nodes carry explicit numbers: the host's /dev/nvidia-caps may be empty.
        """
        capabilities = self._capabilities(_of_instances(gpu, partition))
        return [*self.of_gpu(gpu), *capabilities]

    def of_monitored(self, gpu: Gpu, partitions: Iterable[Partition]) -> Sequence[DeviceNode]:
        """The GPU's nodes plus the capability nodes of these partitions, and of monitoring those that come later."""
        nodes = list(self.of_gpu(gpu))
        if not gpu.mig_capable:
            return nodes
        nodes += self._capabilities([MONITORING])
        for partition in partitions:
            with suppress(HardwareError):  # removed since it was listed
                nodes += self._capabilities(_of_instances(gpu, partition))
        return nodes

    def _capabilities(self, files: Iterable[str]) -> list[DeviceNode]:
        major = self._number("/proc/devices", NVIDIA_CAPS, "line for nvidia-caps: is the nvidia module loaded?")
        minors = [self._number(file, DEVICE_FILE_MINOR, "DeviceFileMinor line") for file in files]
        return [DeviceNode(f"/dev/nvidia-caps/nvidia-cap{minor}", major=major, minor=minor) for minor in minors]

    def _number(self, file: str, pattern: re.Pattern[bytes], missing: str) -> int:
        path = f"{self._host}{file}"
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                match = pattern.search(os.read(descriptor, LONGEST_FILE))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise HardwareError(f"can't read {path}: {error.strerror}") from error
        if match is None:
            raise HardwareError(f"{path} has no {missing}")
        return int(match[1])


def _of_instances(gpu: Gpu, partition: Partition) -> tuple[str, str]:
    """The capability files of the GPU instance and of the compute instance."""
    instance = f"{CAPABILITIES}/gpu{gpu.minor}/mig/gi{partition.gpu_instance_id}"
    return f"{instance}/access", f"{instance}/ci{partition.compute_instance_id}/access"
