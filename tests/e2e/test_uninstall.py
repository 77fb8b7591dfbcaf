"""Uninstalling on a real cluster: refused while something is in use, and nothing is left afterwards."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from driver.kube.lease import leases
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.plugin import DRIVER, SLICES, TESSERA, PluginProcess
from tests.support.workloads import Workloads, is_gone, request

pytestmark = [pytest.mark.cluster, pytest.mark.core, pytest.mark.timeout(300)]

CLAIMS = "/apis/resource.k8s.io/v1/namespaces/tessera/resourceclaims"
OWN = (
    f"{leases('tessera')}/tessera-controller",
    f"{leases('tessera')}/tessera-controller-heartbeat",
    "/api/v1/namespaces/tessera/configmaps/tessera-fence",
    f"{CLAIMS}/tessera-canary",
)
"""What the controller makes, and the hook where there was none."""


def uninstall(cluster: Cluster, *flags: str) -> subprocess.CompletedProcess[str]:
    """What the hook of the chart runs, with the rights that it has."""
    kubeconfig: Path = cluster.service_account_kubeconfig("tessera", "tessera-uninstall")
    command = [TESSERA, "uninstall", "--kubeconfig", str(kubeconfig), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def as_a_controller_leaves_it_that_never_led(cluster: Cluster) -> None:
    cluster.api.post(leases("tessera"), {"metadata": {"name": "tessera-controller"}, "spec": {}})
    cluster.api.post("/api/v1/namespaces/tessera/configmaps", {"metadata": {"name": "tessera-fence"}})
    request_ = {"name": "canary", "exactly": {"deviceClassName": "tessera-canary"}}
    cluster.api.post(CLAIMS, {"metadata": {"name": "tessera-canary"}, "spec": {"devices": {"requests": [request_]}}})


@pytest.fixture
def slice_of_a_node_that_is_down(cluster: Cluster) -> Iterator[str]:
    cluster.add_node_object("down")
    pool = {"name": f"down-{DRIVER}", "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": DRIVER, "nodeName": "down", "pool": pool, "devices": []}
    cluster.api.post(SLICES, {"metadata": {"name": "00001-down"}, "spec": spec})
    yield f"{SLICES}/00001-down"
    cluster.api.request("DELETE", "/api/v1/nodes/down")  # pods would be placed there


def test_uninstalling_is_refused_while_claims_have_devices(
    cluster: Cluster, workloads: Workloads, plugin: PluginProcess
) -> None:
    claim = workloads.claim("in-use", request("gpu-inference-1g-10gb"))
    workloads.running(workloads.pod("user", claim))
    wait_for(plugin.holds_something, 60, "the slices know what is held")
    before = plugin.slices()
    answer = uninstall(cluster)
    assert answer.returncode == 1
    assert "1 claims have devices" in answer.stderr
    assert "in-use" in answer.stdout
    assert "user" in answer.stdout
    assert uninstall(cluster, "--check").returncode == 1
    assert plugin.slices() == before
    assert is_gone(cluster, OWN[1])


@pytest.mark.smoke
def test_uninstalling_leaves_nothing_and_names_nodes_that_are_down(
    cluster: Cluster, plugin: PluginProcess, slice_of_a_node_that_is_down: str
) -> None:
    assert uninstall(cluster, "--check").returncode == 0
    as_a_controller_leaves_it_that_never_led(cluster)
    answer = uninstall(cluster, "--timeout", "15")  # all of it is spent on the node that is down
    assert answer.returncode == 0, answer.stderr
    assert "1 nodes did not answer: down" in answer.stdout
    assert f"node plugins outside of pods still run: {plugin.node.name}\n" in answer.stdout
    assert "nothing is left" not in answer.stdout
    for path in (*OWN, slice_of_a_node_that_is_down):
        assert is_gone(cluster, path), path
    assert cluster.api.get(SLICES)["items"] == []
    (plugin.state_dir / "usage.json").write_text("{}")  # of a plugin with --usage-interval
    plugin.stop()
    assert not plugin.state_dir.exists()
    assert plugin.cdi_specs() == []
    plugin.start()
    wait_for(plugin.everything_offered, 60, "installed again, it offers everything")
