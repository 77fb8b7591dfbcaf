"""A pod never meets a plugin that its kubelet does not know yet: slices come after the registration."""

from __future__ import annotations

import pytest

from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.plugin import SLICES, PluginProcess

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

PLANS = "/apis/gpu.tessera.dev/v1alpha1/gpunodeplans"
NOTICED_S, BACK_S = 60.0, 120.0


def conditions(plugin: PluginProcess) -> list[str]:
    status = plugin.cluster.api.get(f"{PLANS}/{plugin.node.name}").get("status", {})
    return [condition["type"] for condition in status.get("conditions", ())]


def stored(plugin: PluginProcess) -> list[str]:
    items = plugin.cluster.api.get(SLICES)["items"]
    return [item["metadata"]["name"] for item in items if item["spec"].get("nodeName") == plugin.node.name]


def test_a_new_plugin_without_its_kubelet_publishes_nothing_and_says_so(
    cluster: Cluster, plugin: PluginProcess
) -> None:
    [node] = [node for node in cluster.nodes if node.name == plugin.node.name]
    plugin.stop()
    node.stop_kubelet()
    try:
        for name in stored(plugin):
            cluster.api.request("DELETE", f"{SLICES}/{name}")
        plugin.spawn()
        wait_for(lambda: conditions(plugin) == ["Unregistered"], NOTICED_S, "nobody has registered it")
        assert not stored(plugin)
    finally:
        node.start_kubelet()
    wait_for(plugin.slices, BACK_S, "its slices come with the registration")
    assert plugin.registered()
    wait_for(lambda: not conditions(plugin), NOTICED_S, "the condition has ended")


def test_slices_come_back_after_their_kubelet_has_wiped_them(cluster: Cluster, plugin: PluginProcess) -> None:
    [node] = [node for node in cluster.nodes if node.name == plugin.node.name]
    before = plugin.devices().keys()
    node.restart_kubelet()
    wait_for(lambda: plugin.devices().keys() == before, BACK_S, "they are back")
    plugin.wait_quiet()
    assert plugin.devices().keys() == before
