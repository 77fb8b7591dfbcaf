"""How much longer a pod takes to run because it has a claim, with the real scheduler, kubelet and containerd."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import msgspec

from driver.kube.types import Key, ObjectMeta
from tests.bench.results import Figure
from tests.bench.watching import Watched, watched
from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.harness.progress import Progress
from tests.harness.waiting import wait_for
from tests.support.plugin import PluginFlags, PluginProcess
from tests.support.workloads import CLAIMS, NAMESPACE, PODS, request

PAIRS = 20
RUNNING_S = 60.0


class Status(msgspec.Struct, frozen=True):
    """Part of a pod's status."""

    phase: str = ""


class Pod(msgspec.Struct, frozen=True):
    """A pod, as far as it is looked at here."""

    metadata: ObjectMeta
    status: Status = Status()


def figures(cluster: Cluster, progress: Progress, where: str) -> list[Figure]:
    """Pods with and without a full GPU in turns on the first real node; each is gone before the next is created."""
    plugin = PluginProcess(cluster, cluster.nodes[0], PluginFlags(log_level="info"))
    plugin.start()
    try:
        with watched(cluster, PODS, Pod) as pods, progress.part(f"{PAIRS} pods with a claim and {PAIRS} without", 60):
            _cycle(plugin, pods, "warm", claim=True)
            times = [
                (_cycle(plugin, pods, f"with-{i}", claim=True), _cycle(plugin, pods, f"without-{i}", claim=False))
                for i in range(PAIRS)
            ]
    finally:
        plugin.stop()
    having, lacking = (statistics.median(each) for each in zip(*times, strict=True))
    return [
        Figure("pod.claim_overhead_ms", having - lacking, "ms", 30, 35, where),
        Figure("pod.created_to_running_ms", having, "ms", None, None, where),
    ]


def _cycle(plugin: PluginProcess, pods: Watched[Pod], name: str, *, claim: bool) -> float:
    """Milliseconds from the request that creates a pod until it is seen running; what was created is gone after."""
    api, key = plugin.cluster.api, Key(NAMESPACE, name)
    body = busybox_pod(name, node=plugin.node.name)
    if claim:
        api.post(CLAIMS, {"metadata": {"name": name}, "spec": {"devices": {"requests": [request("gpu-training")]}}})
        body["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": name}]
        body["spec"]["containers"][0]["resources"] = {"claims": [{"name": "gpu"}]}
    began = time.perf_counter()
    api.post(PODS, body)
    running = pods.wait(f"pod {name} running", lambda found: _runs(found, key), RUNNING_S)
    api.request("DELETE", f"{PODS}/{name}")
    pods.wait(f"pod {name} gone", lambda found: key not in found, RUNNING_S)
    if claim:
        api.request("DELETE", f"{CLAIMS}/{name}")
        wait_for(plugin.everything_offered, RUNNING_S, "the GPU is offered again")
    return (running - began) * 1000


def _runs(pods: Mapping[Key, Pod], key: Key) -> bool:
    return key in pods and pods[key].status.phase == "Running"
