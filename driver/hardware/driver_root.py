"""Finding files below the driver root: "/" on a host with a driver, a directory where the driver is in a container."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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

HOST = Path("/")

NVML = "libnvidia-ml.so.1"

LOADED = "/proc/driver/nvidia/version"
"""There while the kernel module is, wherever its user-space part lies."""

CONTROL_NODE = "dev/nvidiactl"

LINKS = 40
"""Links followed for one path, as many as Linux follows (path_resolution(7))."""


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


def find_inside(root: Path, directory: str, patterns: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Name and file behind it, both relative to ``root``, of what matches below ``directory``; links are followed as
    if ``root`` were "/", those on the way to ``directory`` too."""
    real = resolve_inside(root, directory)
    if real is None:
        return
    for pattern in patterns:
        # Looking for a name without a wildcard would follow the link that it is, out of the root.
        for path in sorted((root / real).glob(pattern)) if "*" in pattern else [root / real / pattern]:
            name = f"{directory}/{path.relative_to(root / real)}"
            target = resolve_inside(root, name)
            if target is not None:
                yield name, target


def find_nvml(root: Path) -> Path | None:
    """NVML's library below ``root``; None where there is none."""
    for directory in LIBRARY_DIRECTORIES:
        for _, real in find_inside(root, directory, [NVML]):
            return root / real
    return None


def missing_driver(paths: HostPaths, driver_root: Path) -> str | None:
    """What is not there yet of a driver that a container brings; None: it is complete."""
    root = paths.here(str(driver_root))
    if not root.is_dir():
        return f"{root} does not exist"
    if find_nvml(root) is None:
        return f"{root} has no {NVML} in {', '.join(LIBRARY_DIRECTORIES[:3])}"
    return None if paths.has(LOADED) else f"{paths.here(LOADED)} is missing: the kernel module is not loaded"


def device_root(paths: HostPaths, driver_root: Path) -> str:
    """Where the GPUs' device nodes are: below the driver root where that has them (the driver's container makes them in
    its own /dev), else the host's."""
    inside = driver_root != HOST and paths.has(str(driver_root / CONTROL_NODE))
    return str(driver_root) if inside else str(HOST)
