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
    """One allocated device: its name in the pool, its UUID (of the GPU or of the partition), its nodes.

    ``shares`` is how many of its kind divide the GPU; 1 where nobody else uses it.
    """

    name: str
    uuid: str
    nodes: Sequence[DeviceNode]
    shares: int = 1

    @property
    def env(self) -> list[str]:
        """``TESSERA_DEVICE_...`` with the UUID, and for a share ``TESSERA_SHARES_...``: of how many it is one."""
        found = [f"{variable(self.name)}={self.uuid}"]
        if self.shares > 1:
            found.append(f"{variable(self.name, 'SHARES')}={self.shares}")
        return found


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
                    "env": device.env,
                    "deviceNodes": [_node(node) for node in device.nodes],
                },
            }
            for device in devices
        ],
        "containerEdits": edits,
    }


def variable(device: str, about: str = "DEVICE") -> str:
    """The name of an environment variable about a device: unique on the node, so several claims don't clash."""
    return f"TESSERA_{about}_" + device.upper().replace("-", "_")


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

    def write(self, uid: str, spec: Mapping[str, Any]) -> bool:
        """Make the claim's file say ``spec``; an equal one is left alone. Says whether anything was written."""
        data = msgspec.json.format(msgspec.json.encode(spec), indent=2)
        path = self._path(uid)
        try:
            if path.read_bytes() == data:
                return False
        except OSError:
            pass  # absent or unreadable: written anew, and if that fails it says why
        # The directory lives in memory (/var/run): what survives a reboot is the checkpoint.
        write_atomically(path, data, 0o644, durable=False)
        return True

    def devices(self, uid: str) -> list[str]:
        """The names of the devices in the claim's spec; none where there is no spec, or one that makes no sense."""
        try:
            found = msgspec.json.decode(self._path(uid).read_bytes(), type=Spec)["devices"]
            return [str(device["name"]).removeprefix(f"{uid}-") for device in found]
        except (OSError, msgspec.MsgspecError, KeyError, TypeError):
            return []

    def remove(self, uid: str) -> None:
        remove(self._path(uid), durable=False)

    def claim_uids(self) -> list[str]:
        """The claims that have a spec of ours."""
        ours = (name for name in self._names() if name.startswith(self._prefix) and name.endswith(".json"))
        return [name.removeprefix(self._prefix).removesuffix(".json") for name in ours]

    def remove_half_written(self) -> None:
        """Remove what a crash left of specs of ours. At start only: later a prepare may be writing one."""
        for name in self._names():
            if name.startswith(f".{self._prefix}") and name.endswith(TEMPORARY):
                remove(self._directory / name, durable=False)

    def _names(self) -> list[str]:
        try:
            return [path.name for path in self._directory.iterdir()]
        except OSError as error:
            raise StateError(f"can't list {self._directory}: {error.strerror}") from error

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
