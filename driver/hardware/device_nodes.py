"""Device nodes and MIG capability files, as the NVIDIA kernel module lays them out.

Sources: NVIDIA driver README ("Device nodes"), MIG user guide ("Device nodes and capabilities").
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from driver.errors import HardwareError
from driver.hardware.host_paths import HostPaths
from driver.model.gpu import Gpu, Partition

CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
REQUIRED_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm")
"""CUDA cannot initialise without these; the others are optional."""

CAPABILITIES = "/proc/driver/nvidia/capabilities"


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


def gpu_nodes(paths: HostPaths, gpu: Gpu, device_root: str = "/") -> Sequence[DeviceNode]:
    """Return the GPU's node and the control nodes below ``device_root``.

    Raises HardwareError if a node that CUDA needs is missing.
    """
    below = device_root.rstrip("/")
    own = f"/dev/nvidia{gpu.minor}"
    present = [node for node in (own, *CONTROL_NODES) if paths.has(below + node)]
    missing = [node for node in (own, *REQUIRED_NODES) if node not in present]
    if missing:
        found = ", ".join(present) or "none"
        raise HardwareError(
            f"device node {', '.join(missing)} is missing under {paths.here(device_root)}: found {found}; "
            "nvidia-modprobe creates them"
        )
    return [DeviceNode(node, host_path=paths.for_runtime(below + node)) for node in present]


def partition_nodes(paths: HostPaths, gpu: Gpu, partition: Partition, device_root: str = "/") -> Sequence[DeviceNode]:
    """The GPU's nodes plus the capability nodes of both instances.

    Capability nodes carry explicit numbers: the host's /dev/nvidia-caps may be empty.
    """
    module_missing = "line for nvidia-caps: is the nvidia module loaded?"
    major = _number(paths, "/proc/devices", r"^\s*(\d+) nvidia-caps$", module_missing)
    instance = f"{CAPABILITIES}/gpu{gpu.minor}/mig/gi{partition.gpu_instance_id}"
    files = (f"{instance}/access", f"{instance}/ci{partition.compute_instance_id}/access")
    minors = [_number(paths, file, r"^DeviceFileMinor:\s*(\d+)$", "DeviceFileMinor line") for file in files]
    nodes = [DeviceNode(f"/dev/nvidia-caps/nvidia-cap{minor}", major=major, minor=minor) for minor in minors]
    return [*gpu_nodes(paths, gpu, device_root), *nodes]


def _number(paths: HostPaths, file: str, pattern: str, missing: str) -> int:
    try:
        match = re.search(pattern, paths.read(file), re.MULTILINE)
    except OSError as error:
        raise HardwareError(f"can't read {paths.here(file)}: {error.strerror}") from error
    if match is None:
        raise HardwareError(f"{paths.here(file)} has no {missing}")
    return int(match[1])
