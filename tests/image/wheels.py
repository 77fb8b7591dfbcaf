"""Python distributions in the image: by hash from requirements.lock, then the project's own wheel, all compiled."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from driver.errors import EnvironmentFault
from tests.image.architecture import Architecture

PYTHON = "/usr/bin/python3.11"
"""In the image."""
PYTHON_VERSION = "3.11"
STDLIB = "usr/lib/python3.11"
SITE = "usr/local/lib/python3.11/dist-packages"
GLIBC = "manylinux_2_36"
"""The newest wheels that the C library of Debian 12 can load."""
COMMAND_S = 600.0
CHROOT = "/usr/sbin/chroot"

LAUNCHER = f"""\
#!{PYTHON} -I
import sys

from tessera.cli import main

sys.exit(main())
"""
"""-I: neither a PYTHON variable nor the working directory decides what is imported."""


@dataclass(frozen=True)
class Distribution:
    """An installed distribution: what its metadata says."""

    name: str
    version: str
    licence: str | None


def install_dependencies(root: Path, lock: Path, architecture: Architecture) -> None:
    """Install what ``lock`` pins below ``root``; wheels only, so no compiler is needed."""
    _install(root, architecture, "--require-hashes", "--requirement", str(lock))


def build_project(project: Path, constraints: Path, folder: Path) -> None:
    """Build the project's wheel into ``folder``; ``constraints`` pins by hash what builds it."""
    output = ("--wheel", "--out-dir", str(folder))
    _uv("build", *output, "--build-constraints", str(constraints), "--require-hashes", str(project))


def install_project(root: Path, wheels: Path, architecture: Architecture) -> None:
    """Install the project's wheel, which is in the folder ``wheels``, and the command ``tessera``."""
    _install(root, architecture, "--no-index", "--find-links", str(wheels), "tessera-dra")
    launcher = root / "usr/bin/tessera"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)


def compile_all(root: Path) -> None:
    """Compile all that is Python below ``root`` with the Python of that image, in a chroot."""
    _compile(root, f"/{STDLIB}", f"/{SITE}")


def compile_foreign(root: Path, native_root: Path) -> None:
    """Compile all that is Python below ``root``, whose Python can not run here, with the Python below ``native_root``.

    Bytecode depends on the version of Python, not on the architecture.
    """
    guest = native_root / "image"
    root.rename(guest)
    _compile(native_root, "-s", "/image", "-p", "/", f"/image/{STDLIB}", f"/image/{SITE}")
    guest.rename(root)


def _compile(root: Path, *what: str) -> None:
    """Run compileall in a chroot. Raises EnvironmentFault where something does not compile.

    The bytecode is never held against its source again (PEP 552, unchecked-hash): no time is in it, so two builds are
    alike, and no process tries to write another.
    """
    # A fixed seed: sets that are constants are written in their order.
    environment = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    flags = ["-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"]
    command = [CHROOT, str(root), PYTHON, "-sP", *flags, *what]
    _run(command, environment)  # nothing of ours: PYTHONPYCACHEPREFIX would lead the bytecode elsewhere


def settle_records(root: Path) -> None:
    """Take off each RECORD what is not in the image: commands, say, whose hashes differ from build to build."""
    for record in (root / SITE).glob("*.dist-info/RECORD"):
        with record.open(newline="") as file:
            rows = [row for row in csv.reader(file) if row and (root / SITE / row[0]).exists()]
        with record.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(sorted(rows))


def distributions(root: Path) -> list[Distribution]:
    """What is installed, by name."""
    found = []
    for file in (root / SITE).glob("*.dist-info/METADATA"):
        metadata = HeaderParser().parsestr(file.read_text())
        licence = metadata["License-Expression"] or metadata["License"]
        name = re.sub(r"[-_.]+", "-", metadata["Name"]).lower()  # as locks and package URLs have it
        found.append(Distribution(name, metadata["Version"], _one_line(licence)))
    return sorted(found, key=lambda each: each.name)


def _one_line(licence: str | None) -> str | None:
    """Some put the whole text of their licence there."""
    lines = (licence or "").strip().splitlines()
    return lines[0] if len(lines) == 1 else None


def _install(root: Path, architecture: Architecture, *what: str) -> None:
    site = root / SITE
    site.mkdir(parents=True, exist_ok=True)
    target = ("--python-version", PYTHON_VERSION, "--python", sys.executable, "--target", str(site))
    platform = ("--python-platform", f"{architecture.machine}-{GLIBC}")
    _uv("pip", "install", "--no-deps", "--only-binary", ":all:", "--link-mode", "copy", *target, *platform, *what)
    # Commands of dependencies, for another Python at that; and what uv leaves for itself.
    shutil.rmtree(site / "bin", ignore_errors=True)
    (site / ".lock").unlink(missing_ok=True)


def _uv(*arguments: str) -> None:
    _run([sys.executable, "-m", "uv", "--quiet", *arguments], dict(os.environ))


def _run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip()
        raise EnvironmentFault(f"{' '.join(command[:6])} ...: exit status {done.returncode}: {said[-2000:]}")
