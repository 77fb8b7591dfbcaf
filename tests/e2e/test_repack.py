"""Repacking on a real API server and scheduler: a pod with a partition is moved to the last free place of another node,
and the pod that waits for a full GPU gets the one that becomes whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.harness.waiting import wait_for
from tests.support.command import run_tessera
from tests.support.scattered_nodes import MOST, bound, notebook, scattered_nodes
from tests.support.waiting_pod import (
    CORE,
    POLICIES,
    SOON_S,
    end,
    events_about,
    events_of,
    fenced,
    is_refused,
    requesting,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture(params=["replicasets", "statefulsets"])
def owners(request: pytest.FixtureRequest) -> str:
    """A StatefulSet makes the next pod only once the last one has ended, a ReplicaSet at once."""
    return str(request.param)


@pytest.fixture
def scattered(owners: str) -> Iterator[Cluster]:
    with scattered_nodes("repack", small=MOST - 1, owners=owners) as running:
        yield running


def test_a_movable_notebook_gets_another_place_and_the_waiting_pod_its_gpu(scattered: Cluster, owners: str) -> None:
    """No other pod is evicted: nothing would create the other pods again. A pod that comes while the notebook ends and
    that would fit there does not get its place."""
    api, first = scattered.api, notebook(scattered)
    assert first is not None
    name, node = first["metadata"]["name"], first["spec"]["nodeName"]
    [other] = {"one", "two"} - {node}
    kind = {"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuPolicy", "metadata": {"name": "movable"}}
    api.post(POLICIES, {**kind, "spec": {"repack": {"movable": True}}})
    wait_for(lambda: events_of(scattered, "movable"), SOON_S, "the controller says what it would move")
    [event] = events_of(scattered, "movable")
    claim = first["status"]["resourceClaimStatuses"][0]["resourceClaimName"]
    moves = f"on node {node} moving default/{claim} (1g.10gb) from gpu-0 to gpu-0 of node {other} would make room"
    assert event["reason"] == "WouldMove"
    assert event["message"].endswith(f"one at a time: {moves}")
    of_either = re.compile(
        r"on node \w+ moving default/\S+ \(1g.10gb\) from gpu-0 to gpu-0 of node \w+ would make room"
    )
    for command in (["why", "pod/train"], ["status", "-o", "json"]):
        text = " ".join(run_tessera(scattered, *command).stdout.split())
        assert of_either.search(text), text
    api.patch(f"{POLICIES}/movable", {"spec": {"mode": "Active"}})
    wait_for(lambda: api.get(f"{CORE}/pods/{name}")["metadata"].get("deletionTimestamp"), SOON_S, "it is evicted")
    assert fenced(scattered).count("gpu-0=") == 2
    api.post(f"{CORE}/pods", busybox_pod("rival", node=other, **requesting("small")))
    wait_for(lambda: is_refused(scattered, "rival"), SOON_S, "the rival does not get the place")

    def again() -> dict[str, Any] | None:
        last = notebook(scattered)
        return last if last is not None and last["metadata"]["uid"] != first["metadata"]["uid"] else None

    if owners == "replicasets":
        wait_for(again, SOON_S, "the next notebook is bound while the one that is moved still ends")
    end(scattered, name)
    bound(scattered, "train")
    second = wait_for(again, SOON_S, "the next notebook is bound")
    assert second is not None
    wait_for(lambda: "=" not in fenced(scattered), SOON_S, "the reservations end")
    assert "nodeName" not in api.get(f"{CORE}/pods/rival")["spec"]
    nodes = {pod: api.get(f"{CORE}/pods/{pod}")["spec"]["nodeName"] for pod in ("train", "small-0")}
    assert (second["spec"]["nodeName"], nodes) == (other, {"train": node, "small-0": other})
    assert {event["reason"] for event in events_about(scattered, name)} >= {"MovedFor"}
    assert "deletionTimestamp" not in api.get(f"{CORE}/pods/small-0")["metadata"]
