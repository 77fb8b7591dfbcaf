"""What goes wrong with claims on a real cluster is put right without anybody asking, and people hear of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.plugin import PluginProcess
from tests.support.workloads import CLAIMS, Workloads, request

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SMALL = "gpu-inference-1g-10gb"
SOON_S = 60.0
EVENTS = "/api/v1/namespaces/default/events"


@pytest.fixture
def faults(plugin: PluginProcess) -> Iterator[PluginProcess]:
    """The plugin's simulated node, whose faults end with the test."""
    yield plugin
    plugin.fault("clear")


def told(cluster: Cluster, name: str, reason: str) -> list[dict[str, Any]]:
    """The Events of that reason on a claim and on its pod, which are called the same; waits for both."""

    def events() -> list[dict[str, Any]]:
        items = [e for e in cluster.api.get(EVENTS)["items"] if e["reason"] == reason]
        found = [e for e in items if e["involvedObject"].get("name") == name]
        return found if {e["involvedObject"]["kind"] for e in found} == {"ResourceClaim", "Pod"} else []

    return wait_for(events, 60, f"{reason} on {name} and its claim")


def uuid_of(cluster: Cluster, claim: str) -> str:
    """What the claim's status says of its device; empty before it says anything."""
    entries = cluster.api.get(f"{CLAIMS}/{claim}")["status"].get("devices", ())
    return ",".join(entry["data"]["uuid"] for entry in entries)


@pytest.mark.core
def test_a_partition_lost_to_a_reset_is_cut_again_and_claim_and_pod_say_so(
    workloads: Workloads, faults: PluginProcess, cluster: Cluster
) -> None:
    workloads.running(workloads.pod("victim", workloads.claim("victim", request(SMALL))))
    [before] = faults.partitions()
    wait_for(lambda: uuid_of(cluster, "victim") == before["uuid"], SOON_S, "the claim's status")
    faults.fault("reset", "--gpu", str(before["gpu"]))
    [now] = wait_for(faults.partitions, SOON_S, "the partition is cut again")
    assert (now["gpu"], now["placement"]) == (before["gpu"], before["placement"])
    assert now["uuid"] != before["uuid"]
    for event in told(cluster, "victim", "DeviceRepaired"):
        assert before["uuid"] in event["message"]
        assert now["uuid"] in event["message"]
    wait_for(lambda: uuid_of(cluster, "victim") == now["uuid"], SOON_S, "the claim's new status")
    [spec] = faults.cdi_specs()
    assert now["uuid"] in spec.read_text()


@pytest.mark.core
def test_a_prepare_that_fails_is_told_on_claim_and_pod_and_succeeds_once_the_fault_is_gone(
    workloads: Workloads, faults: PluginProcess, cluster: Cluster
) -> None:
    faults.fault("fail", "nvmlDeviceCreateGpuInstanceWithPlacement", "--code", "UNKNOWN")
    workloads.pod("unlucky", workloads.claim("unlucky", request(SMALL)))
    for event in told(cluster, "unlucky", "PrepareFailed"):
        assert event["type"] == "Warning"
        assert "NVML says UNKNOWN" in event["message"]
    assert not faults.partitions()
    faults.fault("clear")
    workloads.running("unlucky")


def test_a_partition_in_use_when_its_pod_ends_is_removed_once_it_is_free(
    workloads: Workloads, faults: PluginProcess, cluster: Cluster
) -> None:
    workloads.running(workloads.pod("leaver", workloads.claim("leaver", request(SMALL))))
    [partition] = faults.partitions()
    faults.fault("busy", partition["uuid"])
    workloads.end_pods("leaver")
    assert told(cluster, "leaver", "UnprepareFailed")
    assert faults.partitions() == [partition]
    faults.fault("clear")
    wait_for(faults.nothing_left, 60, "nothing of it is left")


def test_checkpoint_records_that_cannot_be_read_are_made_anew(
    workloads: Workloads, plugin: PluginProcess, cluster: Cluster
) -> None:
    workloads.running(workloads.pod("steady", workloads.claim("steady", request(SMALL))))
    partitions, specs = plugin.partitions(), [path.read_text() for path in plugin.cdi_specs()]
    [record] = plugin.records()
    good = record.read_bytes()
    plugin.kill()
    record.write_bytes(good[: len(good) // 2])
    plugin.start()
    wait_for(lambda: record.exists() and record.read_bytes() == good, SOON_S, "the record is there again")
    assert (plugin.partitions(), [path.read_text() for path in plugin.cdi_specs()]) == (partitions, specs)
    assert told(cluster, "steady", "CheckpointRecordRebuilt")
    workloads.delete_pods("steady")
    assert plugin.nothing_left()


def test_a_running_pod_keeps_its_devices_when_the_checkpoint_record_of_its_claim_is_deleted(
    workloads: Workloads, plugin: PluginProcess, cluster: Cluster
) -> None:
    workloads.running(workloads.pod("keeper", workloads.claim("keeper", request(SMALL))))
    partitions, specs = plugin.partitions(), [path.read_text() for path in plugin.cdi_specs()]
    [record] = plugin.records()
    good = record.read_bytes()
    plugin.kill()
    record.unlink()
    plugin.start()
    assert [path.read_text() for path in plugin.cdi_specs()] == specs
    wait_for(lambda: record.exists() and record.read_bytes() == good, SOON_S, "the record is there again")
    assert (plugin.partitions(), [path.read_text() for path in plugin.cdi_specs()]) == (partitions, specs)
    assert told(cluster, "keeper", "CheckpointRecordRebuilt")
    workloads.delete_pods("keeper")
    assert plugin.nothing_left()


def test_a_deleted_cdi_directory_is_back_with_its_specs_and_the_next_pod_runs(
    workloads: Workloads, plugin: PluginProcess, cluster: Cluster
) -> None:
    workloads.running(workloads.pod("first", workloads.claim("first", request(SMALL))))
    before = {path.name: path.read_text() for path in plugin.cdi_specs()}
    shutil.rmtree(plugin.node.cdi_dir)

    def restored() -> bool:
        return {path.name: path.read_text() for path in plugin.cdi_specs()} == before

    wait_for(restored, SOON_S, "the specs are there again")
    workloads.running(workloads.pod("second", workloads.claim("second", request(SMALL))))

    def on_the_node() -> list[str]:
        about = [e for e in cluster.api.get(EVENTS)["items"] if e["reason"] == "CdiDirectoryRestored"]
        return [e["involvedObject"]["name"] for e in about]

    wait_for(lambda: plugin.node.name in on_the_node(), SOON_S, "an Event on the Node")
