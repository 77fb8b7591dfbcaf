"""What is held before anything is measured: three quarters of the memory, as allocated claims without pods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from driver.kube.client import KubeClient
from tests.support.plugin import DRIVER

NAMESPACE = "held"
GPUS, PARTITIONS = 8, 7
CLIENTS = 8

Object = dict[str, Any]


def hold(client: KubeClient, nodes: Sequence[str]) -> int:
    """Of a hundred nodes 60 are held whole, one claim each, and 15 cut, one claim a GPU.

    Returns how many devices are held.
    """
    client.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    claims = list(_claims(nodes))

    def store(claim: tuple[str, str, list[str]]) -> None:
        name, node, devices = claim
        folder = f"/apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaims"
        request = {"name": "gpu", "exactly": {"deviceClassName": "gpu-inference", "count": len(devices)}}
        spec = {"devices": {"requests": [request]}}
        stored = client.create(folder, {"metadata": {"name": name}, "spec": spec})
        client.replace(f"{folder}/{name}/status", {**stored, "status": {"allocation": _allocation(node, devices)}})

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(store, claims))
    return sum(len(devices) for _, _, devices in claims)


def _claims(nodes: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    for index, node in enumerate(nodes):
        turn = index % 20
        if turn < 12:
            yield f"{node}-all", node, [f"gpu-{gpu}" for gpu in range(GPUS)]
        elif turn < 15:
            for gpu in range(GPUS):
                yield f"{node}-{gpu}", node, [f"gpu-{gpu}-mig-1g10gb-{start}" for start in range(PARTITIONS)]


def _allocation(node: str, devices: Sequence[str]) -> Object:
    pool = f"{node}-{DRIVER}"
    results = [{"request": "gpu", "driver": DRIVER, "pool": pool, "device": device} for device in devices]
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    return {"devices": {"results": results}, "nodeSelector": {"nodeSelectorTerms": [term]}}
