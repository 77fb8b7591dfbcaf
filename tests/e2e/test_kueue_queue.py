"""What waits in Kueue's queue, on the real API server and scheduler: published to be counted, and explained.

Kueue itself does not run here: the Workloads are written by the test, with a definition that has only what is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import ANY_SIZE, install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess, plugins
from tests.support.plugin import PluginFlags, PluginProcess
from tests.support.scheduling import Scheduling, asked
from tests.support.workloads import TEMPLATES, definition

pytestmark = [pytest.mark.cluster, pytest.mark.core, pytest.mark.timeout(300), pytest.mark.needs("shared counters")]

SMALL, FULL = "gpu-inference-1g-10gb", "gpu-training"
SOON_S = 60.0
QUEUE = "/apis/kueue.x-k8s.io/v1beta2/namespaces/default/workloads"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A control plane with a controller that reads Kueue's queue and lists nothing else."""
    with control_plane("kueue-queue") as running:
        install(running, {"controller": {"kueue": True}, **ANY_SIZE})
        running.apply([definition("Workload", "kueue.x-k8s.io/v1beta2")])
        # A controller that finds no Workloads at its start asks again a minute later.
        wait_for(lambda: running.api.get(QUEUE), SOON_S, "Workloads are served")
        controller = ControllerProcess(running, flags=("--kueue",))
        controller.start()
        yield running
        refused = controller.refused()
        controller.stop()
        assert refused == []


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[PluginProcess]:
    with plugins(cluster, ["n1"], PluginFlags(gpus="sim:dgx-h100")) as [plugin]:
        yield plugin


class Queued:
    """A Workload in the queue, of one pod with one claim."""

    def __init__(self, cluster: Cluster, name: str, request: dict[str, Any]) -> None:
        self.cluster, self.name = cluster, name
        devices = {"devices": {"requests": [request]}}
        cluster.api.post(TEMPLATES, {"metadata": {"name": name}, "spec": {"spec": devices}})
        claims = [{"name": "gpu", "resourceClaimTemplateName": name}]
        pods = [{"name": "main", "count": 1, "template": {"spec": {"resourceClaims": claims}}}]
        metadata = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload", "metadata": {"name": name}}
        cluster.api.post(QUEUE, {**metadata, "spec": {"podSets": pods, "queueName": "team", "active": True}})

    def admit(self) -> None:
        conditions = [{"type": "QuotaReserved", "status": "True"}]
        self.cluster.api.patch(f"{QUEUE}/{self.name}/status", {"status": {"conditions": conditions}})

    def reason(self) -> str:
        """The message of the Event on it; empty if it has none."""
        events = self.cluster.api.get("/api/v1/namespaces/default/events")["items"]
        about = {"kind": "Workload", "name": self.name}
        return next((each["message"] for each in events if about.items() <= each["involvedObject"].items()), "")


def partitions(node: PluginProcess) -> list[dict[str, Any]]:
    """The published partitions of the profile, as Kueue counts them."""
    return [each for each in node.devices().values() if each["attributes"].get("profile") == {"string": "1g.10gb"}]


def test_as_many_devices_are_published_as_a_queued_workload_asks_for_until_it_is_admitted(
    cluster: Cluster, node: PluginProcess
) -> None:
    wait_for(lambda: len(partitions(node)) == 2, SOON_S, "the node follows its plan")
    queued = Queued(cluster, "many", asked(SMALL, count=12))
    offered = [False] * 10 + [True] * 2
    wait_for(
        lambda: sorted("taints" not in each for each in partitions(node)) == offered, SOON_S, "12, two to be given"
    )
    queued.admit()
    wait_for(lambda: len(partitions(node)) == 2, SOON_S, "those of the queue are taken back")
    assert queued.reason() == ""


def test_a_queued_workload_takes_nothing_from_pods_and_says_who_holds_its_gpus(
    cluster: Cluster, node: PluginProcess
) -> None:
    parts = Queued(cluster, "parts", asked(SMALL, count=20))
    wait_for(lambda: len(partitions(node)) == 20, SOON_S, "20 partitions are published")
    eight = Scheduling(cluster, "eight")
    eight.ask(asked(FULL, count=8))
    assert len(eight.given()) == 8
    whole = Queued(cluster, "whole", asked(FULL, count=8))
    message = (
        "pod set main, claim gpu: request gpu needs 8 full GPUs of one node: none is free, of 8 NVIDIA H100 80GB HBM3 "
        "that have it; devices there are held by 1 claim: default/eight"
    )
    # The controller may hear of the Workload before it hears of the allocation.
    wait_for(lambda: whole.reason() == message, SOON_S, f"the Event on the Workload: {message}")
    assert wait_for(parts.reason, SOON_S, "an Event on the other Workload")
    wait_for(lambda: len(partitions(node)) == 20, SOON_S, "the partitions are still published")
    eight.forget()
    parts.admit()
