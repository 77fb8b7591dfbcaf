"""How much of its partition a pod uses, on a real cluster: metrics, and an Event if it fails for want of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

from driver.simulator.node import SimulatedNode
from driver.simulator.state.gpu_load import SimulatedActivity, constant
from kubelet_plugin.checkpoint.records import decode_record
from tests.harness.cluster import Cluster
from tests.harness.node import NodeError
from tests.harness.progress import Progress
from tests.harness.settings import Settings
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.metrics import families, port_in
from tests.support.plugin import PluginFlags, PluginProcess
from tests.support.workloads import NAMESPACE, PODS, Workloads, request

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300), pytest.mark.needs("shared counters")]

INTERVAL = "1s"
SMALL = "gpu-inference-1g-10gb"
SOON_S = 60.0
EVENTS = f"/api/v1/namespaces/{NAMESPACE}/events"
SM, ALLOCATED = "tessera_claim_sm_active_ratio", "tessera_claim_allocated_slice_seconds_total"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.start(Settings(name="usage"), Progress()) as running:
        install(running, {"nodePlugin": {"usageInterval": INTERVAL}})
        yield running


@pytest.fixture(scope="module")
def plugin(cluster: Cluster) -> Iterator[PluginProcess]:
    flags = PluginFlags(usage_interval=INTERVAL, metrics_address="127.0.0.1:0")
    process = PluginProcess(cluster, cluster.nodes[0], flags)
    process.start()
    yield process
    process.stop()
    assert process.refused() == []


@pytest.fixture
def workloads(cluster: Cluster, plugin: PluginProcess) -> Iterator[Workloads]:
    own = Workloads(cluster)
    yield own
    own.delete_all()
    own.wait_until_gone()


def partition(plugin: PluginProcess, claim: str) -> str:
    """The UUID of the partition of a claim."""
    records = [decode_record(path.read_bytes(), path) for path in plugin.records()]
    [uuid] = [str(device.uuid) for record in records if record.name == claim for device in record.devices]
    return uuid


def load(plugin: PluginProcess, claim: str, sm: float, memory_gib: float = 0.0) -> None:
    phases = constant(SimulatedActivity.of(sm, dram=sm / 2), int(memory_gib * (1 << 30)))
    SimulatedNode.attach(plugin.host_root).put_load(partition(plugin, claim), phases)


def values(plugin: PluginProcess, name: str) -> dict[str, float]:
    """The metric of each claim."""
    found = families(port_in(plugin.log, SOON_S))[name].samples
    return {sample.labels["claim"]: sample.value for sample in found}


def test_the_metrics_of_a_claim_are_those_of_its_partition_and_end_with_it(
    plugin: PluginProcess, workloads: Workloads
) -> None:
    for name in ("busy", "idle"):
        workloads.claim(name, request(SMALL))
        workloads.pod(f"pod-{name}", name)
    workloads.running("pod-busy", "pod-idle")
    load(plugin, "busy", 0.8)
    close = pytest.approx(0.8, abs=0.02)
    wait_for(lambda: values(plugin, SM) == {"busy": close, "idle": 0.0}, SOON_S, "the load of one partition is seen")
    [labels] = [each.labels for each in families(port_in(plugin.log, SOON_S))[SM].samples if each.value]
    assert {key: labels[key] for key in ("namespace", "pod", "class", "profile", "node", "source")} == {
        "namespace": NAMESPACE,
        "pod": "pod-busy",
        "class": SMALL,
        "profile": "1g.10gb",
        "node": plugin.node.name,
        "source": "gpm",
    }
    cut = {partition(plugin, name) for name in ("busy", "idle")}

    def published() -> set[str]:
        attributes = (device["attributes"] for device in plugin.devices().values())
        return {each["uuid"]["string"] for each in attributes if "uuid" in each}

    wait_for(lambda: cut <= published(), SOON_S, "dcgm-exporter finds pods by these UUIDs")
    before = values(plugin, ALLOCATED)
    plugin.restart()
    wait_for(lambda: values(plugin, SM).get("busy") == close, SOON_S, "a new process sees it, too")
    assert values(plugin, ALLOCATED)["busy"] >= before["busy"]
    workloads.delete_pods("pod-busy", "pod-idle")
    wait_for(lambda: not values(plugin, SM), SOON_S, "the series have ended")
    assert values(plugin, ALLOCATED).keys() == {"busy", "idle"}


def test_a_container_that_fails_while_its_partition_is_full_gets_an_event(
    cluster: Cluster, plugin: PluginProcess, workloads: Workloads
) -> None:
    workloads.claim("full", request(SMALL))
    workloads.pod("out-of-memory", "full", script="trap 'exit 1' USR1; sleep 100000 & wait")
    workloads.running("out-of-memory")
    load(plugin, "full", 0.5, 9.6)
    full = 9 * (1 << 30)
    wait_for(
        lambda: values(plugin, "tessera_claim_memory_used_bytes").get("full", 0) > full, SOON_S, "the partition is full"
    )
    with suppress(NodeError):  # the container's end may end this process, too
        workloads.exec("out-of-memory", "sh", "-c", "kill -USR1 1")
    SimulatedNode.attach(plugin.host_root).end_load(partition(plugin, "full"))

    def told() -> set[str]:
        events = cluster.api.get(f"{EVENTS}?fieldSelector=reason%3DPartitionFull")["items"]
        return {each["involvedObject"]["kind"] for each in events if "ended with code 1" in each["message"]}

    wait_for(lambda: told() == {"Pod", "ResourceClaim"}, SOON_S, "claim and pod have the Event")

    def restarts() -> int:
        pod = cluster.api.get(f"{PODS}/out-of-memory")
        return int(pod["status"]["containerStatuses"][0]["restartCount"])

    # The node plugin can see the end of the container before the kubelet has started the next one.
    wait_for(lambda: restarts() >= 1, SOON_S, "the kubelet has started the container again")
