"""Restarts, kills and meddling on a real cluster: what is held stays held, and nothing is left behind."""

from __future__ import annotations

import pytest

from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.plugin import SLICES, PluginProcess
from tests.support.workloads import Workloads, request

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SMALL, FULL = "gpu-inference-1g-10gb", "gpu-training"
WIPE_S = 120.0
"""A kubelet that starts deletes its node's slices only after it has synced with the API server."""


@pytest.mark.core
def test_a_claim_allocated_but_not_prepared_keeps_its_device_through_restart_and_wipe(
    workloads: Workloads, plugin: PluginProcess, cluster: Cluster
) -> None:
    plugin.stop()
    claim = workloads.claim("early", request(SMALL))
    workloads.pod("early", claim)
    [device] = wait_for(lambda: workloads.allocated(claim), 60, "the allocation")
    cluster.node(plugin.node.name).restart_kubelet()
    wait_for(lambda: not plugin.slices(), WIPE_S, "the kubelet wipes the slices")
    plugin.start()
    workloads.running("early")
    assert workloads.allocated(claim) == [device]
    assert [partition["holder"] for partition in plugin.partitions()] == ["default/early"]


@pytest.mark.core
def test_a_plugin_killed_between_prepare_and_unprepare_still_cleans_up(
    workloads: Workloads, plugin: PluginProcess
) -> None:
    workloads.running(workloads.pod("victim", workloads.claim("victim", request(SMALL))))
    before = plugin.partitions()
    plugin.kill()
    plugin.start()
    assert plugin.partitions() == before
    workloads.delete_pods("victim")
    assert plugin.nothing_left()


def test_after_a_reboot_pods_end_before_the_driver_is_loaded_and_new_ones_are_told_what_they_wait_for(
    workloads: Workloads, plugin: PluginProcess
) -> None:
    workloads.running(workloads.pod("old", workloads.claim("old", request(SMALL))))
    plugin.stop()
    workloads.pod("new", workloads.claim("new", request(FULL)))
    wait_for(lambda: workloads.allocated("new"), 60, "the allocation")
    plugin.fault("reboot")
    plugin.fault("fail", "nvmlInit", "--code", "DRIVER_NOT_LOADED")
    plugin.spawn()
    try:
        wait_for(plugin.registered, 60, "the registration without a driver")
        workloads.delete_pods("old")
        assert plugin.records() == plugin.cdi_specs() == []
        told = "can't be prepared before the node's NVIDIA driver can be used: NVML says DRIVER_NOT_LOADED"
        wait_for(lambda: any(told in message for message in events(plugin.cluster, "new")), 60, "the pod's Event")
    finally:
        plugin.fault("clear")
    workloads.running("new")
    assert "the NVIDIA driver is there" in plugin.log.read_text()


def events(cluster: Cluster, pod: str) -> list[str]:
    """What the kubelet says about the pod's claims."""
    path = f"/api/v1/namespaces/default/events?fieldSelector=involvedObject.name%3D{pod},involvedObject.kind%3DPod"
    found = cluster.api.get(path)["items"]
    return [event["message"] for event in found if event["reason"] == "FailedPrepareDynamicResources"]


def test_a_restarted_kubelet_wipes_the_slices_and_they_are_back(
    workloads: Workloads, plugin: PluginProcess, cluster: Cluster
) -> None:
    workloads.running(workloads.pod("steady", workloads.claim("steady", request(SMALL))))
    wait_for(plugin.holds_something, WIPE_S, "the slices know what is held")
    plugin.wait_quiet()
    before = plugin.devices()
    uids = {item["metadata"]["uid"] for item in plugin.slices()}
    partitions = plugin.partitions()
    cluster.node(plugin.node.name).restart_kubelet()

    def renewed() -> bool:
        found = {item["metadata"]["uid"] for item in plugin.slices()}
        return bool(found) and not uids & found

    wait_for(renewed, WIPE_S, "the slices are new ones")
    wait_for(lambda: plugin.devices() == before, WIPE_S, "they say the same as those before")
    assert plugin.partitions() == partitions
    workloads.running(workloads.pod("next", workloads.claim("next", request(SMALL))))


def test_slices_edited_or_deleted_by_hand_are_put_right(plugin: PluginProcess, cluster: Cluster) -> None:
    plugin.wait_quiet()
    before = plugin.devices()
    counters, *devices = plugin.slices()
    victim = devices[0]
    victim["spec"]["devices"] = victim["spec"]["devices"][:1]
    cluster.api.request("PUT", f"{SLICES}/{victim['metadata']['name']}", victim)
    cluster.api.request("DELETE", f"{SLICES}/{devices[1]['metadata']['name']}")
    cluster.api.request("DELETE", f"{SLICES}/{counters['metadata']['name']}")
    stranger = {**victim, "metadata": {"name": "99999-stranger"}}
    stranger["spec"] = {**victim["spec"], "devices": []}
    cluster.api.post(SLICES, stranger)

    def put_right() -> bool:
        return plugin.devices() == before and len(plugin.slices()) == 1 + len(devices)

    wait_for(put_right, 60, "the slices are as before")


def test_an_idle_plugin_writes_nothing(plugin: PluginProcess) -> None:
    plugin.wait_quiet()
    versions = plugin.versions()
    plugin.kill()
    plugin.start()
    assert plugin.versions() == versions


def test_sigterm_removes_the_sockets(plugin: PluginProcess) -> None:
    assert plugin.socket.exists()
    assert plugin.registration_socket.exists()
    assert plugin.socket.stat().st_mode & 0o077 == 0
    plugin.stop()
    assert not plugin.socket.exists()
    assert not plugin.registration_socket.exists()


@pytest.mark.needs("shared counters", "device taints")
def test_the_api_server_keeps_every_field_that_is_sent(plugin: PluginProcess) -> None:
    assert plugin.slices()[0]["spec"]["sharedCounters"]
    assert "dropped a field" not in plugin.log.read_text()
