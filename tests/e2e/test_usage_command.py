"""``tessera usage`` through the proxy of a real API server, with only the documented rights."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml

from driver.simulator.node import SimulatedNode
from driver.simulator.state.gpu_load import SimulatedActivity, constant
from kubelet_plugin.checkpoint.records import decode_record
from tests.harness.cluster import Cluster
from tests.harness.progress import Progress
from tests.harness.settings import Settings
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.metrics import port_in
from tests.support.plugin import TESSERA, PluginFlags, PluginProcess
from tests.support.rights import may
from tests.support.workloads import PROJECT, Workloads, request

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300), pytest.mark.needs("shared counters")]

INTERVAL = "1s"
SOON_S = 60.0
PODS = "/api/v1/namespaces/tessera/pods"
DOCUMENTED = re.compile(r"## Rights.*?```yaml\n(.*?)```", re.DOTALL)


def own_address() -> str:
    """An address of this machine that is not loopback: the API server refuses to connect to pods on loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address besides loopback")
        return str(probe.getsockname()[0])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.start(Settings(name="usage-command"), Progress()) as running:
        install(running, {"nodePlugin": {"usageInterval": INTERVAL}})
        yield running


@pytest.fixture(scope="module")
def plugin(cluster: Cluster) -> Iterator[PluginProcess]:
    """A node plugin whose node runs a pod with a full GPU; its page is behind the Pod object that it would have.

    The kubelet is stopped, because it would report another address of that Pod.
    """
    address, node = own_address(), cluster.nodes[0]
    process = PluginProcess(cluster, node, PluginFlags(usage_interval=INTERVAL, metrics_address=f"{address}:0"))
    process.start()
    workloads = Workloads(cluster)
    workloads.claim("busy", request("gpu-training"))
    workloads.running(workloads.pod("pod", "busy"))
    node.stop_kubelet()
    create_plugin_pod(cluster, "tessera-node-x", node.name, address, port_in(process.log, SOON_S))
    yield process
    process.stop()


def create_plugin_pod(cluster: Cluster, name: str, node: str, address: str, port: int) -> None:
    ports = [{"name": "metrics", "containerPort": port, "hostPort": port}]
    spec = {
        "serviceAccountName": "tessera-node",
        "nodeName": node,
        "hostNetwork": True,
        "tolerations": [{"operator": "Exists"}],
        "containers": [{"name": "tessera-node", "image": "none", "ports": ports}],
    }
    cluster.api.post(PODS, {"metadata": {"name": name}, "spec": spec})
    status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
    cluster.api.patch(f"{PODS}/{name}/status", {"status": status})


@pytest.fixture(scope="module")
def lead(cluster: Cluster) -> Path:
    """The kubeconfig of an account with the ClusterRole of docs/usage.md."""
    found = DOCUMENTED.search((PROJECT / "docs" / "usage.md").read_text())
    assert found
    cluster.apply(yaml.safe_load(found[1]))
    cluster.api.post("/api/v1/namespaces/default/serviceaccounts", {"metadata": {"name": "lead"}})
    subject = {"kind": "ServiceAccount", "name": "lead", "namespace": "default"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "tessera-usage"}
    binding = {"metadata": {"name": "tessera-usage"}, "roleRef": role, "subjects": [subject]}
    cluster.api.post("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", binding)
    able = partial(may, cluster, "default:lead", "get", "pods/proxy", namespace="tessera")
    wait_for(able, SOON_S, "the API server knows what the account may do")
    return cluster.service_account_kubeconfig("default", "lead")


def usage(kubeconfig: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [TESSERA, "usage", "--kubeconfig", str(kubeconfig), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_usage_through_the_api_server_is_what_the_gpus_do(plugin: PluginProcess, lead: Path) -> None:
    [record] = [decode_record(path.read_bytes(), path) for path in plugin.records()]
    load = constant(SimulatedActivity.of(0.5, dram=0.1), 20 << 30)
    SimulatedNode.attach(plugin.host_root).put_load(record.devices[0].gpu_uuid, load)

    def used() -> bool:
        """Whether what the last interval showed is all under load."""
        answer = usage(lead, "-o", "json")
        assert answer.returncode == 0, answer.stderr
        total = json.loads(answer.stdout)["total"]
        return bool(total["allocated"] == 8 and total["used"] == pytest.approx(4.0, abs=0.16))

    wait_for(used, SOON_S, "4 of 8 slices are used")
    table = usage(lead, "--by", "label=team").stdout
    assert "allocated 8 of 64 slices" in table


def test_a_plugin_that_does_not_answer_is_named_and_the_command_fails(
    cluster: Cluster, plugin: PluginProcess, lead: Path
) -> None:
    cluster.add_node_object("silent")
    create_plugin_pod(cluster, "tessera-node-y", "silent", own_address(), 1)
    try:
        answer = usage(lead)
        assert answer.returncode == 1
        assert "warning: silent can't be read" in answer.stderr
        assert "of 64 slices" in answer.stdout
    finally:
        cluster.api.request("DELETE", f"{PODS}/tessera-node-y", {"gracePeriodSeconds": 0})
