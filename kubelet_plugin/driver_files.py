"""The files of the NVIDIA driver that a container needs, found below the driver root.

The container gets the user-space libraries of the host's own kernel driver, under the same paths, and
under their short names too, so that nothing in the container has to make links.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from driver.hardware.driver_root import LIBRARY_DIRECTORIES, find_inside, resolve_inside
from driver.hardware.host import HostPaths

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
"""Below the driver root: directories, and what is looked for in each."""

CDI_HOOK = "usr/bin/nvidia-cdi-hook"
"""NVIDIA's helper from the container toolkit; used where it is installed."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A file of the host, and where the container sees it."""

    host_path: str
    container_path: str


@dataclass(frozen=True, slots=True)
class DriverFiles:
    """What to mount, the directories with libraries, and the hook program as the runtime finds it."""

    mounts: tuple[Mount, ...]
    library_directories: tuple[str, ...]
    hook: str | None


def find_driver_files(paths: HostPaths, driver_root: Path) -> DriverFiles:
    """Look once; a driver that is upgraded needs its pods drained and the plugin restarted anyway."""
    root = paths.here(str(driver_root))
    found = sorted(set(_matches(root)))
    mounts = tuple(Mount(paths.for_runtime(str(driver_root / real)), f"/{name}") for name, real in found)
    directories = sorted({str(Path(m.container_path).parent) for m in mounts if ".so" in m.container_path})
    hook = paths.for_runtime(str(driver_root / CDI_HOOK)) if resolve_inside(root, CDI_HOOK) is not None else None
    return DriverFiles(mounts, tuple(directories), hook)


def _matches(root: Path) -> Iterator[tuple[str, str]]:
    """Name and file behind it, both relative to ``root``. On merged-usr systems /lib is a link into /usr: each once."""
    seen: set[tuple[str | None, str]] = set()
    for directory, patterns in PLACES:
        for name, real in find_inside(root, directory, patterns):
            identity = (resolve_inside(root, str(Path(name).parent)), Path(name).name)
            if identity not in seen:
                seen.add(identity)
                yield name, real
