"""NodePrepareResources over the plugin's unix socket, against a real API server, with a simulator without delay.

There is no kubelet in between: what is measured is the plugin's own answer, as the kubelet would wait for it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from kubelet_plugin.protocol.generated import dra_v1_pb2
from tests.harness.cluster import Cluster
from tests.support.plugin import DRIVER, PluginProcess, bare_node
from tests.support.workloads import CLAIMS, request

SERVICE = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"


class Kubelet:
    """The calls a kubelet makes."""

    def __init__(self, socket: Path) -> None:
        self._channel = grpc.insecure_channel(f"unix://{socket}")
        self._prepare = self._call("NodePrepareResources")
        self._unprepare = self._call("NodeUnprepareResources")

    def prepare(self, claim: Any) -> float:
        """Seconds until the answer. Raises RuntimeError for an error in it."""
        return self._timed(self._prepare, dra_v1_pb2.NodePrepareResourcesRequest(claims=[claim]))

    def unprepare(self, claim: Any) -> float:
        return self._timed(self._unprepare, dra_v1_pb2.NodeUnprepareResourcesRequest(claims=[claim]))

    def close(self) -> None:
        self._channel.close()

    def _call(self, method: str) -> Any:
        return self._channel.unary_unary(
            f"{SERVICE}/{method}",
            request_serializer=getattr(dra_v1_pb2, f"{method}Request").SerializeToString,
            response_deserializer=getattr(dra_v1_pb2, f"{method}Response").FromString,
        )

    def _timed(self, call: Any, message: Any) -> float:
        began = time.perf_counter()
        answer = call(message, timeout=45)
        elapsed = time.perf_counter() - began
        for response in answer.claims.values():
            if response.error:
                raise RuntimeError(response.error)
        return elapsed


@contextmanager
def bench_plugin(cluster: Cluster) -> Iterator[PluginProcess]:
    """A plugin for a Node object without a kubelet, as shipped but for log level and delay."""
    plugin = PluginProcess(cluster, bare_node(cluster, "bench-0"))
    plugin.flags.log_level = "info"
    plugin.spawn()
    plugin.wait_published()
    try:
        yield plugin
    finally:
        plugin.stop()


def allocated_claim(cluster: Cluster, name: str, node: str, device: str) -> Any:
    """A claim with its allocation written by us instead of the scheduler, named as the kubelet would.

    The node selector is what the scheduler writes for a slice with a node name: by it the API server knows
    which node's plugin may write ``status.devices``.
    """
    body = {"metadata": {"name": name}, "spec": {"devices": {"requests": [request("gpu-inference")]}}}
    created = cluster.api.post(CLAIMS, body)
    result = {"request": "gpu", "driver": DRIVER, "pool": f"{node}-{DRIVER}", "device": device}
    on_node = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    selector = {"nodeSelectorTerms": [on_node]}
    created["status"] = {"allocation": {"devices": {"results": [result]}, "nodeSelector": selector}}
    cluster.api.request("PUT", f"{CLAIMS}/{name}/status", created)
    return dra_v1_pb2.Claim(namespace="default", name=name, uid=created["metadata"]["uid"])


def prepare_times(kubelet: Kubelet, claims: list[Any]) -> list[float]:
    """Milliseconds of a first prepare of each claim, each unprepared again before the next."""
    times = []
    for claim in claims:
        times.append(kubelet.prepare(claim) * 1000)
        kubelet.unprepare(claim)
    return times


def median_of_runs(kubelet: Kubelet, claims: list[Any], runs: int) -> float:
    """The median over several runs of each run's median, in milliseconds; one run before them warms up."""
    prepare_times(kubelet, claims)
    return statistics.median(statistics.median(prepare_times(kubelet, claims)) for _ in range(runs))


def resident_mb(pid: int) -> float:
    """Resident memory of a process, in MB as the peers' figures (10^6 bytes would be 5 % more: MiB it is)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {pid} has no VmRSS: it ended")
