"""Writing the simulated machine's files: whole or not at all, with exact modes whatever the umask."""

from __future__ import annotations

import os
from pathlib import Path


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


def link(path: Path, target: str) -> None:
    """Make a symbolic link, unless there is one."""
    if not path.is_symlink():
        make_folder(path.parent)
        path.symlink_to(target)
