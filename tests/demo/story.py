"""The story: a claim becomes a MIG partition inside a running pod, and goes away with it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from driver.slices.build import slice_object
from tests.demo import views
from tests.demo.screen import Screen
from tests.harness.cluster import Cluster
from tests.support.controller import ControllerProcess
from tests.support.node import start_node
from tests.support.plugin import PluginProcess
from tests.support.published import build_slices
from tests.support.workloads import PROJECT, RUNNING_S, Workloads

PODS = ("training", "inference", "inference-large")
"""The examples in deploy/examples, in the order in which they are told."""


def without_cluster(screen: Screen) -> None:
    """What needs no cluster: the simulated node and what it would publish."""
    screen.act("A DGX H100 that isn't there")
    screen.say(
        "Nothing here has a GPU. Tessera talks to the functions of NVIDIA's pynvml module, and a simulator stands "
        "behind them: 8 x H100 with MIG, NVLink, PCI tree and device nodes. The driver can't tell the difference."
    )
    root = Path(tempfile.mkdtemp(prefix="tessera-demo-"))
    try:
        with screen.step("discover the GPUs"):
            node = start_node(root)
        published = build_slices(node.node.pool, node.node.inventory.published())
        slices = [
            slice_object(name, content, node.node.pool, 1, len(published), None) for name, content in published.items()
        ]
        gpu = node.node.inventory.gpus[0]
        screen.show(f"8 x {gpu.product_name}, {gpu.memory_slices} memory slices each; cuts an H100 allows:")
        screen.show(views.placements_drawing(gpu))
        screen.say("What it would publish. Nothing is cut yet: a device is a promise until a pod gets it.")
        screen.show(views.slices_table(slices))
        screen.show(views.offers_table(slices))
    finally:
        shutil.rmtree(root)


def published(screen: Screen, plugin: PluginProcess) -> None:
    screen.act("The node plugin on a real kubelet")
    with screen.step("start `tessera node`, register with the kubelet, publish the node's GPUs"):
        plugin.start()
    screen.command("kubectl get resourceslices")
    screen.show(plugin.cluster.kubectl("get", "resourceslices"))
    screen.say("What is in them: what every GPU has to give, and the devices that can be had.")
    screen.show(views.slices_table(plugin.slices()))
    screen.show(views.offers_table(plugin.slices()))


def offers_are_disjoint(screen: Screen, cluster: Cluster) -> None:
    """What differs where the scheduler does not subtract counters."""
    screen.act(f"Kubernetes {cluster.release.kubernetes}: no two offers overlap")
    screen.say(
        "This API server drops the counters that keep overlapping devices apart. So a node alone offers full GPUs "
        "only, and the controller replaces offers: when a pod asks for a partition, the full GPU is taken back first."
    )
    with screen.step("start `tessera controller`"):
        ControllerProcess(cluster).start()


def pods_run(screen: Screen, cluster: Cluster, plugin: PluginProcess) -> None:
    """Three pods: a full GPU, a small and a larger partition."""
    screen.act("Three pods ask for GPUs")
    screen.say("One trains on a full GPU, one serves a small model on 1g.10gb, one a larger model on 3g.40gb.")
    workloads = Workloads(cluster)
    for pod in PODS:
        screen.command(f"kubectl apply -f deploy/examples/{pod}.yaml")
        with screen.step(f"{pod}: allocate, cut, start the container"):
            cluster.apply((PROJECT / "deploy/examples" / f"{pod}.yaml").read_text())
            cluster.wait_pod(pod, deadline_s=RUNNING_S)
        [claim] = workloads.pod_claims(pod)
        screen.show(f"the scheduler chose {', '.join(workloads.allocated(claim))}")
    screen.act("What that did to the GPUs")
    screen.command(f"tessera sim smi --host-root {plugin.host_root}")
    screen.show(plugin.smi())
    screen.say(
        "What no longer fits has left the slices, so the scheduler wastes no time on it (held devices stay listed):"
    )
    screen.show(views.offers_table(plugin.slices()))


def inside(screen: Screen, cluster: Cluster, plugin: PluginProcess) -> None:
    screen.act("How the partition gets into the container")
    workloads = Workloads(cluster)
    uid = _claim_uid(workloads, "inference")
    [spec] = [path for path in plugin.cdi_specs() if uid in path.name]
    screen.show(views.cdi_essentials(spec))
    for pod in PODS:
        screen.say(f"Seen inside {pod}:")
        seen_inside(screen, workloads, pod)


def seen_inside(screen: Screen, workloads: Workloads, pod: str) -> None:
    """The GPU variables and device nodes that the pod's container has."""
    for script in (
        "env | grep -E '^(TESSERA|NVIDIA)' | sort",
        "find /dev -name 'nvidia*' -type c | sort | xargs ls -l",
    ):
        screen.command(f'kubectl exec {pod} -- sh -c "{script}"')
        screen.show(workloads.exec(pod, "sh", "-c", script))


def pods_go(screen: Screen, cluster: Cluster, plugin: PluginProcess) -> None:
    screen.act("The pods go, and so do their partitions")
    with screen.step("delete the three pods"):
        for pod in PODS:
            cluster.kubectl("delete", "--wait=false", "-f", str(PROJECT / "deploy/examples" / f"{pod}.yaml"))
        for pod in PODS:
            cluster.wait_pod_gone(pod)
    left = {
        "partitions": len(plugin.partitions()),
        "CDI specs": len(plugin.cdi_specs()),
        "checkpoint records": len(plugin.records()),
    }
    screen.show(", ".join(f"{count} {what}" for what, count in left.items()) + " left")


def _claim_uid(workloads: Workloads, pod: str) -> str:
    [claim] = workloads.pod_claims(pod)
    found: dict[str, Any] = workloads.cluster.api.get(
        f"/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/{claim}"
    )
    return str(found["metadata"]["uid"])
