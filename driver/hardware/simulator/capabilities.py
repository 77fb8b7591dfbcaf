"""``/proc/driver/nvidia/capabilities``: the files through which a container gets at a MIG device.

Each instance has an ``access`` file that names the minor of its ``/dev/nvidia-caps`` node. The numbering is
the kernel module's (``/proc/driver/nvidia-caps/mig-minors``): 1 and 2 for config and monitor, then for each
GPU 15 GPU instances of one minor each, followed by those of their 8 compute instances.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from .files import make_folder, write_file
from .state import GpuState

CONFIG_MINOR = 1
MONITOR_MINOR = 2
_FIRST_MINOR = 3
_COMPUTE_INSTANCES = 8
_GPU_INSTANCES = 15


def gpu_instance_minor(gpu: int, gi: int) -> int:
    """Minor of the capability device of a GPU instance."""
    return _FIRST_MINOR + (gpu * _GPU_INSTANCES + gi) * (1 + _COMPUTE_INSTANCES)


def compute_instance_minor(gpu: int, gi: int, ci: int) -> int:
    """Minor of the capability device of a compute instance."""
    return gpu_instance_minor(gpu, gi) + 1 + ci


def access_text(minor: int) -> str:
    """Content of an ``access`` file. 292 is 0444, as the module prints it."""
    return f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"


def minors_text(gpus: int) -> str:
    """Content of ``mig-minors`` for a node of so many GPUs."""
    lines = [f"config {CONFIG_MINOR}", f"monitor {MONITOR_MINOR}"]
    for gpu in range(gpus):
        for gi in range(_GPU_INSTANCES):
            lines.append(f"gpu{gpu}/gi{gi}/access {gpu_instance_minor(gpu, gi)}")
            lines.extend(
                f"gpu{gpu}/gi{gi}/ci{ci}/access {compute_instance_minor(gpu, gi, ci)}"
                for ci in range(_COMPUTE_INSTANCES)
            )
    return "\n".join(lines) + "\n"


class Capabilities:
    """The capability files of a node's GPUs. Calls for one GPU come from the holder of its lock only.

    What an instance's file says follows from its number. So the folder of one that is gone is kept aside until the
    number comes back: to make and remove files costs the disk's journal more than all else that a simulated GPU does.
    """

    def __init__(self, root: Path) -> None:
        self._base = str(root / "proc/driver/nvidia/capabilities")
        self._aside = str(root / "sim/capabilities")

    def add(self, gpu: int, state: GpuState) -> None:
        """Make the files that the state's instances lack."""
        for relative, minor in _wanted(gpu, state):
            folder = f"{self._base}/gpu{gpu}/mig/{relative}"
            if _complete(folder):
                continue
            # What a killed process began is kept like the rest.
            if not _moved(self._kept(gpu, relative), folder) or not _complete(folder):
                write_file(Path(folder, "access"), access_text(minor), 0o444)

    def remove_stale(self, gpu: int, state: GpuState) -> None:
        """Remove the files that belong to no instance of the state."""
        wanted = {relative for relative, _ in _wanted(gpu, state)}
        own = f"{self._base}/gpu{gpu}/mig"
        # What is inside a GPU instance goes first, for it is kept by itself.
        stale = [f"{gi}/{ci}" for gi in _folders(own) for ci in _folders(f"{own}/{gi}")]
        for relative in (*stale, *_folders(own)):
            if relative not in wanted:
                self._put_aside(f"{own}/{relative}", self._kept(gpu, relative))

    def _kept(self, gpu: int, relative: str) -> str:
        return f"{self._aside}/gpu{gpu}-{relative.replace('/', '-')}"

    def _put_aside(self, folder: str, kept: str) -> None:
        if not _moved(folder, kept):
            make_folder(Path(self._aside))
            if not _moved(folder, kept):
                shutil.rmtree(folder)


def _complete(folder: str) -> bool:
    return os.access(f"{folder}/access", os.F_OK)


def _moved(source: str, target: str) -> bool:
    """Whether the folder could be moved: it is there, and the place for it."""
    try:
        os.rename(source, target)  # noqa: PTH104 - a Path costs as much as the call
    except OSError:
        return False
    return True


def _wanted(gpu: int, state: GpuState) -> Iterator[tuple[str, int]]:
    for gi in state.instances:
        yield f"gi{gi.id}", gpu_instance_minor(gpu, gi.id)
        for ci in gi.compute:
            yield f"gi{gi.id}/ci{ci.id}", compute_instance_minor(gpu, gi.id, ci.id)


def _folders(path: str) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(path) if entry.is_dir()]
    except FileNotFoundError:
        return []
