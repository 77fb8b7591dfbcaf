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


@cache
def content() -> ClusterContent:
    return joined(_empty(DRIVER), simulated("h100-1=3,l4-4", "NVIDIA L4=2", None))


def cluster(running: Sequence[str]) -> ImaginedCluster:
    """Three nodes that are alike and one with other GPUs, on which claims of some classes run."""
    found = ImaginedCluster(DRIVER, content())
    for number, device_class in enumerate(running):
        requests = [{"name": "gpu", "exactly": {"deviceClassName": device_class}}]
        claim = {
            "kind": "ResourceClaim",
            "metadata": {"name": f"c{number}"},
            "spec": {"devices": {"requests": requests}},
        }
        document = {"apiVersion": "resource.k8s.io/v1", **claim}
        _place(found, Reader().read([Document("claims.yaml", number, document)]))
    return found


@given(st.lists(st.sampled_from(CLASSES), max_size=6), st.sampled_from(CLASSES))
def test_as_many_claims_fit_node_by_node_as_with_all_nodes_at_once(running: list[str], device_class: str) -> None:
    whole: dict[str, int] = {}
    why: list[str] = []
    for each in _until_full(cluster(running), pods_for_class(device_class), why):
        whole[each.node or ""] = whole.get(each.node or "", 0) + 1
    filled = fill(cluster(running), device_class)
    assert {node: len(devices) for node, devices in filled.devices.items()} == whole
    assert bool(filled.why) == bool(why)
