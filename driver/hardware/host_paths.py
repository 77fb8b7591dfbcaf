"""Paths of the host as this process and the container runtime see them, and files below the driver root.

The driver root is "/" on a host with an installed driver, else the directory of a containerised driver.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

LIBRARY_DIRECTORIES = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "lib64",
    "usr/lib",
    "lib",
    "usr/local/nvidia/lib64",
    "usr/local/lib64",
    "usr/local/lib",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "usr/lib/nvidia/tesla",
)
"""Where drivers have their libraries, below the driver root: distributions, the host of a container, then Talos,
Debian and Bottlerocket. Other directories are found by the cache of ldconfig."""

PROGRAM_DIRECTORIES = ("usr/bin", "usr/local/nvidia/bin", "usr/local/bin", "bin", "opt/bin")
"""Where drivers have their programs; the last one on Flatcar."""

LD_CACHE = "etc/ld.so.cache"
"""Names the libraries in all directories that ldconfig of the driver root searches."""

LD_CACHE_START = b"glibc-ld.so.cache1.1"
"""An older table may precede it. Source: struct cache_file_new in glibc, sysdeps/generic/dl-cache.h."""

LD_CACHE_HEADER_BYTES = 48
LD_CACHE_ENTRY = struct.Struct("=iIIIQ")
"""Flags, offset of the name, offset of the path, two fields that are not needed here."""

CACHED_LIBRARIES = ("libcuda.so", "libnvidia-ml.so")
"""The directories of these libraries have the rest of the driver."""

NOT_OF_THE_DRIVER = {"compat", "stubs"}
"""Directories of the CUDA toolkit whose libcuda.so.1 is not that of the kernel module."""

ELF_32_BIT = b"\x7fELF\x01"

HOST = Path("/")

NVML = "libnvidia-ml.so.1"

LOADED = "/proc/driver/nvidia/version"
"""Exists while the kernel module is loaded, wherever the user-space driver is."""

CONTROL_NODE = "dev/nvidiactl"

LINKS = 40
"""Most symbolic links in one path, as in Linux (path_resolution(7))."""

BOOT_ID = "/proc/sys/kernel/random/boot_id"
"""A random UUID that the kernel makes at each boot (proc(5))."""

NVIDIA_VENDOR = "0x10de"
DISPLAY = "0x03"
"""Base class of display controllers: VGA (0x0300..) and 3D (0x0302..)."""

SHOWN_SIGNS = 3


@dataclass(frozen=True, slots=True)
class HostPaths:
    """Where the host's files are.

    ``root`` is where this process sees the host's root directory. ``runtime_root`` is what the container
    runtime has to put in front of the same path: "/" for a real host, the simulated node's directory else.
    """

    root: Path
    runtime_root: Path

    def here(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def for_runtime(self, path: str) -> str:
        return _joined(self.runtime_root, path)

    def runtime_has(self, path: str) -> bool:
        """Whether the file exists that the container runtime finds at ``path``, as ``for_runtime`` returns it."""
        return self.has(path.removeprefix(str(self.runtime_root).rstrip("/")))

    def has(self, path: str) -> bool:
        return os.access(_joined(self.root, path), os.F_OK)

    def read(self, path: str) -> str:
        """Read a file. Raises OSError."""
        with open(_joined(self.root, path), encoding="utf-8") as file:  # noqa: PTH123
            return file.read()


def _joined(root: Path, path: str) -> str:
    """Join as strings: a prepare does this ten times, and a Path costs more than the file access."""
    return f"{str(root).rstrip('/')}/{path.lstrip('/')}"


def boot_id(paths: HostPaths) -> str:
    """The id of the current boot; empty if it cannot be read, so that reboots are not detected.

    No MIG instance and no container process survives a reboot.
    """
    try:
        return paths.here(BOOT_ID).read_text().strip()
    except OSError:
        return ""


def resolve_inside(root: Path, name: str) -> str | None:
    """Resolve ``name`` below ``root`` as if ``root`` were "/"; None if it does not exist.

    A link with an absolute target refers to the root of the host or of the driver container, which this process
    sees at ``root``; the container runtime resolves it from its own root.
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
    """Yield name and resolved path, relative to ``root``, of files that match ``patterns`` below ``directory``.

    Links are resolved as if ``root`` were "/", also those in the path of ``directory``.
    """
    real = resolve_inside(root, directory)
    if real is None:
        return
    for pattern in patterns:
        # A glob without a wildcard would follow a link out of the root.
        for path in sorted((root / real).glob(pattern)) if "*" in pattern else [root / real / pattern]:
            name = f"{directory}/{path.relative_to(root / real)}"
            target = resolve_inside(root, name)
            if target is not None:
                yield name, target


