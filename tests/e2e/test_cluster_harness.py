"""The cluster harness itself, against the real thing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from driver.errors import UsageError
from tests.harness import Cluster, Settings, busybox_pod, wait_for
from tests.harness.cgroups import TOP, Cgroups
from tests.harness.layout import BASE, RUN
from tests.harness.mounts import mounts_below
from tests.harness.processes import ProcessTable, kill, marked
from tests.harness.versions import REFERENCE
from tests.support.features import FEATURES, has

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

REPOSITORY = Path(__file__).resolve().parents[2]
SHELL = ["/bin/sh", "-c"]
OWNER = """
import sys, time
from pathlib import Path
from tests.harness import Cluster, Settings, busybox_pod
binaries = Path(sys.argv[2]) if sys.argv[2] else None
cluster = Cluster.start(Settings(name=sys.argv[1], binaries=binaries))
cluster.apply(busybox_pod("left-behind"))
cluster.wait_pod("left-behind")
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def binaries() -> Path | None:
    named = os.environ.get("TESSERA_BINARIES") or os.environ.get("KUBEBUILDER_ASSETS")
    return Path(named) if named else None


@pytest.fixture(scope="module")
def pair(binaries: Path | None) -> Iterator[Cluster]:
    """A cluster of two nodes."""
    with Cluster.start(Settings(name="harness-pair", nodes=2, binaries=binaries)) as cluster:
        yield cluster
    assert traces("harness-pair") == {}


def traces(name: str) -> dict[str, list[str]]:
    """What is left of the cluster on this machine, by kind; nothing should be."""
    groups = (mount / TOP / name for mount in (*Cgroups.detect().mounts, *Cgroups.detect().beside))
    found = {
        "processes": [str(record.pid) for record in marked(BASE / name)],
        "mounts": [str(mount) for folder in (BASE / name, RUN / name) for mount in mounts_below(folder)],
        "cgroups": [str(group) for group in groups if group.exists()],
        "folders": [str(folder) for folder in (BASE / name, RUN / name) if folder.exists()],
    }
    return {kind: things for kind, things in found.items() if things}


def test_versions_are_stamped(pair: Cluster) -> None:
    answer = pair.kubectl("version")
    assert f"Client Version: v{pair.release.kubernetes}" in answer
    assert f"Server Version: v{pair.release.kubernetes}" in answer
    nodes = [pair.api.get(f"/api/v1/nodes/{node.name}")["status"]["nodeInfo"] for node in pair.nodes]
    assert {node["kubeletVersion"] for node in nodes} == {f"v{pair.release.kubernetes}"}
    assert {node["containerRuntimeVersion"] for node in nodes} == {f"containerd://{pair.release.containerd}"}


def test_the_reference_version_lacks_no_feature_that_a_test_may_need(pair: Cluster) -> None:
    """Otherwise such tests would be skipped on every version, unnoticed."""
    if pair.release == REFERENCE:
        assert [feature for feature in FEATURES if not has(pair, feature)] == []


def test_a_pod_on_each_of_two_nodes(pair: Cluster) -> None:
    command = [*SHELL, "echo to the log; sleep 600"]
    pods = {f"on-{node.name}": node for node in pair.nodes}
    pair.apply(busybox_pod(pod, command, node=node.name) for pod, node in pods.items())
    for pod, node in pods.items():
        assert pair.wait_pod(pod)["spec"]["nodeName"] == node.name
        wait_for(lambda node=node, pod=pod: node.read_log(pod) == "to the log\n", 60, f"the log of {pod}")  # type: ignore[misc]
        assert node.exec("default", pod, ["/bin/echo", "inside"]) == "inside\n"
        assert pair.kubectl("logs", pod) == "to the log\n"
        assert pair.kubectl("exec", pod, "--", "/bin/echo", "inside") == "inside\n"
    pair.kubectl("delete", "pod", *pods, "--wait=false")
    for pod in pods:
        pair.wait_pod_gone(pod)


def test_pods_outlive_their_kubelet_and_containerd(pair: Cluster) -> None:
    node = pair.nodes[1]
    pair.apply(busybox_pod("survivor", node=node.name))
    pair.wait_pod("survivor")
    node.kill_kubelet()
    node.kill_containerd()
    node.start_containerd()
    assert node.exec("default", "survivor", ["/bin/echo", "still here"]) == "still here\n"
    node.start_kubelet()
    pair.kubectl("delete", "pod", "survivor", "--wait=false")
    pair.wait_pod_gone("survivor")


