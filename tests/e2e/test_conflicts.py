"""Two claims that were allocated overlapping devices, on a real API server: whose pods the controller evicts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.bench.kubelet import Kubelet, allocated_claim
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess, plugins
from tests.support.plugin import PluginFlags, PluginProcess
from tests.support.workloads import CLAIMS, PODS, bound_pod

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NODE, SOON_S = "n1", 60.0
PARTITION = "gpu-0-mig-1g10gb-0"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("conflicts") as running:
        install(running)
        yield running


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[PluginProcess]:
    """A node with a controller."""
    with plugins(cluster, [NODE], PluginFlags()) as [found]:
        controller = ControllerProcess(cluster)
        controller.start()
        yield found
        controller.stop()
        assert controller.refused() == []


def conflict_events(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """The Events about conflicts, by UID of the pod."""
    events = cluster.api.get("/api/v1/namespaces/default/events")["items"]
    return {each["involvedObject"]["uid"]: each for each in events if each.get("reason") == "GpuConflict"}


def test_the_pod_that_cannot_get_its_device_is_evicted_if_it_is_replaced_and_told_why_in_any_case(
    cluster: Cluster, node: PluginProcess
) -> None:
    kubelet = Kubelet(node.socket).connect()
    kubelet.prepare(allocated_claim(cluster, "first", NODE, PARTITION))
    for name, device in (("late", "gpu-0"), ("twin", PARTITION)):
        with pytest.raises(RuntimeError, match=f"overlaps {PARTITION} .* claim default/first .* still holds"):
            kubelet.prepare(allocated_claim(cluster, name, NODE, device))
    kubelet.close()
    wait_for(lambda: cluster.api.get(f"{CLAIMS}/first")["status"].get("devices"), SOON_S, "the first claim is Ready")
    first, late = (bound_pod(cluster, name, NODE, name, owned=True) for name in ("first", "late"))
    alone = bound_pod(cluster, "alone", NODE, "twin", owned=False)

    wait_for(lambda: conflict_events(cluster).keys() >= {late, alone}, SOON_S, "an Event on both pods")
    assert first not in conflict_events(cluster)
    messages = {uid: event["message"] for uid, event in conflict_events(cluster).items()}
    assert f"gpu-0 of node {NODE}, which overlaps {PARTITION}, which claim default/first holds" in messages[late]
    assert f"{PARTITION} of node {NODE}, which claim default/first holds" in messages[alone]
    assert "is evicted" in messages[late]
    assert "must be deleted" in messages[alone]
    ending = [name for name in ("first", "late", "alone") if is_ending(cluster, name)]
    assert ending == ["late"]


def is_ending(cluster: Cluster, pod: str) -> bool:
    return "deletionTimestamp" in cluster.api.get(f"{PODS}/{pod}")["metadata"]
