"""``status.devices`` on the real API server, written with the node plugin's own role and a token of its node."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from driver.errors import ApiError
from driver.kube.client import KubeClient, load_configuration
from driver.model.gpu_settings import TimeSlice
from driver.model.offer import DeviceKind
from kubelet_plugin.checkpoint.records import VERSION, ClaimRecord, DeviceRecord
from kubelet_plugin.status.claim_status import StatusWriter, apply_body, device_statuses, status_path
from tests.bench.kubelet import allocated_claim
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.plugin import DRIVER
from tests.support.running import eventually, in_thread
from tests.support.workloads import CLAIMS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NODE = "node-a"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("claim-status") as running:
        install(running)
        for node in (NODE, "node-b"):
            running.add_node_object(node)
        yield running


def client_of(cluster: Cluster, node: str) -> KubeClient:
    return KubeClient(load_configuration(cluster.service_account_kubeconfig("tessera", "tessera-node", node=node)), "t")


def shared_by(cluster: Cluster, name: str, number: int) -> ClaimRecord:
    """The record of a claim with share ``number`` of a GPU."""
    device = f"gpu-0-share-{number}"
    uid = allocated_claim(cluster, name, NODE, device).uid
    entry = DeviceRecord(
        (), f"{NODE}-{DRIVER}", device, 0, "GPU-0", DeviceKind.SHARE, shares=10, time_slice=TimeSlice.SHORT
    )
    return ClaimRecord(VERSION, "default", name, uid, "prepared", (entry,))


def stored(cluster: Cluster, name: str) -> dict[str, Any]:
    return cluster.api.get(f"{CLAIMS}/{name}")


def in_use(cluster: Cluster, name: str) -> int:
    entries = stored(cluster, name)["status"].get("devices", ())
    return sum(entry["data"]["sharing"]["inUse"] for entry in entries)


@pytest.mark.smoke
def test_the_entry_arrives_follows_changes_and_never_lands_on_a_recreated_claim(cluster: Cluster) -> None:
    first, second = shared_by(cluster, "first", 0), shared_by(cluster, "second", 1)
    prepared = [first]
    writer = StatusWriter(client_of(cluster, NODE), DRIVER, lambda: device_statuses(prepared))
    with in_thread(writer.run, writer.notify):
        eventually(lambda: in_use(cluster, "first") == 1, "the entry")
        (entry,) = stored(cluster, "first")["status"]["devices"]
        assert entry["conditions"][0]["reason"] == "Prepared"
        assert entry["data"]["sharing"] == {"shares": 10, "inUse": 1, "timeSlice": "Short"}

        prepared.append(second)
        writer.notify()
        eventually(lambda: in_use(cluster, "first") == in_use(cluster, "second") == 2, "both say two")
        (changed,) = stored(cluster, "first")["status"]["devices"]
        assert changed["conditions"] == entry["conditions"]

        cluster.api.request("DELETE", f"{CLAIMS}/first")
        allocated_claim(cluster, "first", NODE, "gpu-0-share-0")
        third = shared_by(cluster, "third", 2)
        prepared.append(third)
        writer.notify()
        eventually(lambda: in_use(cluster, "third") == in_use(cluster, "second") == 3, "all that exist say three")
    assert "devices" not in stored(cluster, "first")["status"]


def test_a_restart_rewrites_nothing_that_is_there(cluster: Cluster) -> None:
    prepared = [shared_by(cluster, "kept", 3)]
    first = written_at(cluster, prepared, datetime(2026, 11, 21, tzinfo=UTC))
    assert written_at(cluster, prepared, datetime(2026, 11, 22, tzinfo=UTC)) == first
    assert in_use(cluster, "kept") == 1


def written_at(cluster: Cluster, prepared: list[ClaimRecord], now: datetime) -> dict[str, Any]:
    """The first claim after a writer with that clock has done its work."""
    writer = StatusWriter(client_of(cluster, NODE), DRIVER, lambda: device_statuses(prepared), lambda: now)
    with in_thread(writer.run, writer.notify):
        eventually(lambda: [known for known in writer._states.values() if known.written], "a round of the writer")
    return stored(cluster, prepared[0].name)


@pytest.mark.smoke
def test_another_nodes_plugin_may_not_write_it(cluster: Cluster) -> None:
    """Refused by the API server's own check where it has one, otherwise by the chart's policy, once it is in force."""
    other = client_of(cluster, "node-b")
    early = shared_by(cluster, "early", 4)
    wait_for(lambda: refusal(other, early), 60, "another node's plugin may not write")
    foreign = shared_by(cluster, "foreign", 4)
    assert re.search(r"resourceclaims/driver|own-claims\.gpu\.tessera\.dev", refusal(other, foreign))
    assert "devices" not in stored(cluster, "foreign")["status"]


def refusal(client: KubeClient, record: ClaimRecord) -> str:
    """Why the status of a claim may not be written; empty if it was."""
    claim = record.reference
    since = {record.devices[0].device: "2026-01-01T00:00:00Z"}
    try:
        client.apply(status_path(claim), apply_body(claim, DRIVER, device_statuses([record])[claim], since), DRIVER)
    except ApiError as error:
        return str(error)
    return ""
