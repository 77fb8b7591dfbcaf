"""The driver's files on the host that containers get: libraries, programs and firmware.

These are the user-space files that match the host's kernel driver, found below the driver root. Containers get them
where the loaders and the ``PATH`` of their images look. Links on the host, such as the short name of a library, are
files in the container, so that no links have to be created there.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from driver.errors import EnvironmentFault
from driver.hardware.host_paths import (
    LD_CACHE,
    PROGRAM_DIRECTORIES,
    HostPaths,
    find_inside,
    find_libraries,
    library_directories,
    resolve_inside,
)

CUDA = "libcuda.so.1"
CUDA_LINK = "libcuda.so"
"""Many programs load it by this name, though the packages of some drivers lack it."""

VERSIONED_CUDA = re.compile(r"/libcuda\.so\.(\d+\.\d[\d.]*)$")

LIBRARIES = (
    "libcuda.so*",
    "libcudadebugger.so*",
    "libnvcuvid.so*",
    "libnvidia-cfg.so*",
    "libnvidia-encode.so*",
    "libnvidia-gpucomp.so*",
    "libnvidia-ml.so*",
    "libnvidia-nvvm*.so*",
    "libnvidia-opencl.so*",
    "libnvidia-opticalflow.so*",
    "libnvidia-ptxjitcompiler.so*",
    "libnvidia-pkcs11*.so*",
)

PROGRAMS = (
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
)
"""Those of MPS are not among them: with its control program a container could end the programs of others."""

FIRMWARE = ("*/gsp*.bin",)
FIRMWARE_DIRECTORIES = ("lib/firmware/nvidia", "usr/lib/firmware/nvidia")
"""Containers get the files in the first one."""

LOADER_DIRECTORIES = ("/usr/lib64", f"/usr/lib/{os.uname().machine}-linux-gnu")
"""Where loaders look without a cache: those of Red Hat and SUSE; those of Debian, Ubuntu and distroless images."""

NVIDIA_DIRECTORY = "/usr/local/nvidia/lib64"
"""In ``LD_LIBRARY_PATH`` of NVIDIA's images. Not used with a hook: it would take precedence over the cache, and so over
the CUDA compatibility libraries of an image."""

PATH_DIRECTORIES = ("/usr/bin", "/usr/local/nvidia/bin")
"""In the ``PATH`` of all images, and of NVIDIA's."""

HOOKS = ("usr/bin/nvidia-cdi-hook", "usr/local/bin/nvidia-cdi-hook", "usr/local/nvidia/toolkit/nvidia-cdi-hook")
"""The hook program of the NVIDIA Container Toolkit on the host: from a package, from Talos, from the GPU Operator."""

AUTO, NONE = "auto", "none"
"""Values of ``--cdi-hook`` that are no path: the first of HOOKS that exists; do without."""

LDCONFIG = ("sbin/ldconfig", "usr/sbin/ldconfig", "usr/bin/ldconfig", "usr/local/sbin/ldconfig")
"""The host's ldconfig, which the hook runs in the container; the hook's own default first."""

ENABLE_COMPAT = "enable-cuda-compat"
"""A command of hooks since version 1.17.5. Earlier ones fail if they get it, and with them the container."""


LIMIT_MEMORY = "apply-cuda-memory-limits"
"""A command of hooks since September 2026 (NVIDIA/nvidia-container-toolkit, pull request 2075)."""


@dataclass(frozen=True, slots=True)
class DriverFiles:
    """The mounts (host path by container path), and the hook program for the runtime with the commands that it runs.

    ``memory_hook``: path and arguments, without the GPU, of the program that limits the memory of a container's own
    cgroup; empty if there is none.
    """

    mounts: Mapping[str, str]
    hook_commands: tuple[tuple[str, ...], ...]
    hook: str | None
    memory_hook: tuple[str, ...] = ()

    @property
    def has_cuda(self) -> bool:
        """Whether containers get the library that every CUDA program loads."""
        return any(path.endswith(f"/{CUDA}") for path in self.mounts)


def find_driver_files(
    paths: HostPaths, driver_root: Path, cdi_hook: str = AUTO, memory_hook: str = AUTO
) -> DriverFiles:
    """Find the files below ``driver_root``. ``cdi_hook``: AUTO, NONE or the hook's path on the host; ``memory_hook``:
    AUTO or NONE."""
    root = paths.here(str(driver_root))
    hook, ldconfig = _find_hook(paths.root, cdi_hook), _first(paths.root, LDCONFIG)
    libraries, commands = _libraries(root), list[tuple[str, ...]]()
    if hook is not None and ldconfig is not None and libraries:
        update = _update_ldcache(libraries, paths.for_runtime(f"/{ldconfig}"))
        commands = [*_enable_compat(paths.root, hook, libraries), update]
    directories = LOADER_DIRECTORIES if commands else (*LOADER_DIRECTORIES, NVIDIA_DIRECTORY)
    files = _copied(libraries, directories) | _programs(root) | _firmware(root)
    mounts = {path: paths.for_runtime(str(driver_root / files[path])) for path in sorted(files)}
    program, limit_memory = paths.for_runtime(f"/{hook}"), tuple[str, ...]()
    if hook is not None and memory_hook == AUTO and _has_command(paths.root, hook, LIMIT_MEMORY):
        limit_memory = (program, LIMIT_MEMORY, "--driver-root", paths.for_runtime(str(driver_root)))
    return DriverFiles(mounts, tuple(commands), program if commands else None, limit_memory)


