"""The driver's files on the host that containers get: libraries, programs and firmware.

These are the user-space files that match the host's kernel driver, found below the driver root. They have the same
paths in the container, and also their short names, so that no links have to be created there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from driver.hardware.host_paths import LIBRARY_DIRECTORIES, HostPaths, find_inside, resolve_inside

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
class DriverFiles:
    """The mounts (host path by container path), the library directories, and the hook program for the runtime."""

    mounts: Mapping[str, str]
    library_directories: tuple[str, ...]
    hook: str | None


def find_driver_files(paths: HostPaths, driver_root: Path) -> DriverFiles:
    """Find the driver files, once per start: a driver upgrade drains the pods and restarts the plugin anyway."""
    root = paths.here(str(driver_root))
    files = sorted(set(_matches(root)))
    mounts = {f"/{name}": paths.for_runtime(str(driver_root / real)) for name, real in files}
    directories = sorted({str(Path(path).parent) for path in mounts if ".so" in path})
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
