"""Settings by node on a real API server: read at the start, rolled out after an edit, kept after a mistake."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from driver.config.node_configs import CONFIG_LABEL, CONFIGS_KEY, NODE_CONFIGS
from driver.model.plan import PATH
from driver.model.reported_gpus import decode_inventory
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess
from tests.support.plugin import TESSERA, PluginProcess, bare_node

pytestmark = [pytest.mark.cluster, pytest.mark.core, pytest.mark.timeout(300)]

NODES = ("shared-a", "shared-b", "plain")
SOON_S = 60.0

Config = dict[str, Any]


def shared(**settings: str) -> Config:
    return {"name": "shared", "nodeSelector": {"use": "shared"}, "settings": settings}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with control_plane("node-configs") as running:
        install(running, {"nodeConfigs": [shared(shares="0=4")]})
        yield running


@pytest.fixture
def led(cluster: Cluster) -> Iterator[Cluster]:
    """Nodes of which two have labels that select a configuration, and a controller."""
    processes = [PluginProcess(cluster, bare_node(cluster, name)) for name in NODES]
    for name in NODES[:2]:
        cluster.api.patch(f"/api/v1/nodes/{name}", {"metadata": {"labels": {"use": "shared"}}})
    controller = ControllerProcess(cluster)
    controller.start()
    for process in processes:
        process.spawn()
    yield cluster
    for process in processes:
        process.stop()
        assert process.refused() == []
    controller.stop()
    assert controller.refused() == []


def edit(cluster: Cluster, *configs: Config) -> None:
    data = {CONFIGS_KEY: json.dumps(configs)}
    cluster.api.patch(f"/api/v1/namespaces/tessera/configmaps/{NODE_CONFIGS}", {"data": data})


def plan(cluster: Cluster, node: str) -> dict[str, Any]:
    return {"spec": {}, "status": {}, **cluster.api.get(f"{PATH}/{node}")}


def shares(cluster: Cluster, node: str) -> int:
    """Into how many shares the node says that its first GPU is divided."""
    reports = decode_inventory(plan(cluster, node)["status"].get("inventory", ""))
    return reports[0].shares if reports else -1


def complete(cluster: Cluster) -> list[str]:
    """The nodes that publish every device."""
    return [node for node in NODES if plan(cluster, node)["status"]["mode"] == "Complete"]


def starts(cluster: Cluster, node: str) -> int:
    """How often its plugin has discovered the GPUs."""
    return (cluster.logs_dir / f"tessera-{node}.log").read_text().count("discovered GPUs")


def test_nodes_take_their_configuration_and_follow_its_edits(led: Cluster) -> None:
    wait_for(lambda: [shares(led, node) for node in NODES] == [4, 4, 0], SOON_S, "each node has its settings")
    assert [starts(led, node) for node in NODES] == [1, 1, 1]

    edit(led, shared(shares="0=2"))
    wait_for(lambda: [shares(led, node) for node in NODES] == [2, 2, 0], SOON_S, "the edit is rolled out")
    assert [starts(led, node) for node in NODES] == [2, 2, 1]

    edit(led, shared(shares="0=2", publish="complete"))
    wait_for(lambda: complete(led) == [*NODES[:2]], SOON_S, "they publish every device")
    assert [starts(led, node) for node in NODES] == [2, 2, 1]

    edit(led, shared(shares="0=99"))
    wait_for(lambda: "shares" in plan(led, "shared-a")["status"]["config"]["error"], SOON_S, "the mistake is reported")
    command = [TESSERA, "status", "--kubeconfig", str(led.kubeconfig)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    assert "shared-a keeps configuration shared" in " ".join(said.split())
    assert '"0=99"' in said
    assert (shares(led, "shared-a"), complete(led)) == (2, [*NODES[:2]])

    edit(led, shared(shares="0=2"), {"name": "spare", "settings": {"shares": "all=3"}})
    led.api.patch("/api/v1/nodes/plain", {"metadata": {"labels": {CONFIG_LABEL: "spare"}}})
    wait_for(lambda: [shares(led, node) for node in NODES] == [2, 2, 3], SOON_S, "the label names its configuration")
    wait_for(lambda: not complete(led), SOON_S, "they publish what is offered")
    assert [starts(led, node) for node in NODES] == [2, 2, 2]
