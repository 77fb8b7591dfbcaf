"""CDI specs: the device nodes, mounts and variables that the container runtime adds to a container with a claim.

Source: Container Device Interface specification 0.5 (device names that start with a digit, hostPath).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from driver.errors import StateError
from driver.hardware.device_nodes import DeviceNode
from driver.hardware.gpu_properties import MIB
from kubelet_plugin.cdi.driver_files import CUDA, DriverFiles
from kubelet_plugin.mps.client import MpsAccess

CDI_VERSION = "0.5.0"
CLASS = "claim"
MOUNT_OPTIONS = ["ro", "nosuid", "nodev", "rbind", "rprivate"]

DEVICE_BYTES = 2048
"""Bytes reserved per device of a claim: its name, variables and device nodes take about 1.5 KiB."""

MEMORY_REQUEST, MEMORY_LIMIT = "NVIDIA_GPU_MEMORY_REQUEST", "NVIDIA_GPU_MEMORY_LIMIT"
"""Variables that the hook reads as soft and hard limit. The last value counts, and specs come after the pod's."""

FRAMEWORKS = {
    "jax": "XLA_PYTHON_CLIENT_MEM_FRACTION={}",
    "pytorch": "PYTORCH_ALLOC_CONF=per_process_memory_fraction:{}",
}
"""Variables by which frameworks take a part of the memory that they see. JAX refuses to start with two names of its
variable, and older releases know only this one. PyTorch has the option since release 2.10; 2.7 and older do not read a
variable of this name, whereas they end on an unknown option in PYTORCH_CUDA_ALLOC_CONF."""

Spec = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CdiDevice:
    """One allocated device: its name, its UUID (of the GPU or partition), its device nodes.

    ``shares`` is the number of shares of the GPU; 1 if the device is not a share. ``gib``: what the claim has of a
    shared device, of which ``name`` ends with the share's id; 0 for other devices. ``memory_limit``: bytes to which
    NVIDIA's hook limits the container's own cgroup; None: it is not called. ``fraction``: the part of the GPU that
    frameworks may take if no hook is called; None: they are not told. ``mps``: of a GPU that is shared by MPS.
    """

    name: str
    uuid: str
    nodes: Sequence[DeviceNode]
    shares: int = 1
    gib: int = 0
    memory_limit: int | None = None
    fraction: float | None = None
    mps: MpsAccess | None = None

    def with_mps(self, access: MpsAccess | None) -> CdiDevice:
        """This device with its access to the MPS daemon; None: it has none."""
        return self if access is None else replace(self, mps=access)

    @property
    def env(self) -> list[str]:
        """``TESSERA_DEVICE_...`` with the UUID; of a share ``TESSERA_SHARES_...`` with the number of shares, of a
        shared device ``TESSERA_MEMORY_...`` with the memory."""
        env = [f"{variable(self.name)}={self.uuid}"]
        env += [f"{variable(self.name, 'SHARES')}={self.shares}"] if self.shares > 1 else []
        env += [f"{variable(self.name, 'MEMORY')}={self.gib}Gi"] if self.gib else []
        return env if self.mps is None else [*env, *(f"{name}={text}" for name, text in self.mps.environment.items())]


def variable(device: str, about: str = "DEVICE") -> str:
    """The name of an environment variable of a device, unique on the node so that claims don't conflict."""
    return f"TESSERA_{about}_" + device.upper().replace("-", "_")


