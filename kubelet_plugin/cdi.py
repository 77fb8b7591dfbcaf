"""CDI specs: what the container runtime puts into a container that uses a claim.

One file a claim in the CDI directory, written before the kubelet hears the device names and removed in
unprepare. Source: Container Device Interface specification 0.5 (device names that start with a digit, hostPath).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from driver.errors import EnvironmentFault, StateError
from driver.hardware.host import DeviceNode
from kubelet_plugin.driver_files import DriverFiles, Mount
from kubelet_plugin.files import TEMPORARY, remove, write_atomically

CDI_VERSION = "0.5.0"
CLASS = "claim"
MOUNT_OPTIONS = ["ro", "nosuid", "nodev", "rbind", "rprivate"]

Spec = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CdiDevice:
    """One allocated device: its name in the pool, its UUID (of the GPU or of the partition), its nodes."""

    name: str
    uuid: str
    nodes: Sequence[DeviceNode]


def device_id(driver: str, uid: str, device: str) -> str:
    """The qualified CDI name the kubelet hands to the runtime; unique to the claim."""
    return f"{driver}/{CLASS}={_name(uid, device)}"


def build_spec(driver: str, uid: str, devices: Iterable[CdiDevice], files: DriverFiles) -> Spec:
    """The whole spec of one claim. Pure."""
    edits: Spec = {"env": ["NVIDIA_VISIBLE_DEVICES=void"], "mounts": [_mount(mount) for mount in files.mounts]}
    if files.hook is not None:
        edits["hooks"] = [_ldconfig_hook(files.hook, files.library_directories)]
    return {
        "cdiVersion": CDI_VERSION,
        "kind": f"{driver}/{CLASS}",
        "devices": [
            {
                "name": _name(uid, device.name),
                "containerEdits": {
                    "env": [f"{variable(device.name)}={device.uuid}"],
                    "deviceNodes": [_node(node) for node in device.nodes],
                },
            }
            for device in devices
        ],
        "containerEdits": edits,
    }


def variable(device: str) -> str:
    """The environment variable with a device's UUID: unique on the node, so several claims don't clash."""
    return "TESSERA_DEVICE_" + device.upper().replace("-", "_")


class CdiDirectory:
    """The specs of this driver in the CDI directory; others' are never touched. Methods raise StateError."""

    def __init__(self, directory: Path, driver: str) -> None:
        """Creates the directory where it is missing. Raises EnvironmentFault where that is impossible."""
        self._directory = directory
        self._prefix = f"{driver}-{CLASS}_"
        try:
            directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError as error:
            raise EnvironmentFault(f"--cdi-dir {directory}: can't be created: {error.strerror}") from error

    def write(self, uid: str, spec: Mapping[str, Any]) -> None:
        """Make the claim's file say ``spec``; an equal one is left alone."""
        data = msgspec.json.format(msgspec.json.encode(spec), indent=2)
        path = self._path(uid)
        try:
            if path.read_bytes() == data:
                return
        except OSError:
            pass  # absent or unreadable: written anew, and if that fails it says why
        # The directory lives in memory (/var/run): what survives a reboot is the checkpoint.
        write_atomically(path, data, 0o644, durable=False)

    def remove(self, uid: str) -> None:
        remove(self._path(uid), durable=False)

    def claim_uids(self) -> list[str]:
        """The claims that have a spec of ours; a temporary file that a crash left is removed."""
        try:
            names = [path.name for path in self._directory.iterdir()]
        except OSError as error:
            raise StateError(f"can't list {self._directory}: {error.strerror}") from error
        for name in names:
            if name.startswith(f".{self._prefix}") and name.endswith(TEMPORARY):
                remove(self._directory / name, durable=False)
        ours = (name for name in names if name.startswith(self._prefix) and name.endswith(".json"))
        return [name.removeprefix(self._prefix).removesuffix(".json") for name in ours]

    def _path(self, uid: str) -> Path:
        return self._directory / f"{self._prefix}{uid}.json"


def _name(uid: str, device: str) -> str:
    return f"{uid}-{device}"


def _mount(mount: Mount) -> Spec:
    return {"hostPath": mount.host_path, "containerPath": mount.container_path, "options": MOUNT_OPTIONS}


def _node(node: DeviceNode) -> Spec:
    found: Spec = {"path": node.path, "permissions": "rw"}
    if node.host_path is not None:
        found["hostPath"] = node.host_path
    if node.major is not None and node.minor is not None:
        found |= {"type": "c", "major": node.major, "minor": node.minor}
    return found


def _ldconfig_hook(hook: str, directories: Iterable[str]) -> Spec:
    folders = [argument for directory in directories for argument in ("--folder", directory)]
    return {"hookName": "createContainer", "path": hook, "args": ["nvidia-cdi-hook", "update-ldcache", *folders]}
