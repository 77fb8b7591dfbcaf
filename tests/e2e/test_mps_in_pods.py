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
from tests.support.scheduling import asked
from tests.support.workloads import Workloads

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(500)]

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
from pathlib import Path
for process in Path("/proc").glob("[0-9]*"):
    try:
        parent = process.joinpath("stat").read_text().rsplit(")", 1)[1].split()[1]
        commands = [Path("/proc", pid, "cmdline").read_text() for pid in (process.name, parent)]
        in_this_pod = process.joinpath("ns/mnt").readlink() == Path("/proc/self/ns/mnt").readlink()
        if in_this_pod and all("kubelet_plugin.mps" in command for command in commands):
            os.kill(int(process.name), signal.SIGKILL)
    except OSError:
        continue
"""
"""Kill the serving process, not the one that starts it again. The pod sees every process of the machine."""


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


def events(cluster: Cluster, name: str) -> list[str]:
    """The reasons of the Events on a claim."""
    items = cluster.api.get("/api/v1/namespaces/default/events")["items"]
    return [item["reason"] for item in items if item["involvedObject"].get("name") == name]


def test_a_pods_daemon_outlives_the_serving_process_and_the_node_plugin_and_ends_with_the_pod(
    release: Release, cluster: Cluster
) -> None:
    [node] = cluster.nodes
    [gpu] = release.gpus(node.name)
    workloads = Workloads(cluster)
    user = workloads.pod("by-mps", workloads.claim("by-mps", asked("gpu-shared", memory="2Gi")))
    workloads.running(user)
    variables = workloads.exec(user, "env").splitlines()
    assert f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT={gpu['uuid']}=2048M" in variables
    assert workloads.exec(user, "sh", "-c", 'ls "$CUDA_MPS_PIPE_DIRECTORY"').split() == ["control", "log"]
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
    assert "MPSServerLost" not in events(cluster, "by-mps")

    cluster.api.request("DELETE", f"{PODS}/{pod['metadata']['name']}")
    wait_for(lambda: "MPSServerLost" in events(cluster, "by-mps"), READY_S, "the claim lost its daemon")
    wait_for(lambda: daemons(release)[0]["pid"] not in (0, before[0]["pid"]), READY_S, "the claim has another daemon")

    workloads.delete_pods(user)
    assert daemons(release) == []
    assert release.gpus(node.name)[0]["computeMode"] == "DEFAULT"
    workloads.delete_all()


def test_an_acceptance_test_runs_programs_from_the_node_plugins_container(release: Release, cluster: Cluster) -> None:
    [node] = cluster.nodes
    [plugin] = staying(release, "node")
    steps = json.loads(release.run(plugin, "/usr/bin/tessera", "acceptance", "gpu-0", "--yes", "-o", "json"))
    [step] = (step for step in steps if step["step"] == "mps")
    assert step["state"] == "Passed", step
    assert "user 65534 was not tried (Operation not permitted)" in step["detail"], "a simulated GPU needs no privilege"
    assert daemons(release) == []
    assert release.gpus(node.name)[0]["computeMode"] == "DEFAULT"