class DriverFileWatch:
    """The driver files, which are found anew when one is gone, when a directory has changed, or NVML has another
    version. ``root``: the driver root as this process sees it. For use by one thread."""

    def __init__(self, paths: HostPaths, driver_root: Path, cdi_hook: str = AUTO, memory_hook: str = AUTO) -> None:
        """Find the files. Raises EnvironmentFault if ``cdi_hook`` is a path that does not exist."""
        self._paths, self._driver_root, self._cdi_hook, self._memory_hook = paths, driver_root, cdi_hook, memory_hook
        self.root = paths.here(str(driver_root))
        if cdi_hook not in {AUTO, NONE} and _find_hook(paths.root, cdi_hook) is None:
            raise EnvironmentFault(
                f"--cdi-hook {cdi_hook}: does not exist on the host; give the path of nvidia-cdi-hook, {AUTO} or {NONE}"
            )
        self._version = ""
        self._directories = tuple(library_directories(self.root))
        self._seen = self._changed_at()
        self.files = find_driver_files(paths, driver_root, cdi_hook, memory_hook)

    def refresh(self, version: str | None) -> bool:
        """Find the files anew if they may have changed; returns whether they differ.

        ``version``: that of the driver, by NVML; None: it does not answer.
        """
        # First the times: a change while the files are searched shows at the next call.
        before, seen, self._version = self._version or version, self._changed_at(), version or self._version
        if (before, seen) == (self._version, self._seen) and all(map(self.exists, set(self.files.mounts.values()))):
            return False
        last, self._seen, self._directories = self.files, seen, tuple(library_directories(self.root))
        self.files = find_driver_files(self._paths, self._driver_root, self._cdi_hook, self._memory_hook)
        return self.files != last

    def exists(self, host_path: str) -> bool:
        """Whether a file exists that a CDI spec mounts."""
        return self._paths.runtime_has(host_path)

    def _changed_at(self) -> Sequence[int]:
        """When a name was last added to or removed from each directory, and when ldconfig last wrote its cache."""
        inside = (LD_CACHE, *self._directories, *PROGRAM_DIRECTORIES, *FIRMWARE_DIRECTORIES)
        hooks = [str(Path(hook).parent) for hook in (HOOKS if self._cdi_hook == AUTO else ())]
        return [*(_changed(self.root, path) for path in inside), *(_changed(self._paths.root, path) for path in hooks)]


def _changed(root: Path, path: str) -> int:
    """When a file or directory below ``root`` was last changed; 0 if it does not exist."""
    real = resolve_inside(root, path)
    return (root / real).stat().st_mtime_ns if real is not None else 0


def _libraries(root: Path) -> dict[str, str]:
    """Path in the container and target below ``root`` of each library, in the directory that it has there."""
    libraries = {f"/{name}": real for name, real in find_libraries(root, LIBRARIES)}
    for path in [path for path in libraries if path.endswith(f"/{CUDA}")]:
        libraries.setdefault(path.removesuffix(CUDA) + CUDA_LINK, libraries[path])
    return libraries


def _copied(libraries: dict[str, str], directories: Iterable[str]) -> dict[str, str]:
    """The libraries, also in ``directories`` by the names that loaders look for: those of links, such as libcuda.so.1,
    and of libraries without a link. Of those with the same name the first."""
    links = {path: real for path, real in libraries.items() if Path(path).name != Path(real).name}
    targets = set(links.values())
    named = links | {path: real for path, real in libraries.items() if real not in targets}
    first_last = list(reversed(named.items()))
    return {f"{folder}/{Path(path).name}": real for folder in directories for path, real in first_last} | libraries


def _programs(root: Path) -> dict[str, str]:
    files: dict[str, str] = {}
    for directory in PROGRAM_DIRECTORIES:
        for name, real in find_inside(root, directory, PROGRAMS):
            for target in PATH_DIRECTORIES:
                files.setdefault(f"{target}/{Path(name).name}", real)
    return files


def _firmware(root: Path) -> dict[str, str]:
    files: dict[str, str] = {}
    for directory in FIRMWARE_DIRECTORIES:
        for name, real in find_inside(root, directory, FIRMWARE):
            files.setdefault(f"/{FIRMWARE_DIRECTORIES[0]}/{name.removeprefix(directory).lstrip('/')}", real)
    return files


def _find_hook(root: Path, cdi_hook: str) -> str | None:
    """The hook program's path below the host's root; None: there is none, or none is to be used."""
    return None if cdi_hook == NONE else _first(root, HOOKS if cdi_hook == AUTO else (cdi_hook.lstrip("/"),))


def _first(root: Path, names: Iterable[str]) -> str | None:
    return next((name for name in names if resolve_inside(root, name) is not None), None)


def _update_ldcache(libraries: Iterable[str], ldconfig: str) -> tuple[str, ...]:
    """The command that lists the libraries in the container's cache of ldconfig."""
    folders = dict.fromkeys(str(Path(path).parent) for path in libraries)
    program = () if ldconfig == f"/{LDCONFIG[0]}" else ("--ldconfig-path", ldconfig)
    return ("update-ldcache", *program, *(argument for folder in folders for argument in ("--folder", folder)))


def _enable_compat(root: Path, hook: str, libraries: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """The command by which an image's newer CUDA compatibility libraries take precedence over the driver's."""
    versions = [match[1] for match in map(VERSIONED_CUDA.search, libraries) if match is not None]
    if versions and _has_command(root, hook, ENABLE_COMPAT):
        yield ENABLE_COMPAT, f"--host-driver-version={versions[0]}"


def _has_command(root: Path, hook: str, command: str) -> bool:
    """Whether the hook program knows a command; the GPU Operator's is a script before the real one."""
    programs = [resolve_inside(root, name) for name in (hook, f"{hook}.real")]
    return any(_contains(root / program, command) for program in programs if program is not None)


def _contains(program: Path, text: str) -> bool:
    try:
        with program.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(text.encode()) >= 0
    except (OSError, ValueError):  # an empty file can not be mapped
        return False
