"""The files of the NVIDIA driver that a container needs, found below the driver root.

The container gets the user-space libraries of the host's own kernel driver, under the same paths, and
under their short names too, so that nothing in the container has to make links.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from driver.hardware.host import HostPaths

LIBRARY_DIRECTORIES = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "lib64",
)

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
    "usr/bin/nvidia-smi",
    "usr/bin/nvidia-debugdump",
    "usr/bin/nvidia-persistenced",
    "usr/bin/nvidia-cuda-mps-control",
    "usr/bin/nvidia-cuda-mps-server",
)

FIRMWARE = ("lib/firmware/nvidia/*/gsp*.bin",)

LINKS = 40
"""Links followed for one path, as many as Linux follows (path_resolution(7))."""

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
    patterns = [f"{directory}/{library}" for directory in LIBRARY_DIRECTORIES for library in LIBRARIES]
    found = sorted(set(_matches(root, [*patterns, *BINARIES, *FIRMWARE])))
    mounts = tuple(Mount(paths.for_runtime(str(driver_root / real)), f"/{name}") for name, real in found)
    directories = sorted({str(Path(m.container_path).parent) for m in mounts if ".so" in m.container_path})
    hook = paths.for_runtime(str(driver_root / CDI_HOOK)) if (root / CDI_HOOK).exists() else None
    return DriverFiles(mounts, tuple(directories), hook)


def _matches(root: Path, patterns: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Name and file behind it, both relative to ``root``. On merged-usr systems /lib is a link into /usr: each once."""
    seen: set[tuple[str | None, str]] = set()
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            name = str(path.relative_to(root))
            real = resolve_inside(root, name)
            identity = (resolve_inside(root, str(Path(name).parent)), path.name)
            if real is not None and identity not in seen:
                seen.add(identity)
                yield name, real


def resolve_inside(root: Path, name: str) -> str | None:
    """What ``name`` is below ``root`` once every link is followed as if ``root`` were "/"; None where it dangles.

    A link with an absolute target means the host's (or the driver container's) root, which this process
    sees elsewhere; the runtime would follow it from a root of its own.
    """
    todo, done, links = list(reversed(Path(name).parts)), Path(), 0
    while todo:
        part = todo.pop()
        if part == "..":
            done = done.parent
        elif (root / done / part).is_symlink():
            links += 1
            if links > LINKS:
                return None
            target = (root / done / part).readlink()
            done = Path() if target.is_absolute() else done
            todo += reversed(target.relative_to("/").parts if target.is_absolute() else target.parts)
        else:
            done /= part
    return str(done) if (root / done).exists() else None
