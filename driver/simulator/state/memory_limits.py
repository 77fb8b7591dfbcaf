"""Limits on GPU memory by cgroup, as driver R615 and newer enforce them: by the kernel (dmem) or by the driver (misc).

Sources: NVIDIA's MPS manual, "MPS v3 Memory Partitioning" (release 615), and the comments in nvml.h. Which error the
driver returns for a path that is no cgroup is an estimate. Not simulated: the effect of soft limits on MPS; the
memory that a limited process sees as the GPU's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice, takewhile
from pathlib import Path

import msgspec
import pynvml
from msgspec.structs import replace

from driver.errors import UsageError
from driver.simulator.description import CgroupControl
from driver.simulator.state.gpu_load import Load
from driver.simulator.tree import CGROUPS, MACHINE_CGROUPS

NO_LIMIT = int(pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX)


class CgroupLimit(msgspec.Struct, frozen=True, rename="camel"):
    """The limits of one cgroup on one GPU, in bytes. ``inode`` distinguishes the directory from a later one."""

    cgroup: str
    inode: int
    soft: int
    hard: int


Limits = tuple[CgroupLimit, ...]


class CgroupTree:
    """The cgroups of a simulated node: those below its own /sys/fs/cgroup, and those of the machine it runs on."""

    def __init__(self, root: Path, control: CgroupControl) -> None:
        self._root, self._control = root, control

    @cached_property
    def _top(self) -> str:
        return os.path.realpath(self._root / CGROUPS)

    @cached_property
    def _machine(self) -> str:
        return os.path.realpath(self._root / MACHINE_CGROUPS)

    def find(self, path: str) -> str:
        """The real path of a cgroup directory. Raises NVMLError: cgroup v1, or the path is no cgroup."""
        if self._control == "v1":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        real = os.path.realpath(path)
        if not os.path.isdir(real) or not any(_is_below(real, top) for top in (self._top, self._machine)):  # noqa: PTH112
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return real

    def with_limit(self, limits: Limits, cgroup: str, soft: int, hard: int) -> Limits:
        """The limits after those of a cgroup were set. Raises NVMLError: it takes none."""
        if not self._takes_limits(cgroup):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        if soft > hard:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        existing = _existing(limits)
        more = soft - (existing[cgroup].soft if cgroup in existing else 0)
        changed = {cgroup: CgroupLimit(cgroup, _inode(cgroup) or 0, soft, hard)}
        if more and self._control == "dmem":
            # The sum of what is below each ancestor; it stays there when a cgroup below is removed.
            for path in takewhile(self._takes_limits, islice(_upwards(cgroup), 1, None)):
                limit = existing.get(path) or CgroupLimit(path, _inode(path) or 0, 0, NO_LIMIT)
                changed[path] = replace(limit, soft=limit.soft + more)
        return tuple(limit for limit in (existing | changed).values() if limit.soft or limit.hard != NO_LIMIT)

    def reported(self, limits: Limits, cgroup: str) -> tuple[int, int]:
        """Soft and hard limit of a cgroup; with dmem one without files has those of the nearest ancestor with files."""
        nearest = next(filter(self._takes_limits, _upwards(cgroup)), None)
        limit = _existing(limit for limit in limits if limit.cgroup == nearest).get(nearest or "")
        return (limit.soft, limit.hard) if limit else (0, NO_LIMIT)

    def used(self, limits: Limits, cgroup: str, loads: Sequence[Load], now: float) -> int:
        """Bytes that count for a cgroup."""
        existing = _existing(limits) if loads else {}
        return sum(load.memory_at(now) for load in loads if self._counts(existing, load, cgroup))

    def check(self, limits: Limits, new: Load, others: Iterable[Load]) -> None:
        """Check that a new load keeps the limits of its cgroup. Raises UsageError, as a program gets OUT_OF_MEMORY."""
        existing, running = _existing(limits), list(others)
        for limit in self._of(existing, new.cgroup):
            used = sum(load.highest_memory for load in running if self._counts(existing, load, limit.cgroup))
            if used + new.highest_memory > limit.hard:
                raise UsageError(
                    f"memory: {new.highest_memory >> 20}Mi ends in CUDA_ERROR_OUT_OF_MEMORY: {limit.cgroup} is limited "
                    f"to {limit.hard >> 20}Mi and uses {used >> 20}Mi; up to {max(limit.hard - used, 0) >> 20}Mi"
                )

    def _counts(self, existing: Mapping[str, CgroupLimit], load: Load, cgroup: str) -> bool:
        """Whether the memory of a load counts for a cgroup: with misc only for its nearest limited ancestor."""
        if self._control == "dmem" or cgroup not in existing:
            return cgroup in _upwards(load.cgroup)
        return any(limit.cgroup == cgroup for limit in self._of(existing, load.cgroup))

    def _of(self, existing: Mapping[str, CgroupLimit], cgroup: str) -> list[CgroupLimit]:
        """The limits that hold a process in ``cgroup``: with dmem they nest, with misc only the nearest one counts."""
        limits = [existing[path] for path in _upwards(cgroup) if path in existing]
        return limits if self._control == "dmem" else limits[:1]

    def _takes_limits(self, cgroup: str) -> bool:
        """Whether a cgroup has the controller: with dmem unless its parent enables others for the cgroups below it.

        Those of the machine count as if they had it, whatever its kernel.
        """
        if not _is_below(cgroup, self._top):
            return _is_below(cgroup, self._machine)
        enabled = Path(cgroup).parent / "cgroup.subtree_control"
        return self._control == "misc" or not enabled.exists() or "dmem" in enabled.read_text().split()


def _existing(limits: Iterable[CgroupLimit]) -> dict[str, CgroupLimit]:
    """The limits of cgroups that were not removed since, by path."""
    return {limit.cgroup: limit for limit in limits if _inode(limit.cgroup) == limit.inode}


def _inode(cgroup: str) -> int | None:
    try:
        return os.stat(cgroup).st_ino  # noqa: PTH116
    except OSError:
        return None


def _upwards(cgroup: str) -> Iterator[str]:
    """A cgroup and its ancestors; nothing for a process without one."""
    while cgroup:
        yield cgroup
        cgroup = cgroup.rpartition("/")[0]


def _is_below(path: str, top: str) -> bool:
    return path == top or path.startswith(f"{top}/")
