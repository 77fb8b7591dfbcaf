"""The image's files: made alike, listed, told apart by layer."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Entry:
    """A file, folder or link; ``path`` is relative to /, ``content`` a file's SHA-256 or where a link points."""

    path: str
    mode: int
    size: int
    content: str

    def __str__(self) -> str:
        return f"{stat.filemode(self.mode)} {self.size:>9} {self.content:<64} {self.path}"


class Pruning:
    """Which files are left out, by the patterns of pruned.txt."""

    def __init__(self, text: str) -> None:
        self._patterns = lines_of(text)

    def leaves_out(self, path: str) -> bool:
        """``path`` is relative to /. The last pattern that matches decides; ``*`` reaches over slashes."""
        matching = (each for each in reversed(self._patterns) if fnmatch.fnmatchcase(path, each.removeprefix("!")))
        return not next(matching, "!").startswith("!")


def lines_of(text: str) -> list[str]:
    """The lines that say something: no comments, no empty ones."""
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def prune(root: Path, pruning: Pruning) -> None:
    """Remove what ``pruning`` leaves out, and the folders that are empty then."""
    for entry in reversed(listing(root)):
        path = root / entry.path
        if not stat.S_ISDIR(entry.mode):
            if pruning.leaves_out(entry.path):
                path.unlink()
        elif not any(path.iterdir()):
            path.rmdir()


def settle(root: Path) -> None:
    """Give everything below ``root`` one of three modes and no time: what is left says nothing about this build."""
    for path in walk(root):
        if not path.is_symlink():
            executable = path.is_dir() or path.stat().st_mode & 0o111
            path.chmod(0o755 if executable else 0o644)
        os.utime(path, (0, 0), follow_symlinks=False)


def walk(root: Path) -> Iterator[Path]:
    """All below ``root``, folders before what is in them, always in the same order."""
    for path in sorted(root.iterdir()):
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from walk(path)


def listing(root: Path) -> list[Entry]:
    """Everything below ``root``."""
    return [_entry(path, root) for path in walk(root)]


def divide(root: Path, layers: Path, layer_of: Callable[[str], str]) -> None:
    """Move every file and empty folder below ``root`` into ``layers``/<its layer>, at the same place."""
    for entry in listing(root):
        path = root / entry.path
        if not stat.S_ISDIR(entry.mode) or not any(path.iterdir()):
            target = layers / layer_of(entry.path) / entry.path
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)


def _entry(path: Path, root: Path) -> Entry:
    status = path.lstat()
    content = ""
    if path.is_symlink():
        content = str(path.readlink())
    elif path.is_file():
        content = hashlib.sha256(path.read_bytes()).hexdigest()
    return Entry(str(path.relative_to(root)), status.st_mode, 0 if path.is_dir() else status.st_size, content)
