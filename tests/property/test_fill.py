"""How many claims still fit is the same node by node as with all nodes at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from deviceclasses.lint.documents import Document
from tessera.commands.simulate import _empty, _place
from tessera.simulate.fill import _until_full, fill
from tessera.simulate.imagined_cluster import ClusterContent, ImaginedCluster
from tessera.simulate.sources import joined, simulated
from tessera.simulate.workloads import Reader, pods_for_class
from tests.support.plugin import DRIVER

CLASSES = ("gpu-training", "gpu-inference-1g-10gb", "gpu-inference-2g-20gb", "gpu-inference-3g-40gb", "gpu-dev")
AMOUNTS = ("gpu-shared=6Gi", "gpu-shared=13Gi")
"""Class and memory."""


@cache
def content() -> ClusterContent:
    return joined(
        _empty(DRIVER),
        simulated("h100-1=3,l4-4", shares="NVIDIA L4=2", shared="NVIDIA L4=mps,NVIDIA H100 80GB HBM3=time-slicing"),
    )


def cluster(running: Sequence[str]) -> ImaginedCluster:
    """Three nodes that are alike and one with other GPUs, on which claims of some classes run."""
    found = ImaginedCluster(DRIVER, content())
    for number, device_class in enumerate(running):
        name, _, memory = device_class.partition("=")
        amount = {"capacity": {"requests": {"memory": memory}}} if memory else {}
        requests = [{"name": "gpu", "exactly": {"deviceClassName": name, **amount}}]
        claim = {
            "kind": "ResourceClaim",
            "metadata": {"name": f"c{number}"},
            "spec": {"devices": {"requests": requests}},
        }
        document = {"apiVersion": "resource.k8s.io/v1", **claim}
        _place(found, Reader().read([Document("claims.yaml", number, document)]))
    return found


@given(st.lists(st.sampled_from(CLASSES + AMOUNTS), max_size=6), st.sampled_from(CLASSES + AMOUNTS))
def test_as_many_claims_fit_node_by_node_as_with_all_nodes_at_once(running: list[str], device_class: str) -> None:
    whole: dict[str, int] = {}
    why: list[str] = []
    name, _, memory = device_class.partition("=")
    for each in _until_full(cluster(running), pods_for_class(name, memory), why):
        whole[each.node or ""] = whole.get(each.node or "", 0) + 1
    filled = fill(cluster(running), name, memory)
    assert {node: len(devices) for node, devices in filled.devices.items()} == whole
    assert bool(filled.why) == bool(why)
