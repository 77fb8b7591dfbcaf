"""How long ``tessera map`` takes for the summary of a large cluster: the whole process, lists over HTTP."""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import yaml

from driver.errors import ApiError
from tests.bench.fleet.recorded import record
from tests.bench.fleet.replaying import folder_of
from tests.support.api_server import Exchange, HttpServer
from tests.support.plugin import COMMAND_S, TESSERA

NODES = 1000
"""With eight GPUs each; three quarters of them are held."""

RUNS = 5


def summary_s() -> float:
    """Median seconds from the start of the process to its end."""
    with tempfile.TemporaryDirectory(prefix="tessera-recorded-") as name:
        directory = Path(name) / "lists"
        record(NODES, directory)

        def answer(exchange: Exchange) -> None:
            file = directory / folder_of(exchange.route) / exchange.query.get("continue", "0")
            exchange.send(200, file.read_bytes()) if file.exists() else exchange.refuse(404, "not recorded")

        with HttpServer(answer) as server:
            kubeconfig = Path(name) / "kubeconfig"
            kubeconfig.write_text(yaml.safe_dump(kubeconfig_of(server.url)))
            return statistics.median(_run(kubeconfig) for _ in range(RUNS))


def _run(kubeconfig: Path) -> float:
    began = time.perf_counter()
    command = [TESSERA, "map", "--kubeconfig", str(kubeconfig)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    taken = time.perf_counter() - began
    if not done.stdout.startswith(f"{NODES} nodes; {NODES * 8} GPUs"):
        raise ApiError(f"tessera map: {done.stdout[:200]}{done.stderr}")
    return taken


def kubeconfig_of(server: str) -> dict[str, object]:
    """A kubeconfig without credentials."""
    return {
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
