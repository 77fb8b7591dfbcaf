"""A node with a real kubelet that publishes every device: its slices do not show what runs."""

from __future__ import annotations

import pytest

from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.complete_nodes import differences, is_complete, label, specs
from tests.support.plugin import PluginProcess
from tests.support.workloads import Workloads, request

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300), pytest.mark.needs("shared counters")]

SMALL, FULL = "gpu-inference-1g-10gb", "gpu-training"
SOON_S = 60.0


def test_slices_stay_the_same_while_a_pod_runs(cluster: Cluster, plugin: PluginProcess, workloads: Workloads) -> None:
    wait_for(lambda: not plugin.records() and not plugin.partitions(), SOON_S, "the node is idle")
    try:
        label(cluster, plugin.node.name, "complete")
        wait_for(lambda: is_complete(plugin), SOON_S, "every device is published")
        plugin.wait_quiet()
        versions = plugin.versions()
        idle = specs(plugin)
        workloads.claim("part", request(SMALL))
        workloads.claim("whole", request(FULL))
        workloads.pod("both", "part", "whole")
        workloads.running("both")
        assert len(plugin.partitions()) == 1
        plugin.restart()
        assert differences(specs(plugin), idle) == []
        workloads.end_pods("both")
        wait_for(lambda: not plugin.records(), SOON_S, "both claims are unprepared")
        assert differences(specs(plugin), idle) == []
        assert plugin.versions() == versions
    finally:
        label(cluster, plugin.node.name, None)
