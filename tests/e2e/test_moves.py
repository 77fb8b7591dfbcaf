"""On a real API server and scheduler: the move of a claim to another node that is named makes room for a full GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.harness.waiting import wait_for
from tests.support.command import run_tessera
from tests.support.scattered_nodes import bound, notebook, scattered_nodes
from tests.support.waiting_pod import APPS, CORE, SOON_S, end, requesting

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture
def scattered() -> Iterator[Cluster]:
    with scattered_nodes("moves") as running:
        yield running


def test_the_move_to_another_node_that_is_named_makes_room(scattered: Cluster) -> None:
    api, first = scattered.api, notebook(scattered)
    assert first is not None
    node = first["spec"]["nodeName"]
    [other] = {"one", "two"} - {node}
    claims = {node: claim_of(first), other: claim_of(api.get(f"{CORE}/pods/small-0"))}
    moves = [
        f"on node {here} moving default/{claims[here]} (1g.10gb) from gpu-0 to gpu-0 of node {there} would make room"
        for here, there in ((node, other), (other, node))
    ]

    def names_a_move(*command: str) -> bool:
        text = " ".join(run_tessera(scattered, *command).stdout.split())
        return any(move in text for move in moves)

    # The command may read the cluster while a node has not reported yet what it holds.
    wait_for(lambda: names_a_move("why", "pod/train"), SOON_S, "why names a move")
    wait_for(lambda: names_a_move("status", "-o", "json"), SOON_S, "status names a move")
    api.post(f"{CORE}/pods", busybox_pod("next", nodeSelector={"kubernetes.io/hostname": other}, **requesting("small")))
    bound(scattered, "next")
    api.patch(f"{APPS}/replicasets/notebook", {"spec": {"replicas": 0}})
    end(scattered, first["metadata"]["name"])
    bound(scattered, "train")
    assert api.get(f"{CORE}/pods/train")["spec"]["nodeName"] == node


def claim_of(pod: dict[str, Any]) -> str:
    [status] = pod["status"]["resourceClaimStatuses"]
    return str(status["resourceClaimName"])
