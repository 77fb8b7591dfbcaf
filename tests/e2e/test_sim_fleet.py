"""`tessera sim fleet` on a real cluster: its nodes take pods, and Ctrl-C leaves nothing of them."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.plugin import SLICES, TESSERA, is_of_monitors
from tests.support.workloads import Workloads, request

pytestmark = pytest.mark.cluster

NODES = 5
READY_S = 60.0
FLEET_NODES = "/api/v1/nodes"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("sim-fleet") as running:
        install(running)
        yield running


def names(cluster: Cluster, path: str) -> list[str]:
    return [item["metadata"]["name"] for item in cluster.api.get(path)["items"]]


def devices_by_node(cluster: Cluster) -> dict[str, list[dict[str, Any]]]:
    """Of the nodes that have published any."""
    found: dict[str, list[dict[str, Any]]] = {}
    for item in cluster.api.get(SLICES)["items"]:
        if (devices := item["spec"].get("devices")) and not is_of_monitors(item):
            found.setdefault(item["spec"]["nodeName"], []).extend(devices)
    return found


def end(fleet: subprocess.Popen[bytes]) -> None:
    """Wait for its end, but not for ever, as Popen itself would where the block ends."""
    try:
        fleet.wait(READY_S)
    except subprocess.TimeoutExpired:
        fleet.kill()


def test_a_pod_runs_on_a_fleet_and_ctrl_c_leaves_nothing_of_it(cluster: Cluster, tmp_path: Path) -> None:
    workloads = Workloads(cluster)
    command = [
        TESSERA,
        "sim",
        "fleet",
        "--nodes",
        str(NODES),
        "--mode",
        "alone",
        "--kubeconfig",
        str(cluster.kubeconfig),
    ]
    log = tmp_path / "fleet.log"
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as fleet:
        try:
            wait_for(lambda: len(names(cluster, FLEET_NODES)) == NODES, READY_S, "the fleet's nodes are there")
            wait_for(lambda: len(devices_by_node(cluster)) == NODES, READY_S, "every node publishes")
            for devices in devices_by_node(cluster).values():
                assert all(device["attributes"]["simulated"] == {"bool": True} for device in devices)
            workloads.claim("one", request("gpu-training"))
            workloads.pod("one", "one")
            workloads.running("one")
            workloads.end_pods("one")
        finally:
            fleet.send_signal(signal.SIGINT)
            end(fleet)
    said = log.read_text()
    assert fleet.returncode == 0, said
    assert "all objects of the fleet are removed" in said
    assert not names(cluster, FLEET_NODES)
    assert not names(cluster, SLICES)