class SpecFormat:
    """The specs of one driver on one node. What all of them have in common is encoded once."""

    def __init__(self, driver: str, files: DriverFiles, frameworks: str = "none") -> None:
        """``frameworks``: names of FRAMEWORKS, separated by commas, that are told the memory of claims."""
        self.driver = driver
        self._framework_variables = [text for name, text in FRAMEWORKS.items() if name in frameworks.split(",")]
        self._kind = f"{driver}/{CLASS}"
        self.common = b""
        self.use(files)

    def use(self, files: DriverFiles) -> None:
        """Mount these files from now on. Files without CUDA are mounted nowhere: others will come."""
        self._has_cuda, self._memory_hook = files.has_cuda, files.memory_hook
        if self.common and not files.has_cuda:
            return
        # Compact: container runtimes read every spec again when one of them changes.
        self.common = b',\n  "containerEdits": ' + msgspec.json.encode(_edits(files)) + OBJECT_END

    def encode(self, uid: str, devices: Sequence[CdiDevice]) -> bytes:
        """The content of one claim's file."""
        claimed: list[Spec] = [
            {
                "name": f"{uid}-{device.name}",
                "containerEdits": {"env": device.env, "deviceNodes": [_node(node) for node in device.nodes]},
            }
            for device in devices
        ]
        for device_spec, device in zip(claimed, devices, strict=True):
            if device.mps is not None:
                # Read-only: a program must not replace the socket of a directory that all claims of the GPU have.
                paths = {"hostPath": device.mps.host_path, "containerPath": device.mps.container_path}
                device_spec["containerEdits"]["mounts"] = [{**paths, "options": MOUNT_OPTIONS}]
        has_limits = self._memory_hook and any(device.memory_limit is not None for device in devices)
        if not (has_limits and _add_memory_hooks(claimed, devices, self._memory_hook)) and self._framework_variables:
            self._tell_frameworks(claimed, [device.fraction for device in devices])
        spec = {"cdiVersion": CDI_VERSION, "kind": self._kind, "devices": claimed}
        head = msgspec.json.format(msgspec.json.encode(spec), indent=2)
        return head[: -len(OBJECT_END)] + self.common

    def _tell_frameworks(self, specs: Iterable[Spec], fractions: Sequence[float | None]) -> None:
        """Set the variables of frameworks, which apply to each GPU: to the smallest fraction, unless a GPU is full."""
        parts = [fraction for fraction in fractions if fraction is not None]
        if len(parts) == len(fractions):
            for spec in specs:
                spec["containerEdits"]["env"] += [
                    text.format(f"{min(parts):.4f}") for text in self._framework_variables
                ]

    def is_current(self, spec: bytes) -> bool:
        """Whether a spec has what all specs have in common now."""
        return spec.endswith(self.common)

    def room(self, devices: int) -> int:
        """Bytes to reserve for the spec of a claim, before its partitions are created. Raises StateError if the driver
        files are incomplete: containers would run without CUDA."""
        if not self._has_cuda:
            raise StateError(f"the driver files of this node have no {CUDA}: no container could use CUDA")
        return len(self.common) + DEVICE_BYTES * (devices + 1)

    def device_id(self, uid: str, device: str) -> str:
        """The qualified CDI name that the kubelet passes to the runtime; unique to the claim."""
        return f"{self._kind}={uid}-{device}"


OBJECT_END = b"\n}"
"""The last bytes of a formatted object."""


def devices_in(spec: bytes, uid: str) -> dict[str, str]:
    """The devices in the spec of a claim, name to UUID; empty if it is invalid."""
    try:
        devices = msgspec.json.decode(spec, type=Spec)["devices"]
        names = [str(device["name"]).removeprefix(f"{uid}-") for device in devices]
        return {
            name: _value(variable(name), device["containerEdits"]["env"])
            for name, device in zip(names, devices, strict=True)
        }
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError, StopIteration):
        return {}


def mounted_in(spec: bytes) -> list[str]:
    """The host paths that a spec mounts; empty if it is invalid."""
    try:
        return [str(mount["hostPath"]) for mount in msgspec.json.decode(spec, type=Spec)["containerEdits"]["mounts"]]
    except (ValueError, RecursionError, LookupError, TypeError):
        return []


def _edits(files: DriverFiles) -> Spec:
    """What every container with a claim gets."""
    mounts = [
        {"hostPath": host_path, "containerPath": path, "options": MOUNT_OPTIONS}
        for path, host_path in files.mounts.items()
    ]
    edits: Spec = {"env": ["NVIDIA_VISIBLE_DEVICES=void"], "mounts": mounts}
    if files.hook is not None:
        program = files.hook.rpartition("/")[2]
        edits["hooks"] = [
            {"hookName": "createContainer", "path": files.hook, "args": [program, *command]}
            for command in files.hook_commands
        ]
    return edits


def _add_memory_hooks(specs: Iterable[Spec], devices: Sequence[CdiDevice], hook: Sequence[str]) -> bool:
    """Limit the memory of the container's own cgroup, unless the devices have several limits: the hook reads one.

    Returns whether it is limited. The hook runs once the container has its cgroup. A soft limit of 0 leaves no trace on
    other cgroups.
    """
    limited = {device.uuid: device.memory_limit for device in devices if device.memory_limit is not None}
    if len(set(limited.values())) > 1 or len(limited) < sum(device.memory_limit is not None for device in devices):
        return False
    program, *arguments = hook
    for spec, device in zip(specs, devices, strict=True):
        if device.memory_limit is not None:
            edits, mebibytes = spec["containerEdits"], -(-device.memory_limit // MIB)
            edits["env"] = [*edits["env"], f"{MEMORY_REQUEST}=0", f"{MEMORY_LIMIT}={mebibytes}"]
            command = [program.rpartition("/")[2], *arguments, "--gpu-id", device.uuid]
            edits["hooks"] = [{"hookName": "createRuntime", "path": program, "args": command}]
    return True


def _node(node: DeviceNode) -> Spec:
    spec: Spec = {"path": node.path, "permissions": "rw"}
    if node.host_path is not None:
        spec["hostPath"] = node.host_path
    if node.major is not None and node.minor is not None:
        spec |= {"type": "c", "major": node.major, "minor": node.minor}
    return spec


def _value(name: str, env: Iterable[str]) -> str:
    return next(variable.partition("=")[2] for variable in env if variable.startswith(f"{name}="))
