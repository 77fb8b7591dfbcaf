"""What the chart's pods may do on a node, by the word of the node's own kernel. Busybox stands in for the image."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tests.harness.cluster import Cluster
from tests.harness.node import NodeError
from tests.support.chart import Values, rendered
from tests.support.workloads import RUNNING_S, SLEEP

pytestmark = [pytest.mark.cluster, pytest.mark.core, pytest.mark.timeout(240)]

HERE = "tessera"
PODS = f"/api/v1/namespaces/{HERE}/pods"
DRIVER = "rights.tessera.dev"
"""Not that of the plugin which runs on the cluster: they would share a directory."""

SIMULATOR = "/var/lib/tessera/sim"
MKNOD, SYS_ADMIN = 1 << 27, 1 << 21
"""Bits of capabilities (capability.h)."""


@dataclass(frozen=True)
class Running:
    """A pod of the chart."""

    cluster: Cluster
    name: str

    def run(self, script: str) -> str:
        """What it prints; NodeError if it fails."""
        return self.cluster.nodes[0].exec(HERE, self.name, ["sh", "-c", script])

    def refused(self, script: str) -> bool:
        try:
            self.run(script)
        except NodeError:
            return True
        return False

    def status(self) -> Mapping[str, str]:
        """What the kernel says of its processes."""
        return dict(line.split(":\t") for line in self.run("cat /proc/self/status").splitlines() if ":\t" in line)


Start = Callable[[str, Values], Running]


@pytest.fixture
def start(cluster: Cluster) -> Iterator[Start]:
    """Starts a pod as the chart with these values would; it ends with the test."""
    names: list[str] = []

    def started(process: str, values: Values) -> Running:
        pod = the_pod(cluster, process, values)
        names.append(pod["metadata"]["name"])
        cluster.api.post(PODS, pod)
        cluster.wait_pod(names[-1], namespace=HERE, deadline_s=RUNNING_S)
        return Running(cluster, names[-1])

    yield started
    for name in names:
        cluster.api.request("DELETE", f"{PODS}/{name}")
        cluster.wait_pod_gone(name, HERE)


def the_pod(cluster: Cluster, process: str, values: Values) -> dict[str, Any]:
    [template] = (
        each["spec"]["template"]
        for each in rendered({"driverName": DRIVER, **values})
        if each["metadata"]["name"] == f"tessera-{process}" and "template" in each.get("spec", {})
    )
    spec = template["spec"]
    [container] = spec["containers"]
    container |= {
        "image": "docker.io/tessera/busybox:local",
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", SLEEP],
    }
    del container["args"]
    for mount in container.get("volumeMounts", ()):
        # The root of a machine with systemd is shared; that of this one may not be.
        mount.pop("mountPropagation", None)
    spec |= {"nodeName": cluster.nodes[0].name, "terminationGracePeriodSeconds": 2}
    return {"metadata": {"name": f"rights-{process}"}, "spec": spec}


def places(cluster: Cluster) -> dict[str, Any]:
    """Values by which a node plugin finds the kubelet and the container runtime of the cluster's node."""
    node = cluster.nodes[0]
    ports = {"hostNetwork": True, "metricsPort": 0, "healthPort": 0}
    return {
        "kubeletDir": str(node.kubelet_dir),
        "cdiDir": str(node.cdi_dir),
        "affinity": {"nodeAffinity": {}},
        **ports,
    }


def its_own(cluster: Cluster) -> list[str]:
    """The directories of the node that a node plugin writes to."""
    node = cluster.nodes[0]
    return [f"{node.kubelet_dir}/plugins/{DRIVER}", f"{node.kubelet_dir}/plugins_registry", str(node.cdi_dir)]


def test_the_controller_may_nothing(start: Start) -> None:
    controller = start("controller", {"controller": {"hostNetwork": True, "metricsPort": 0, "healthPort": 0}})
    status = controller.status()
    assert {*status["Uid"].split(), *status["Gid"].split()} == {"65532"}
    assert int(status["CapBnd"], 16) == int(status["CapEff"], 16) == 0
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert controller.refused("touch /tmp/x")


def test_with_simulated_gpus_a_node_plugin_may_make_devices_and_nothing_more(cluster: Cluster, start: Start) -> None:
    plugin = start("node", {"gpus": "sim:dgx-h100", "nodePlugin": places(cluster)})
    status = plugin.status()
    assert int(status["CapBnd"], 16) == int(status["CapEff"], 16) == MKNOD
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    for directory in (*its_own(cluster), SIMULATOR):
        plugin.run(f"touch {directory}/rights && rm {directory}/rights")
    assert plugin.refused("ls /host")
    assert plugin.refused("touch /x")
    assert plugin.refused(f"touch {cluster.nodes[0].kubelet_dir}/device-plugins/x")
    # The kernel's log, in the place of a disk: made, but not opened.
    plugin.run(f"mknod {SIMULATOR}/rights c 1 11")
    assert plugin.refused(f"exec 3< {SIMULATOR}/rights")
    plugin.run(f"rm {SIMULATOR}/rights")


def test_with_real_gpus_it_opens_devices_and_reads_its_node(cluster: Cluster, start: Start) -> None:
    plugin = start("node", {"nodePlugin": places(cluster)})
    assert int(plugin.status()["CapEff"], 16) & SYS_ADMIN
    plugin.run("exec 3< /dev/kmsg")
    assert "mem" in plugin.run("cat /host/proc/devices")
    assert "devices" in plugin.run("ls /host/sys/bus/pci")
    for directory in its_own(cluster):
        plugin.run(f"touch {directory}/rights && rm {directory}/rights")
    assert plugin.refused("touch /host/tmp/rights")
    assert plugin.refused("touch /x")
