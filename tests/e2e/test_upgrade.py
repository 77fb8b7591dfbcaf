"""A node's plugin is replaced while pods come and go, with a real kubelet: nobody notices."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.plugin import PluginProcess
from tests.support.pod_plugins import PodPlugin, SliceWatch, Stream, failed_prepares
from tests.support.workloads import Workloads, request

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

SMALL = "gpu-inference-1g-10gb"


@pytest.fixture
def slices(cluster: Cluster, plugin: PluginProcess) -> Iterator[SliceWatch]:
    stop = threading.Event()
    watch = SliceWatch(cluster, plugin.node.name)
    watch.run(stop)
    yield watch
    stop.set()


@pytest.fixture
def pods(cluster: Cluster, plugin: PluginProcess) -> Iterator[list[PodPlugin]]:
    """Two plugins of the same node, not started; the node's usual one has it again afterwards."""
    found = [PodPlugin(cluster, plugin.node, uid) for uid in ("old-pod", "new-pod")]
    yield found
    for each in found:
        each.stop()
    if not plugin.running:
        plugin.start()


@pytest.mark.core
def test_pods_come_and_go_while_the_plugin_is_replaced(
    cluster: Cluster, workloads: Workloads, plugin: PluginProcess, pods: list[PodPlugin], slices: SliceWatch
) -> None:
    """From a plugin that can't hand over to one that can, and from that to the next."""
    old, new = pods
    with Stream(workloads, "upgrade", SMALL).flowing() as stream:
        stream.more(1)
        old.spawn()
        wait_for(old.registered, 60, "the newcomer stands between the kubelet and a plugin that can't hand over")
        assert not old.says("active on this node")
        stream.more()
        plugin.stop()
        old.wait_at_work()
        stream.more()
        new.spawn()
        new.wait_at_work()
        assert old.running
        stream.more()
        old.stop()
        stream.more()
    assert failed_prepares(cluster, "upgrade") == []
    assert slices.flicker == []
    assert {len(of_pool) for of_pool in slices.generations.values()} == {1}
    assert not old.socket.exists()
    assert not old.registration_socket.exists()
    assert new.refused() == []


@pytest.mark.slow
def test_who_handed_over_takes_the_node_back_from_a_successor_that_dies(
    workloads: Workloads, plugin: PluginProcess, pods: list[PodPlugin], slices: SliceWatch
) -> None:
    old, new = pods
    plugin.stop()
    old.spawn()
    old.wait_at_work()
    new.spawn()
    new.wait_at_work()
    _run(workloads, "back-0")
    new.kill()
    wait_for(lambda: old.says("taking the node back"), 60, "the old plugin works again")
    workloads.delete_pods("back-0")
    _run(workloads, "back-1")
    new.spawn()
    new.wait_at_work()
    wait_for(new.registered, 60, "the kubelet knows the successor again")
    old.stop()
    workloads.delete_pods("back-1")
    assert new.nothing_left()
    assert slices.flicker == []


def _run(workloads: Workloads, pod: str) -> None:
    workloads.running(workloads.pod(pod, workloads.claim(pod, request(SMALL))))
