"""The bare path: what a node plugin in Python can't do without, and nothing else. ``python -m tests.bench.bare``

One gRPC call, one GET of the claim, two durable files and a CDI file: no hardware, no checks, no locks, nothing in the
background. Measured in the same run as the plugin it says what the machine allows, where the targets come from another.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import msgspec

from driver.kube.credentials import load_configuration
from driver.kube.get_and_list import RESOURCE_GROUP
from driver.kube.types import Claim
from kubelet_plugin.dra.protocol.generated import dra_v1_pb2
from tests.bench.kubelet import IN_MEMORY, SERVICE, Kubelet
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for

READY_S = 30.0


@contextmanager
def bare_kubelet(cluster: Cluster, node: str) -> Iterator[Kubelet]:
    """A kubelet of the bare path as a process of its own, with the node's identity."""
    directory = cluster.directory / "bare"
    directory.mkdir()
    kubeconfig = cluster.service_account_kubeconfig("tessera", "tessera-node", node=node)
    with TemporaryDirectory(dir=IN_MEMORY) as cdi_dir:
        process = subprocess.Popen([sys.executable, "-m", "tests.bench.bare", kubeconfig, directory, cdi_dir])
        try:
            wait_for((directory / "socket").exists, READY_S, "the bare path listens")
            kubelet = Kubelet(directory / "socket").connect()
            yield kubelet
            kubelet.close()
        finally:
            process.terminate()
            process.wait()


def bare_ms(cluster: Cluster, node: str, claims: Sequence[Any]) -> float:
    """Median milliseconds of preparing each of ``claims``, after a round that warms up."""
    with bare_kubelet(cluster, node) as kubelet:
        for claim in claims:
            kubelet.prepare(claim)
        return statistics.median(kubelet.prepare(claim) * 1000 for claim in claims)


class BarePath:
    """``NodePrepareResources``, as short as it can be."""

    def __init__(self, kubeconfig: Path, directory: Path, cdi_dir: Path) -> None:
        self._access = load_configuration(kubeconfig)
        self._directory = directory
        self._cdi_dir = cdi_dir
        self._decoder = msgspec.json.Decoder(Claim)

    def prepare(self, request: Any, _context: grpc.ServicerContext) -> Any:
        response = dra_v1_pb2.NodePrepareResourcesResponse()
        for reference in request.claims:
            claim = self._read(f"{RESOURCE_GROUP}/namespaces/{reference.namespace}/resourceclaims/{reference.name}")
            self._write(self._directory, b'{"phase":"preparing"}', durable=True)
            self._write(self._cdi_dir, b'{"cdiVersion":"0.6.0"}', durable=False)
            self._write(self._directory, b'{"phase":"prepared"}', durable=True)
            answer = response.claims[reference.uid]
            for result in claim.status.allocation.devices.results if claim.status.allocation else ():
                answer.devices.add(
                    request_names=[result.request], pool_name=result.pool, device_name=result.device, cdi_device_ids=[]
                )
        return response

    def _read(self, path: str) -> Claim:
        headers = {"Accept": "application/json", "Authorization": self._access.authorization() or ""}
        response = self._access.connections.open("GET", self._access.target(path), headers, None, READY_S)
        return self._decoder.decode(response.read())

    def _write(self, directory: Path, data: bytes, *, durable: bool) -> None:
        temporary = f"{directory}/.file.tmp"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.write(descriptor, data)
        if durable:
            os.fdatasync(descriptor)
        os.close(descriptor)
        os.replace(temporary, f"{directory}/file")  # noqa: PTH105
        if durable:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(descriptor)
            os.close(descriptor)


def serve(kubeconfig: Path, directory: Path, cdi_dir: Path) -> None:
    """Until the process is ended."""
    handler = grpc.unary_unary_rpc_method_handler(
        BarePath(kubeconfig, directory, cdi_dir).prepare,
        request_deserializer=dra_v1_pb2.NodePrepareResourcesRequest.FromString,
        response_serializer=dra_v1_pb2.NodePrepareResourcesResponse.SerializeToString,
    )
    service = SERVICE.removeprefix("/")
    server = grpc.server(ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {"NodePrepareResources": handler})])
    server.add_insecure_port(f"unix://{directory / 'socket'}")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    serve(*map(Path, sys.argv[1:]))
