"""The pods of the MPS daemons on a real cluster, from the project's own image: which restarts end daemons."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.cluster import Cluster
from tests.harness.node import NodeError
from tests.harness.progress import Progress
from tests.harness.settings import Settings
from tests.harness.waiting import wait_for
from tests.support.in_pods import GONE_S, PODS, READY_S, Release, image

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PYTHON = "/usr/bin/python3.11"

ASK = """
import json
from pathlib import Path
from kubelet_plugin.mps.client import MpsClient
root = next(Path("/var/lib/tessera/sim").iterdir())
client = MpsClient(Path("/run/tessera-mps"), root, needs_library=False)
print(json.dumps({expression}))
"""

KILL = """
import os, signal
for name in filter(str.isdecimal, os.listdir("/proc")):
    try:
        command = open(f"/proc/{name}/cmdline").read()
        parent = open(f"/proc/{name}/stat").read().rsplit(")", 1)[1].split()[1]
        if "kubelet_plugin.mps" in command and "kubelet_plugin.mps" in open(f"/proc/{parent}/cmdline").read():
            os.kill(int(name), signal.SIGKILL)
    except OSError:
        continue
"""
"""Kill the serving process, not the one that starts it again."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.start(Settings(name="mps-pods", nodes=1, usual_places=True), Progress()) as running:
        yield running


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Release:
    extra = {"extraArgs": ["--sim-latency=zero", "--shared=0=mps"]}
    installed = Release(cluster, "sim:h100-1", {"nodePlugin": extra})
    installed.import_image(image())
    installed.install()
    return installed


def ask(release: Release, expression: str) -> Any:
    """What the client in the node plugin's pod says. Raises NodeError: it does not answer now."""
    [plugin] = staying(release, "node")
    return json.loads(release.run(plugin, PYTHON, "-c", ASK.replace("{expression}", expression)))


def staying(release: Release, component: str) -> list[dict[str, Any]]:
    """Its pods that are not being deleted. Raises NodeError: there is none yet."""
    pods = [pod for pod in release.pods(component) if not pod["metadata"].get("deletionTimestamp")]
    if not pods:
        raise NodeError(f"no pod of {component}")
    return pods


def daemons(release: Release) -> list[dict[str, Any]]:
    states: list[dict[str, Any]] = ask(release, "[state._asdict() for state in client.daemons()]")
    return states


def restarts(release: Release) -> int:
    [pod] = staying(release, "mps")
    count: int = pod["status"]["containerStatuses"][0]["restartCount"]
    return count


def test_daemons_outlive_the_serving_process_and_the_node_plugin_and_end_with_their_pod(
    release: Release, cluster: Cluster
) -> None:
    [node] = cluster.nodes
    [gpu] = release.gpus(node.name)
    start = f"client.ensure_daemon('{gpu['uuid']}', 2).pid"
    wait_for(lambda: ask(release, start), 30, "the daemon of the GPU runs")
    before = daemons(release)
    assert before[0]["multi_user"]

    [pod] = staying(release, "mps")
    release.run(pod, PYTHON, "-c", KILL)
    wait_for(lambda: daemons(release) == before, READY_S, "another serving process has found the daemon")
    assert restarts(release) == 0

    [plugin] = staying(release, "node")
    cluster.api.request("DELETE", f"{PODS}/{plugin['metadata']['name']}")
    wait_for(lambda: staying(release, "node") != [plugin], GONE_S, "another plugin")
    wait_for(lambda: daemons(release) == before, READY_S, "the next plugin finds the daemon")

    cluster.api.request("DELETE", f"{PODS}/{pod['metadata']['name']}")
    wait_for(lambda: daemons(release) and not daemons(release)[0]["pid"], READY_S, "the daemon ended with its pod")
    assert ask(release, start)
