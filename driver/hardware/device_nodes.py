"""Device nodes and MIG capability files, as the NVIDIA kernel module lays them out.

Sources: NVIDIA driver README ("Device nodes"), MIG user guide ("Device nodes and capabilities").
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from driver.errors import HardwareError
from driver.hardware.host_paths import HOST, HostPaths, device_root
from driver.model.gpu import Gpu, Partition

CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
REQUIRED_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm")
"""CUDA cannot initialise without these; the others are optional."""

CAPABILITIES = "/proc/driver/nvidia/capabilities"

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
        root = "" if self._driver_root == HOST else device_root(self._paths, self._driver_root).rstrip("/")
        needed = (f"/dev/nvidia{gpu.minor}", *CONTROL_NODES)
        present = [path for path in needed if os.access(f"{self._host}{root}{path}", os.F_OK)]
        if missing := [path for path in (needed[0], *REQUIRED_NODES) if path not in present]:
            raise HardwareError(
                f"device node {', '.join(missing)} is missing under {self._paths.here(root)}: "
                f"found {', '.join(present) or 'none'}; nvidia-modprobe creates them"
            )
        runtime = str(self._paths.runtime_root).rstrip("/")
        return [DeviceNode(path, host_path=f"{runtime}{root}{path}") for path in present]

    def of_partition(self, gpu: Gpu, partition: Partition) -> Sequence[DeviceNode]:
        """The GPU's nodes plus the capability nodes of both instances.

        Capability nodes carry explicit numbers: the host's /dev/nvidia-caps may be empty.
        """
        major = self._number("/proc/devices", NVIDIA_CAPS, "line for nvidia-caps: is the nvidia module loaded?")
        instance = f"{CAPABILITIES}/gpu{gpu.minor}/mig/gi{partition.gpu_instance_id}"
        files = (f"{instance}/access", f"{instance}/ci{partition.compute_instance_id}/access")
        minors = [self._number(file, DEVICE_FILE_MINOR, "DeviceFileMinor line") for file in files]
        capabilities = [DeviceNode(f"/dev/nvidia-caps/nvidia-cap{minor}", major=major, minor=minor) for minor in minors]
        return [*self.of_gpu(gpu), *capabilities]

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
