"""CDI specs: the device nodes, mounts and variables that the container runtime adds to a container with a claim.

One file per claim in the CDI directory, written before the kubelet receives the device names and removed in unprepare.
Source: Container Device Interface specification 0.5 (device names that start with a digit, hostPath).
The mounts are the user-space libraries that match the host's kernel driver, found below the driver root. They have the
same paths in the container, and also their short names, so that no links have to be created there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from driver.errors import EnvironmentFault, StateError
from driver.hardware.device_nodes import DeviceNode
from driver.hardware.host_paths import LIBRARY_DIRECTORIES, HostPaths, find_inside, resolve_inside
from kubelet_plugin.checkpoint.files import TEMPORARY, probe, remove, reserve, unreserve, write_atomically

log = logging.getLogger(__name__)

LIBRARIES = (
    "libcuda.so*",
    "libcudadebugger.so*",
    "libnvcuvid.so*",
    "libnvidia-cfg.so*",
    "libnvidia-encode.so*",
    "libnvidia-gpucomp.so*",
    "libnvidia-ml.so*",
    "libnvidia-nvvm.so*",
    "libnvidia-opencl.so*",
    "libnvidia-opticalflow.so*",
    "libnvidia-ptxjitcompiler.so*",
    "libnvidia-pkcs11*.so*",
)

BINARIES = (
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
)

FIRMWARE = ("*/gsp*.bin",)

PLACES = (
    *((directory, LIBRARIES) for directory in LIBRARY_DIRECTORIES),
    ("usr/bin", BINARIES),
    ("lib/firmware/nvidia", FIRMWARE),
)
"""Directories below the driver root, and the file patterns in each."""

CDI_HOOK = "usr/bin/nvidia-cdi-hook"
"""The hook program of the NVIDIA Container Toolkit; used if it is installed."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A bind mount of a host file."""

    host_path: str
    container_path: str


@dataclass(frozen=True, slots=True)
class DriverFiles:
    """The mounts, the library directories, and the path of the hook program for the runtime."""

    mounts: tuple[Mount, ...]
    library_directories: tuple[str, ...]
    hook: str | None


def find_driver_files(paths: HostPaths, driver_root: Path) -> DriverFiles:
    """Find the driver files, once per start: a driver upgrade drains the pods and restarts the plugin anyway."""
    root = paths.here(str(driver_root))
    found = sorted(set(_matches(root)))
    mounts = tuple(Mount(paths.for_runtime(str(driver_root / real)), f"/{name}") for name, real in found)
    directories = sorted({str(Path(m.container_path).parent) for m in mounts if ".so" in m.container_path})
    hook = paths.for_runtime(str(driver_root / CDI_HOOK)) if resolve_inside(root, CDI_HOOK) is not None else None
    return DriverFiles(mounts, tuple(directories), hook)


def _matches(root: Path) -> Iterator[tuple[str, str]]:
    """Name and target of each file, relative to ``root``. Files are listed once if /lib is a link into /usr."""
    seen: set[tuple[str | None, str]] = set()
    for directory, patterns in PLACES:
        for name, real in find_inside(root, directory, patterns):
            identity = (resolve_inside(root, str(Path(name).parent)), Path(name).name)
            if identity not in seen:
                seen.add(identity)
                yield name, real


CDI_VERSION = "0.5.0"
CLASS = "claim"
MOUNT_OPTIONS = ["ro", "nosuid", "nodev", "rbind", "rprivate"]

DEVICE_BYTES = 2048
"""Bytes reserved per device of a claim: its name, variables and device nodes take about 1.5 KiB."""

Spec = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CdiDevice:
    """One allocated device: its name in the pool, its UUID (of the GPU or partition), its device nodes.

    ``shares`` is the number of shares of the GPU; 1 if the device is not shared.
    """

    name: str
    uuid: str
    nodes: Sequence[DeviceNode]
    shares: int = 1

    @property
    def env(self) -> list[str]:
        """``TESSERA_DEVICE_...`` with the UUID, and for a share ``TESSERA_SHARES_...`` with the number of shares."""
        found = [f"{variable(self.name)}={self.uuid}"]
        if self.shares > 1:
            found.append(f"{variable(self.name, 'SHARES')}={self.shares}")
        return found


def device_id(driver: str, uid: str, device: str) -> str:
    """The qualified CDI name that the kubelet passes to the runtime; unique to the claim."""
    return f"{driver}/{CLASS}={_name(uid, device)}"


def build_spec(driver: str, uid: str, devices: Iterable[CdiDevice], files: DriverFiles) -> Spec:
    """The spec of one claim. Pure."""
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
    """The name of an environment variable of a device, unique on the node so that claims don't conflict."""
    return f"TESSERA_{about}_" + device.upper().replace("-", "_")


