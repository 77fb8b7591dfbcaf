"""Writing the simulated machine's files: whole or not at all, with exact modes whatever the umask."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE


def make_folder(path: Path) -> None:
    """Make a directory of mode 0755, and its parents; one that exists is left alone."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(mode=0o755, exist_ok=True)
        folder.chmod(0o755)


def write_file(path: Path, text: str, mode: int = 0o644) -> None:
    """Make a file with that content, unless it has it already. A reader sees the old content or the new."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        os.fchmod(descriptor, mode)
    temporary.replace(path)


def swap_in(new: str, path: str) -> None:
    """Put the file ``new`` in the place of ``path``, at one instant, and remove what was there.

    They are exchanged where the file system can: at a rename over a file ext4 begins to write the new one to disk,
    and the next change would wait for that.

    :raises OSError: neither is possible
    """
    if _LIBC.renameat2(_HERE, new.encode(), _HERE, path.encode(), _EXCHANGE) == 0:
        os.unlink(new)  # noqa: PTH108 - a Path costs as much as the call
    else:
        os.replace(new, path)  # noqa: PTH105


def link(path: Path, target: str) -> None:
    """Make a symbolic link, unless there is one."""
    if not path.is_symlink():
        make_folder(path.parent)
        path.symlink_to(target)
