"""A kubelet's calls to a node plugin, and what they need: a plugin process, allocated claims."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc

from kubelet_plugin.dra.protocol.generated import dra_v1_pb2
from tests.harness.cluster import Cluster
from tests.support.plugin import DRIVER, PluginProcess, bare_node
from tests.support.workloads import CLAIMS, request

SERVICE = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"

CONNECT_S = 60.0
IN_MEMORY = Path("/dev/shm")

DEADLINE_S = 45.0
"""The kubelet's own."""


class Kubelet:
    """The calls a kubelet makes, on one connection as it does. Each gives the seconds until the answer.

    Raises RuntimeError for an error in an answer.
    """

    def __init__(self, socket: Path) -> None:
        self._channel = grpc.insecure_channel(f"unix://{socket}")
        self._prepare = self._call("NodePrepareResources")
        self._unprepare = self._call("NodeUnprepareResources")

    def prepare(self, *claims: Any) -> float:
        """One call for all of ``claims``."""
        return _timed([self._prepare], [dra_v1_pb2.NodePrepareResourcesRequest(claims=claims)])

    def prepare_at_once(self, claims: Sequence[Any]) -> float:
        """A call for each of ``claims``, all begun before the first is answered; seconds until the last answer."""
        messages = [dra_v1_pb2.NodePrepareResourcesRequest(claims=[claim]) for claim in claims]
        return _timed([self._prepare] * len(messages), messages)

    def unprepare(self, *claims: Any) -> float:
        return _timed([self._unprepare], [dra_v1_pb2.NodeUnprepareResourcesRequest(claims=claims)])

    def connect(self) -> Kubelet:
        """Connect now, as a kubelet has by the time of its first call."""
        grpc.channel_ready_future(self._channel).result(CONNECT_S)
        return self

    def close(self) -> None:
        self._channel.close()

    def _call(self, method: str) -> Any:
        return self._channel.unary_unary(
            f"{SERVICE}/{method}",
            request_serializer=getattr(dra_v1_pb2, f"{method}Request").SerializeToString,
            response_deserializer=getattr(dra_v1_pb2, f"{method}Response").FromString,
        )


def _timed(calls: Sequence[Any], messages: Sequence[Any]) -> float:
    began = time.perf_counter()
    if len(calls) == 1:
        answers = [calls[0](messages[0], timeout=DEADLINE_S)]
    else:
        begun = [call.future(message, timeout=DEADLINE_S) for call, message in zip(calls, messages, strict=True)]
        answers = [future.result() for future in begun]
    elapsed = time.perf_counter() - began
    errors = [each.error for answer in answers for each in answer.claims.values() if each.error]
    if errors:
        raise RuntimeError("; ".join(errors))
    return elapsed


@contextmanager
def bench_plugin(
    cluster: Cluster,
    name: str = "bench-0",
    metrics_address: str = "",
    usage_interval: str = "",
    sim_latency: str = "zero",
) -> Iterator[PluginProcess]:
    """A plugin for a Node object without a kubelet, as shipped but for the simulator's delay.

    Its CDI directory is in memory, as /var/run is on a host: on a disk, the next durable write waits for the CDI spec.
    """
    with TemporaryDirectory(dir=IN_MEMORY) as cdi_dir:
        plugin = PluginProcess(cluster, replace(bare_node(cluster, name), cdi_dir=Path(cdi_dir)))
        plugin.flags.log_level = "info"
        plugin.flags.metrics_address = metrics_address
        plugin.flags.usage_interval = usage_interval
        plugin.flags.sim_latency = sim_latency
        plugin.spawn()
        plugin.wait_published()
        try:
            yield plugin
        finally:
            plugin.stop()


def allocated_claim(
    cluster: Cluster, name: str, node: str, device: str, of_others: Sequence[tuple[str, str, str]] = ()
) -> Any:
    """A claim with its allocation written by us instead of the scheduler, named as the kubelet would.

    ``of_others``: driver, pool and name of devices that it is allocated besides.

    The node selector is what the scheduler writes for a slice with a node name: by it the API server knows
    which node's plugin may write ``status.devices``.
    """
    device_class = "gpu-inference" if "-mig-" in device else "gpu-training"
    body = {"metadata": {"name": name}, "spec": {"devices": {"requests": [request(device_class)]}}}
    created = cluster.api.post(CLAIMS, body)
    devices = [(DRIVER, f"{node}-{DRIVER}", device), *of_others]
    results = [dict(zip(("request", "driver", "pool", "device"), ("gpu", *each), strict=True)) for each in devices]
    on_node = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    selector = {"nodeSelectorTerms": [on_node]}
    created["status"] = {"allocation": {"devices": {"results": results}, "nodeSelector": selector}}
    cluster.api.request("PUT", f"{CLAIMS}/{name}/status", created)
    return dra_v1_pb2.Claim(namespace="default", name=name, uid=created["metadata"]["uid"])