def test_a_node_object_without_a_kubelet_takes_pods(pair: Cluster) -> None:
    node = pair.add_node_object("paper", labels={"kind": "paper"}, capacity={"cpu": "8"})
    assert node["metadata"]["labels"]["kind"] == "paper"
    pair.apply(busybox_pod("scheduled", node="paper"))
    path = "/api/v1/namespaces/default/pods/scheduled"
    assert wait_for(lambda: pair.api.get(path)["spec"].get("nodeName"), 60, "scheduled") == "paper"
    pair.kubectl("delete", "pod", "scheduled", "--force", "--grace-period=0")
    pair.kubectl("delete", "node", "paper")


def test_a_service_account_speaks_for_its_node(pair: Cluster) -> None:
    file = pair.service_account_kubeconfig("default", "default", node="node-1")
    answer = pair.kubectl("auth", "whoami", f"--kubeconfig={file}")
    assert "system:serviceaccount:default:default" in answer
    assert "[node-1]" in answer


def test_the_api_serves_at_the_address_of_its_service(pair: Cluster) -> None:
    service = pair.api.get("/api/v1/namespaces/default/services/kubernetes")
    assert pair.server == f"https://{service['spec']['clusterIP']}"
    assert service["spec"]["ports"][0]["port"] == 443


def test_two_clusters_side_by_side(pair: Cluster, binaries: Path | None) -> None:
    with Cluster.start(Settings(name="harness-other", binaries=binaries)) as other:
        other.apply(busybox_pod("here"))
        other.wait_pod("here")
        assert pair.kubectl("get", "pods", "--output=name") == ""
        with pytest.raises(UsageError, match="harness-other runs already"):
            Cluster.start(Settings(name="harness-other", binaries=binaries))
    assert traces("harness-other") == {}
    assert len(pair.api.get("/api/v1/nodes")["items"]) == 2


@pytest.mark.parametrize(
    "how",
    ["guarded", "guard killed, then another start", pytest.param("guard killed, then down", marks=pytest.mark.slow)],
)
def test_nothing_stays_after_a_kill_9_of_the_owner(how: str, binaries: Path | None) -> None:
    name = "harness-crash"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, name, str(binaries or "")],
        cwd=REPOSITORY, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with owner, owner.stdout as output:  # type: ignore[union-attr]
        try:
            assert output.readline() == "up\n"
            assert set(traces(name)) == {"processes", "mounts", "cgroups", "folders"}
            if how != "guarded":
                guard = ProcessTable(BASE / name).get("guard")
                assert guard is not None
                kill([guard])
        finally:
            owner.kill()
    if how == "guard killed, then down":
        owner.wait()
        assert traces(name)
        subprocess.run([sys.executable, "-m", "tests.harness", "down", "--name", name], cwd=REPOSITORY, check=True)
    if how == "guard killed, then another start":
        Cluster.start(Settings(name=name, binaries=binaries)).stop()
    wait_for(lambda: traces(name) == {}, 60, f"no traces: {traces(name)}")


def _listen_to_ctrl_c() -> None:
    """A shell's background job ignores it and passes that on: in CI, say."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def unused_name() -> Iterator[str]:
    """The name of a cluster that is not there, also after a test that failed half-way."""
    name = "harness-ctrl-c"
    command = [sys.executable, "-m", "tests.harness", "down", "--if-there", "--name", name]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    yield name
    subprocess.run(command, cwd=REPOSITORY, check=True)


def test_ctrl_c_in_the_middle_of_up_leaves_nothing(binaries: Path | None, unused_name: str) -> None:
    name = unused_name
    option = ["--binaries", str(binaries)] if binaries else []
    up = subprocess.Popen(
        [sys.executable, "-m", "tests.harness", "up", "--name", name, *option],
        cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, preexec_fn=_listen_to_ctrl_c,
    )  # fmt: skip
    with up, up.stderr as output:  # type: ignore[union-attr]
        wait_for(lambda: (BASE / name / "run" / "kube-apiserver.json").exists(), 60, "the API server's start")
        up.send_signal(signal.SIGINT)
        assert "interrupted: what was started is stopped" in output.read()
    assert up.returncode == 130
    left = traces(name)
    assert left == {"folders": [str(BASE / name)]}, "only the logs stay, for whoever wonders"
    subprocess.run([sys.executable, "-m", "tests.harness", "down", "--name", name], cwd=REPOSITORY, check=True)
    assert traces(name) == {}