def find_libraries(root: Path, patterns: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield name and resolved path, relative to ``root``, of 64-bit libraries in the directories of drivers.

    Each file is listed once if a directory is a link to another one, as /lib is into /usr.
    """
    directories = set()
    for directory in library_directories(root):
        real = resolve_inside(root, directory)
        if real is not None and real not in directories:
            directories.add(real)
            yield from (file for file in find_inside(root, directory, patterns) if not _is_32_bit(root / file[1]))


def library_directories(root: Path) -> Iterator[str]:
    """The usual directories of drivers, then those that only the cache of ldconfig names."""
    yield from LIBRARY_DIRECTORIES
    yield from dict.fromkeys(_cached_directories(root))


def _cached_directories(root: Path) -> Iterator[str]:
    """The directories in the cache of ldconfig that have libraries of the driver."""
    cache = resolve_inside(root, LD_CACHE)
    if cache is None:
        return
    try:
        content = (root / cache).read_bytes()
        content = content[content.index(LD_CACHE_START) :]
        (entries,) = struct.unpack_from("=I", content, len(LD_CACHE_START))
        end = LD_CACHE_HEADER_BYTES + entries * LD_CACHE_ENTRY.size
        for _, _, path, _, _ in LD_CACHE_ENTRY.iter_unpack(content[LD_CACHE_HEADER_BYTES:end]):
            library = Path(os.fsdecode(content[path : content.index(b"\0", path)]))
            if library.name.startswith(CACHED_LIBRARIES) and NOT_OF_THE_DRIVER.isdisjoint(library.parts):
                yield str(library.parent).lstrip("/")
    except (OSError, ValueError, struct.error):  # not readable, or a format that does not exist yet
        return


def _is_32_bit(library: Path) -> bool:
    try:
        with library.open("rb") as file:
            return file.read(len(ELF_32_BIT)) == ELF_32_BIT
    except OSError:
        return False


def find_program(root: Path, name: str) -> str | None:
    """The resolved path, relative to ``root``, of a program of the driver; None if there is none."""
    paths = (resolve_inside(root, f"{directory}/{name}") for directory in PROGRAM_DIRECTORIES)
    return next((path for path in paths if path is not None), None)


def find_nvml(root: Path) -> Path | None:
    """Find NVML's library below ``root``; None if there is none."""
    return next((root / real for _, real in find_libraries(root, [NVML])), None)


def missing_driver(paths: HostPaths, driver_root: Path) -> str | None:
    """The missing part of a containerised driver; None once it is complete."""
    root = paths.here(str(driver_root))
    if not root.is_dir():
        return f"{root} does not exist"
    if find_nvml(root) is None:
        return f"{root} has no {NVML} in {', '.join(LIBRARY_DIRECTORIES[:3])} or another usual directory"
    return None if paths.has(LOADED) else f"{paths.here(LOADED)} is missing: the kernel module is not loaded"


def device_root(paths: HostPaths, driver_root: Path) -> str:
    """The root of the GPUs' device nodes: the driver root if it has them (a driver container creates them in its own
    /dev), else the host's root."""
    inside = driver_root != HOST and paths.has(str(driver_root / CONTROL_NODE))
    return str(driver_root) if inside else str(HOST)


def real_gpus(root: Path) -> list[str]:
    """Files below ``root``, the machine's own root directory, that show a real GPU. NVML is not needed."""
    signs = [path for path in (root / "dev").glob("nvidia[0-9]*") if not path.is_dir()]
    signs += (root / "proc/driver/nvidia/gpus").glob("*")
    signs += (path for path in (root / "sys/bus/pci/devices").glob("*") if _is_gpu(path))
    return [f"/{path.relative_to(root)}" for path in sorted(signs)]


def summary(signs: list[str]) -> str:
    """The first few of ``signs`` for a message."""
    more = len(signs) - SHOWN_SIGNS
    return ", ".join(signs[:SHOWN_SIGNS]) + (f" and {more} more" if more > 0 else "")


def _is_gpu(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor == NVIDIA_VENDOR and kind.startswith(DISPLAY)
