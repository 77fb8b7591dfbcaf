"""The driver's files on the host that containers get: libraries, programs and firmware.

These are the user-space files that match the host's kernel driver, found below the driver root. They have the same
paths in the container, and also their short names, so that no links have to be created there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from driver.hardware.host_paths import LIBRARY_DIRECTORIES, HostPaths, find_inside, resolve_inside

CUDA = "libcuda.so.1"

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
    ("usr/local/nvidia/bin", BINARIES),
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

    @property
    def has_cuda(self) -> bool:
        """Whether containers get the library that every CUDA program loads."""
        return any(path.endswith(f"/{CUDA}") for path in self.mounts)


def find_driver_files(paths: HostPaths, driver_root: Path) -> DriverFiles:
    root = paths.here(str(driver_root))
    files = sorted(set(_matches(root)))
    mounts = {f"/{name}": paths.for_runtime(str(driver_root / real)) for name, real in files}
    directories = sorted({str(Path(path).parent) for path in mounts if ".so" in path})
    hook = paths.for_runtime(str(driver_root / CDI_HOOK)) if resolve_inside(root, CDI_HOOK) is not None else None
    return DriverFiles(mounts, tuple(directories), hook)


class DriverFileWatch:
    """The driver files, which are found anew when one is gone, when a directory has changed, or NVML has another
    version. ``root``: the driver root as this process sees it. For use by one thread."""

    def __init__(self, paths: HostPaths, driver_root: Path) -> None:
        self._paths, self._driver_root = paths, driver_root
        self.root = paths.here(str(driver_root))
        self._version = ""
        self._seen = self._changed_at()
        self.files = find_driver_files(paths, driver_root)

    def refresh(self, version: str | None) -> bool:
        """Find the files anew if they may have changed; returns whether they differ.

        ``version``: that of the driver, by NVML; None: it does not answer.
        """
        # First the times: a change while the files are searched shows at the next call.
        before, seen, self._version = self._version or version, self._changed_at(), version or self._version
        if (before, seen) == (self._version, self._seen) and all(map(self.exists, self.files.mounts.values())):
            return False
        last, self._seen, self.files = self.files, seen, find_driver_files(self._paths, self._driver_root)
        return self.files != last

    def exists(self, host_path: str) -> bool:
        """Whether a file exists that a CDI spec mounts."""
        return self._paths.runtime_has(host_path)

    def _changed_at(self) -> Sequence[int]:
        """When a name was last added to or removed from each directory."""
        directories = (resolve_inside(self.root, directory) for directory, _ in PLACES)
        return [(self.root / directory).stat().st_mtime_ns if directory is not None else 0 for directory in directories]


def _matches(root: Path) -> Iterator[tuple[str, str]]:
    """Name and target of each file, relative to ``root``. Files are listed once if /lib is a link into /usr."""
    seen: set[tuple[str | None, str]] = set()
    for directory, patterns in PLACES:
        for name, real in find_inside(root, directory, patterns):
            identity = (resolve_inside(root, str(Path(name).parent)), Path(name).name)
            if identity not in seen:
                seen.add(identity)
                yield name, real
