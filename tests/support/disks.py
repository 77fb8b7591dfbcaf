"""Real file systems that are small, full or read-only (needs root, else the test is skipped)."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def mounted(path: Path, *arguments: str) -> Iterator[None]:
    """Something is mounted at ``path`` while the block runs: ``mount ARGUMENTS path``."""
    try:
        mount(*arguments, str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs root and mount: {error}")
    try:
        yield
    finally:
        subprocess.run(["/bin/umount", "-l", str(path)], check=True)


@contextmanager
def small_disk(path: Path, size: str = "64k") -> Iterator[None]:
    """The directory ``path``, which is created, is a file system of ``size`` while the block runs."""
    path.mkdir(parents=True, exist_ok=True)
    with mounted(path, "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs"):
        yield


def remount(path: Path, option: str) -> None:
    """``option`` is ro or rw."""
    mount("-o", f"remount,{option}", str(path))


def fill(path: Path) -> Path:
    """Fill the file system of ``path`` to the last byte, also once more; deleting the returned file frees it."""
    filler = path / "filler"
    with filler.open("ab", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return filler


def mount(*arguments: str) -> None:
    subprocess.run(["/bin/mount", *arguments], check=True, capture_output=True)
