"""Repacking on a real API server and scheduler: a pod with a partition is moved to another node, and the pod that waits
for a full GPU gets the one that becomes whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.test_preempt import (
    APPS,
    CORE,
    DRA,
    FULL,
    POLICIES,
    SOON_S,
    end,
    events_about,
    events_of,
    fenced,
    is_refused,
)
from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.harness.waiting import wait_for
from tests.support.chart import ANY_SIZE, install
from tests.support.command import run_tessera
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess, plugins
from tests.support.plugin import PluginFlags

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SMALL = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu-inference-1g-10gb"}}]}}
TEMPLATES = {"full": FULL, "small": SMALL}
MOST = 7
"""Partitions 1g.10gb of a GPU."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes with an H100 each."""
    with control_plane("repack") as running:
        install(running, ANY_SIZE)
        with plugins(running, ["one", "two"], PluginFlags(gpus="sim:h100-1")):
            yield running


@pytest.fixture(scope="module")
def controller(cluster: Cluster) -> Iterator[ControllerProcess]:
    process = ControllerProcess(cluster)
    process.start()
    yield process
    process.stop()
    assert process.refused() == []


def requesting(template: str) -> dict[str, Any]:
    return {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": template}]}


def bound(cluster: Cluster, *names: str) -> None:
    def are_bound() -> bool:
        return all(cluster.api.get(f"{CORE}/pods/{name}")["spec"].get("nodeName") for name in names)

    wait_for(are_bound, SOON_S, f"{', '.join(names)} are bound")


def notebook(cluster: Cluster) -> dict[str, Any] | None:
    """The last pod of the notebook's ReplicaSet that is bound."""
    pods = cluster.api.get(f"{CORE}/pods?labelSelector=app%3Dnotebook")["items"]
    of_node = [pod for pod in pods if pod["spec"].get("nodeName")]
    return max(of_node, key=lambda pod: pod["metadata"]["creationTimestamp"], default=None)


@pytest.fixture
def scattered(cluster: Cluster, controller: ControllerProcess) -> Cluster:
    """A notebook of a ReplicaSet has a partition of one GPU, a pod of its own one of the other; ``train`` waits."""
    api = cluster.api
    for name, devices in TEMPLATES.items():
        api.post(f"{DRA}/resourceclaimtemplates", {"metadata": {"name": name}, "spec": {"spec": devices}})
    api.post(f"{CORE}/pods", busybox_pod("filler", **requesting("full")))
    bound(cluster, "filler")
    names = [f"small-{number}" for number in range(MOST)]
    for name in names:
        api.post(f"{CORE}/pods", busybox_pod(name, **requesting("small")))
    bound(cluster, *names)
    end(cluster, "filler")
    template = busybox_pod("notebook", restartPolicy="Always", **requesting("small"))
    labels = {"app": "notebook"}
    content = {"metadata": {"labels": labels}, "spec": template["spec"]}
    spec: dict[str, Any] = {"replicas": 1, "selector": {"matchLabels": labels}, "template": content}
    api.post(f"{APPS}/replicasets", {"metadata": {"name": "notebook"}, "spec": spec})
    wait_for(lambda: notebook(cluster), SOON_S, "the notebook is bound")
    for name in names[1:]:
        end(cluster, name)
    wait_for(lambda: len(api.get(f"{DRA}/resourceclaims")["items"]) == 2, SOON_S, "the other claims are gone")
    api.post(f"{CORE}/pods", busybox_pod("train", **requesting("full")))
    wait_for(lambda: is_refused(cluster), SOON_S, "the scheduler has refused the pod")
    return cluster


def test_a_movable_notebook_gets_another_place_and_the_waiting_pod_its_gpu(scattered: Cluster) -> None:
    """Nobody else is evicted: nothing would create the other pod again."""
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
    assert "gpu-0=" in fenced(scattered)
    end(scattered, name)
    bound(scattered, "train")
    wait_for(lambda: "=" not in fenced(scattered), SOON_S, "the reservation ends")
    again = wait_for(lambda: notebook(scattered), SOON_S, "the next notebook is bound")
    assert again is not None
    assert again["metadata"]["uid"] != first["metadata"]["uid"]
    nodes = {pod: api.get(f"{CORE}/pods/{pod}")["spec"]["nodeName"] for pod in ("train", "small-0")}
    assert (again["spec"]["nodeName"], nodes) == (other, {"train": node, "small-0": other})
    assert {event["reason"] for event in events_about(scattered, name)} >= {"MovedFor"}
    assert "deletionTimestamp" not in api.get(f"{CORE}/pods/small-0")["metadata"]
