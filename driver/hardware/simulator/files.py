"""Writing the simulated machine's files: whole or not at all, with exact modes whatever the umask."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE


def make_folder(path: str | Path) -> None:
    """Make a directory of mode 0755, and its parents; one that exists is left alone."""
    try:
        os.mkdir(path, 0o755)  # noqa: PTH102 - a node is a thousand files, and a Path costs as much as the call
    except FileNotFoundError:
        make_folder(os.path.dirname(path))  # noqa: PTH120
        make_folder(path)
    except FileExistsError:
        return
    os.chmod(path, 0o755)  # noqa: PTH101, S103 - whatever the umask


def write_file(path: Path, text: str, mode: int = 0o644) -> None:
    """Make a file with that content, unless it has it already. A reader sees the old content or the new."""
    content = text.encode()
    folder, name = os.path.split(path)
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            if file.read() == content:
                return
    except FileNotFoundError:
        make_folder(folder)
    temporary = f"{folder}/.{name}.new"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        os.write(descriptor, content)
        os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)
    os.replace(temporary, path)  # noqa: PTH105


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
    if not os.path.islink(path):  # noqa: PTH114
        make_folder(os.path.dirname(path))  # noqa: PTH120
        os.symlink(target, path)  # noqa: PTH211
