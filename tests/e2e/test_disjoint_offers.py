"""The controller replaces disjoint offers on a real API server and scheduler: pods get what was not offered before."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.harness.cluster import Cluster
from tests.harness.waiting import DeadlineError, wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess, plugins
from tests.support.faults import signal_scheduler
from tests.support.plugin import PluginFlags, PluginProcess
from tests.support.scheduling import Scheduling, asked
from tests.support.workloads import PODS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SMALL, HALF, FULL = "gpu-inference-1g-10gb", "gpu-inference-3g-40gb", "gpu-training"
GPUS, SOON_S = 4, 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("disjoint") as running:
        install(running)
        yield running


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[PluginProcess]:
    with plugins(cluster, ["n1"], PluginFlags(gpus="sim:h100-pcie-4")) as [found]:
        controller = ControllerProcess(cluster, flags=("--offer-mode", "disjoint"))
        controller.start()
        wait_for(lambda: is_disjoint(found), SOON_S, "no two offers overlap")
        yield found
        controller.stop()
        assert controller.refused() == []


def is_disjoint(node: PluginProcess) -> bool:
    """Whether devices have no counters, and every GPU is offered whole or in parts."""
    devices = node.devices()
    whole = {name for name in devices if "-mig-" not in name}
    parts = {name.partition("-mig-")[0] for name in devices if "-mig-" in name}
    return not whole & parts and not any("consumesCounters" in device for device in devices.values())


def full_gpus(node: PluginProcess) -> int:
    return sum("-mig-" not in name for name in node.devices())


def asking(cluster: Cluster, device_class: str, count: int, name: str) -> list[Scheduling]:
    found = [Scheduling(cluster, f"{name}-{number}") for number in range(count)]
    for each in found:
        each.ask(asked(device_class))
    return found


def events(cluster: Cluster, reason: str) -> list[str]:
    items = cluster.api.get("/api/v1/namespaces/default/events")["items"]
    return [f"{item['involvedObject']['name']}: {item['message']}" for item in items if item["reason"] == reason]


def test_a_full_gpu_that_is_offered_is_taken_back_for_a_pod_that_needs_a_part(
    cluster: Cluster, node: PluginProcess
) -> None:
    full = asking(cluster, FULL, GPUS - 1, "full")
    taken = {each.given()[0].device for each in full}
    [last] = {f"gpu-{number}" for number in range(GPUS)} - taken
    wait_for(lambda: last in node.devices() and is_disjoint(node), SOON_S, "the last GPU is offered whole")
    [small] = asking(cluster, SMALL, 1, "small")
    assert small.given()[0].device.startswith(f"{last}-mig-1g10gb-")
    assert is_disjoint(node)
    for each in (*full, small):
        each.forget()
    wait_for(lambda: full_gpus(node) == 2 and is_disjoint(node), SOON_S, "two GPUs are offered whole again")


def test_an_offer_that_the_scheduler_may_have_chosen_already_is_not_withdrawn(
    cluster: Cluster, node: PluginProcess
) -> None:
    full = asking(cluster, FULL, GPUS - 1, "full")
    [last] = {f"gpu-{number}" for number in range(GPUS)} - {each.given()[0].device for each in full}
    wait_for(lambda: last in node.devices() and is_disjoint(node), SOON_S, "the last GPU is offered whole")
    signal_scheduler(cluster, signal.SIGSTOP)
    try:
        [decided] = asking(cluster, FULL, 1, "decided")
        cluster.api.patch(f"{PODS}/{decided.name}/status", {"status": {"nominatedNodeName": "n1"}})
        urgent = Scheduling(cluster, "urgent")
        urgent.ask(asked(SMALL), priorityClassName="system-node-critical")
        sentence = f"urgent: {last} of node n1 is changed to offer 1g.10gb: about 1 s"
        wait_for(lambda: sentence in events(cluster, "Reshaping"), SOON_S, "it is planned, and said")
        with pytest.raises(DeadlineError):  # a withdrawal takes less than a second here
            wait_for(lambda: last not in node.devices(), 3, "the full GPU is withdrawn")
    finally:
        signal_scheduler(cluster, signal.SIGCONT)
    assert decided.given()[0].device == last
    for each in (*full, decided):
        each.forget()
    assert urgent.given()
    urgent.forget()
    wait_for(lambda: full_gpus(node) == 2 and is_disjoint(node), SOON_S, "two GPUs are offered whole again")


def test_a_burst_of_pods_of_all_sizes_gets_all_gpus_without_an_overlap(cluster: Cluster, node: PluginProcess) -> None:
    wanted = [(SMALL, 7), (HALF, 2), (FULL, 2)]
    pods = [each for at, (kind, count) in enumerate(wanted) for each in asking(cluster, kind, count, f"burst-{at}")]
    given = [each.given()[0].device for each in pods]
    assert len(set(given)) == len(given)
    assert len({name.partition("-mig-")[0] for name in given}) == GPUS
    assert is_disjoint(node)
    for each in pods:
        each.forget()
