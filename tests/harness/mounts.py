"""The mounts below a directory, and taking them away."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

from driver.errors import EnvironmentFault

MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


def mounts_below(directory: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> list[Path]:
    """Every mount point in ``directory`` or below, the last mounted first: the order in which they can go."""
    points = (_unescape(line.split()[4]) for line in mountinfo.read_text().splitlines())
    return [Path(point) for point in points if Path(point).is_relative_to(directory)][::-1]


def unmount_below(directory: Path) -> None:
    """Unmount everything in ``directory`` or below; raises EnvironmentFault if something stays.

    A caller that removes the directory relies on that: a bind mount left behind would lead it to somebody's files.
    """
    for flags in (0, MNT_DETACH):
        for point in mounts_below(directory):
            _umount(point, flags)
    left = mounts_below(directory)
    if left:
        raise EnvironmentFault(f"can't unmount {', '.join(map(str, left))}; nothing below {directory} was removed")


def _umount(point: Path, flags: int) -> None:
    # Failure (busy, gone with another) shows in the list of those left.
    _libc.umount2(os.fsencode(point), flags)


def _unescape(text: str) -> str:
    """Spaces and the like are written as octal numbers in mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