@lru_cache(maxsize=1)
def _common_bytes(files: DriverFiles) -> int:
    """Size of a spec without devices: mostly the mounts of the driver's files."""
    return len(_encoded(build_spec("", "", (), files)))


def spec_room(files: DriverFiles, devices: int) -> int:
    """Bytes to reserve for the spec of a claim, before its partitions are created."""
    return _common_bytes(files) + devices * DEVICE_BYTES


def _encoded(spec: Mapping[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(spec), indent=2)


class CdiDirectory:
    """The specs of this driver in the CDI directory; other specs are never changed. Methods raise StateError."""

    def __init__(self, directory: Path, driver: str, restored: Callable[[], None] = lambda: None) -> None:
        """Create the directory if it is missing. Raises EnvironmentFault if that fails.

        ``restored`` is called whenever the directory was missing later and has been created again.
        """
        self._directory = directory
        self._restored = restored
        self._prefix = f"{driver}-{CLASS}_"
        try:
            directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError as error:
            raise EnvironmentFault(f"--cdi-dir {directory}: can't be created: {error.strerror}") from error

    def write(self, uid: str, spec: Mapping[str, Any]) -> bool:
        """Write the claim's file unless it has this content already; returns whether it was written."""
        data = _encoded(spec)
        path = self._path(uid)
        if _content(path) == data:
            self.unreserve(uid)
            return False
        self.restore()
        # The directory is in memory (/var/run); the checkpoint survives a reboot.
        write_atomically(path, data, durable=False, mode=0o644, reserved=True)
        return True

    def reserve(self, uid: str, size: int) -> None:
        """Allocate ``size`` bytes for the next ``write``, or raise StateError."""
        self.restore()
        reserve(self._path(uid), size, 0o644)

    def unreserve(self, uid: str) -> None:
        """Free the bytes that ``reserve`` allocated and ``write`` did not use."""
        unreserve(self._path(uid))

    def probe(self) -> None:
        """Raise StateError unless a file can be written to the directory."""
        self.restore()
        probe(self._path("probe"))

    def restore(self) -> None:
        """Create the directory again if it is missing; ``ClaimReconciler`` writes the specs again."""
        try:
            if self._directory.is_dir():
                return
            self._directory.mkdir(mode=0o755, parents=True)
        except FileExistsError:  # created by another thread; a file in its place makes the write fail
            return
        except OSError as error:
            raise StateError(f"can't create {self._directory} again: {error.strerror}") from error
        log.warning("created the CDI directory again", extra={"path": str(self._directory)})
        self._restored()

    def detached(self) -> str | None:
        """Why the existing directory takes no files: it is a mount whose source was deleted. None otherwise."""
        try:
            links = self._directory.stat().st_nlink
        except OSError:
            return None
        return None if links else f"{self._directory} was deleted on the host; a new container gets a new mount of it"

    def has(self, uid: str) -> bool:
        """Whether the claim has a spec."""
        try:
            return Path(self._path(uid)).exists()
        except OSError as error:
            raise StateError(f"can't read {self._path(uid)}: {error.strerror}") from error

    def devices(self, uid: str) -> dict[str, str]:
        """The devices in the claim's spec, name to UUID; empty if there is no spec or it is invalid."""
        try:
            data = Path(self._path(uid)).read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StateError(f"can't read {self._path(uid)}: {error.strerror}") from error
        try:
            found = msgspec.json.decode(data, type=Spec)["devices"]
            names = [str(device["name"]).removeprefix(f"{uid}-") for device in found]
            return {
                name: _value(variable(name), device["containerEdits"]["env"])
                for name, device in zip(names, found, strict=True)
            }
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError, StopIteration):
            return {}

    def remove(self, uid: str) -> None:
        remove(self._path(uid), durable=False)
        self.unreserve(uid)

    def claim_uids(self) -> list[str]:
        """The UIDs of the claims that have a spec of this driver."""
        ours = (name for name in self._names() if name.startswith(self._prefix) and name.endswith(".json"))
        return [name.removeprefix(self._prefix).removesuffix(".json") for name in ours]

    def remove_half_written(self) -> None:
        """Remove partially written specs after a crash. Only at start: later a prepare may be writing one."""
        for name in self._names():
            if name.startswith(f".{self._prefix}") and name.endswith(TEMPORARY):
                remove(self._directory / name, durable=False)

    def _names(self) -> list[str]:
        try:
            return [path.name for path in self._directory.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StateError(f"can't list {self._directory}: {error.strerror}") from error

    def _path(self, uid: str) -> str:
        return f"{self._directory}/{self._prefix}{uid}.json"


def _name(uid: str, device: str) -> str:
    return f"{uid}-{device}"


def _content(path: str) -> bytes | None:
    """The content; None if the file is missing or unreadable: it is then written again, which reports any error."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return None


def _value(name: str, env: Iterable[str]) -> str:
    return next(entry.partition("=")[2] for entry in env if entry.startswith(f"{name}="))


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
