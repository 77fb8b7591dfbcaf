"""GPUs that claims share by memory, on the real scheduler and kubelet: nobody gets more than there is or he asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml
import pytest

from driver.errors import ApiError
from driver.kube.get_and_list import RESOURCE_GROUP
from driver.model.shared_memory import GIB
from driver.simulator.node import SimulatedNode
from driver.simulator.tree import MACHINE_CGROUPS
from tests.e2e.conftest import skip_without
from tests.harness.cluster import Cluster
from tests.harness.progress import Progress
from tests.harness.settings import Settings
from tests.harness.waiting import wait_for
from tests.support.allocations import Allocations
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess, plugins
from tests.support.invariants import limits_in_force
from tests.support.plugin import PluginFlags, PluginProcess
from tests.support.scheduling import Scheduling, asked, forget
from tests.support.workloads import Workloads, reported_of, wait_default_account

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400), pytest.mark.needs("consumable capacity")]

SHARED, TRAINING, PARTITION = "gpu-shared", "gpu-training", "gpu-inference-1g-10gb"
WHOLE = 79
"""GiB of a simulated H100 that claims can have."""

H100 = Path(__file__).parents[2] / "driver/simulator/data/nodes/h100-pcie-4.yaml"
"""Of a driver that limits no memory."""

SIZES = (1, 1, 2, 2, 3, 3, 5, 10)
NAMESPACES = ("team-a", "team-b", "team-c", "team-d")
WAVE, PODS_AT_ONCE, REST = 16, 64, 21
"""Pods that come before each restart, those that run in the end, and the GiB that they leave of three GPUs: so many
that whatever the order, a GPU has room for each of them."""

SOON_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("shared-gpus") as running:
        install(running)
        yield running


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[PluginProcess]:
    """Four H100 that claims may share, without a controller at first."""
    with plugins(cluster, ["n1"], PluginFlags(gpus="sim:h100-pcie-4", shared="all=time-slicing")) as [found]:
        wait_for(lambda: "gpu-3-shared" in found.devices(), SOON_S, "shared devices published")
        yield found


def asking(cluster: Cluster, name: str, memory: str) -> Scheduling:
    scheduling = Scheduling(cluster, name)
    scheduling.ask(asked(SHARED, memory=memory))
    return scheduling


def given(scheduling: Scheduling) -> str:
    """The device that it got, and how much of it."""
    [device] = scheduling.given()
    [result] = scheduling.claim()["status"]["allocation"]["devices"]["results"]
    assert result["shareID"]
    return f"{device.device} {result['consumedCapacity']['memory']}"


@pytest.mark.parametrize("with_controller", [False, True], ids=["alone", "with a controller"])
@pytest.mark.core
def test_claims_fill_one_gpu_before_they_open_another(
    cluster: Cluster, node: PluginProcess, with_controller: bool
) -> None:
    controller = ControllerProcess(cluster)
    if with_controller:
        controller.start()
        wait_for(lambda: controller.plans().get("n1", {}).get("spec", {}).get("offers"), SOON_S, "a plan with offers")
    in_turn: list[Scheduling] = []
    places = []
    for name, memory in (("small", "6Gi"), ("large", "70Gi"), ("medium", "10Gi"), ("odd", "1500Mi")):
        in_turn.append(asking(cluster, name, memory))
        places.append(given(in_turn[-1]).split(" "))
    (first, _), (second, _), (third, _), (fourth, amount) = places
    assert first == second != third
    assert fourth in {first, third}, "no third GPU is opened"
    assert amount == "2Gi", "an amount is rounded up to whole GiB"
    large = asking(cluster, "too-large", "80Gi")
    assert "cannot allocate all claims" in large.refused()
    if with_controller:
        reason = wait_for(lambda: reported_of(cluster, "too-large"), SOON_S, "the reason on the claim")
        assert "no shared GPU has so much; the largest has 79 GiB for claims (NVIDIA H100 PCIe)" in reason
    forget(*in_turn, large)
    if with_controller:
        controller.stop()
        assert controller.refused() == []


@pytest.fixture
def uncontrolled() -> Iterator[Cluster]:
    """Such a node whose offers no controller has ever planned: it would follow the last plan for a while."""
    with control_plane("shared-alone") as cluster:
        install(cluster)
        skip_without(cluster, "shared counters")
        with plugins(cluster, ["n1"], PluginFlags(gpus="sim:h100-pcie-4", shared="all=time-slicing")) as [found]:
            wait_for(lambda: "gpu-3-shared" in found.devices(), SOON_S, "shared devices published")
            yield cluster


def test_a_gpu_is_shared_or_somebody_has_it_alone(uncontrolled: Cluster) -> None:
    cluster = uncontrolled
    share = Scheduling(cluster, "share")
    unlimited = 'device.attributes["gpu.tessera.dev"].memoryLimit == "none"'
    share.ask(asked(SHARED, unlimited, memory="6Gi"))
    device = given(share).split("-shared")[0]
    whole = [Scheduling(cluster, f"whole-{number}") for number in range(4)]
    for scheduling in whole:
        scheduling.ask(asked(TRAINING))
    taken = {scheduling.given()[0].device for scheduling in whole[:3]}
    assert taken == {f"gpu-{number}" for number in range(4)} - {device}
    assert "cannot allocate all claims" in whole[3].refused()
    full = asking(cluster, "full", "79Gi")
    assert "cannot allocate all claims" in full.refused()
    forget(share, full, *whole)


@dataclass
class SharedNode:
    """A node whose pods run; its simulated driver limits memory by cgroup if the machine has cgroup v2."""

    cluster: Cluster
    plugin: PluginProcess
    teams: list[Workloads]

    @property
    def simulated(self) -> SimulatedNode:
        return SimulatedNode.attach(self.plugin.host_root)

    @property
    def has_limits(self) -> bool:
        return (self.plugin.host_root / MACHINE_CGROUPS).exists()

    def claims(self) -> list[dict[str, Any]]:
        """Those that have a part of a GPU."""
        items = self.cluster.api.get(f"{RESOURCE_GROUP}/resourceclaims")["items"]
        return [item for item in items if "consumedCapacity" in results_of(item)[0]]

    def ask(self, number: int, name: str, request: dict[str, Any]) -> None:
        """Let a pod come, with a claim, in the namespace whose turn it is."""
        team = self.teams[number % len(self.teams)]
        team.pod(name, team.claim(name, request))

    def running(self) -> None:
        """Wait until all pods run."""
        for team in self.teams:
            team.running(*team.pods)

    def limited(self) -> None:
        """Wait until each pod is limited to what its claim has of its GPU, and nothing else is."""
        if self.has_limits:
            wait_for(self.is_limited, SOON_S, "each pod has the limit of its claim")

    def is_limited(self) -> bool:
        limits, wanted = limits_in_force(self.simulated), dict[tuple[str, str], int]()
        for claim in self.claims():
            [result], [user] = results_of(claim), claim["status"]["reservedFor"]
            gpu = self.simulated.uuids[int(result["device"].split("-")[1])]
            wanted[gpu, user["uid"]] = int(result["consumedCapacity"]["memory"].removesuffix("Gi")) * GIB
        if limits != wanted:
            raise ApiError(f"limited to {limits}, claims have {wanted}")
        return True

    def reported(self) -> set[str]:
        """What holds claims to their memory, by their status."""
        entries = [entry for claim in self.claims() for entry in claim["status"].get("devices", ())]
        assert all(entry["shareID"] for entry in entries)
        return {entry["data"]["memory"]["limit"] for entry in entries}

    def end(self) -> None:
        """End all pods."""
        for team in self.teams:
            team.end_pods(*team.pods)
        for team in self.teams:
            team.delete_pods(*team.pods)


def results_of(claim: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", [{}])
    return found


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedNode]:
    described = tmp_path_factory.mktemp("node") / "h100.yaml"
    described.write_text(H100.read_text().replace("580.95.05", "615.71.09").replace('"13.0"', '"13.4"'))
    with Cluster.start(Settings(name="shared-pods"), Progress()) as running:
        install(running)
        for namespace in NAMESPACES:
            running.api.post("/api/v1/namespaces", {"metadata": {"name": namespace}})
            wait_default_account(running, namespace)
        flags = PluginFlags(gpus=f"sim:{described}", shared="all=time-slicing")
        plugin = PluginProcess(running, running.nodes[0], flags)
        plugin.start()
        teams = [Workloads(running, namespace) for namespace in NAMESPACES]
        yield SharedNode(running, plugin, teams)
        for team in teams:
            team.delete_all()
        plugin.stop()
        assert plugin.refused() == []


@pytest.fixture
def allocations(shared: SharedNode) -> Iterator[Allocations]:
    """What claims have been given since the test began."""
    found, stop = Allocations(shared.cluster, shared.plugin.flags.gpus.removeprefix("sim:")), threading.Event()
    found.start(stop)
    yield found
    stop.set()


def see_reports(shared: SharedNode) -> None:
    """Claims say what holds them to their memory, and that nothing does while the driver limits no memory."""
    if shared.has_limits:
        fault = shared.simulated.faults.fail("nvmlDeviceGetMemoryLimits_v1", code=pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        wait_for(lambda: shared.reported() == {"none"}, SOON_S, "claims that say that their limits have ended")
        shared.simulated.faults.clear(fault)
    reported = {"cgroup" if shared.has_limits else "none"}
    wait_for(lambda: shared.reported() == reported, SOON_S, "claims that say what holds them to their memory")


@pytest.mark.timeout(900)
def test_sixty_four_claims_of_four_namespaces_have_their_memory_and_no_more_through_all_restarts(
    shared: SharedNode, allocations: Allocations
) -> None:
    controller = ControllerProcess(shared.cluster)
    controller.start()
    wait_for(lambda: "Planned" in str(controller.plans()), SOON_S, "the node follows a plan")
    shared.plugin.wait_quiet()  # with Kubernetes 1.36 the plan ends the use of counters

    def restart_controller() -> None:
        controller.kill()
        controller.start()

    def restart_plugin() -> None:
        shared.plugin.kill()
        shared.plugin.start()

    restarts: list[Callable[[], object]] = [
        restart_controller,
        restart_plugin,
        shared.simulated.reload_driver,
        shared.cluster.control_plane.restart_scheduler,
    ]
    for wave, restart in enumerate(restarts):
        shared.ask(wave, f"partition-{wave}", asked(PARTITION))
        for number in range(wave * WAVE, (wave + 1) * WAVE):
            memory = SIZES[number // len(NAMESPACES) % len(SIZES)]
            shared.ask(number, f"pod-{number:02}", asked(SHARED, memory=f"{memory}Gi"))
        restart()
        shared.running()
        shared.limited()
    assert len(shared.claims()) == PODS_AT_ONCE
    see_reports(shared)
    last, *_ = shared.teams
    last.pod("last", last.claim("last", asked(SHARED, memory=f"{REST + 1}Gi")))
    wait_for(lambda: "cannot allocate all claims" in last.why_waiting("last"), SOON_S, "there is no room for it")
    for wave in range(len(restarts)):
        shared.teams[wave].delete_pods(f"partition-{wave}")
    last.running("last")
    shared.limited()
    assert allocations.overlaps == []
    assert allocations.touched == []
    assert sum(allocations.most.values()) == 3 * WHOLE + 1, "what all have, more than three GPUs have"
    assert max(allocations.most.values()) <= WHOLE
    shared.end()
    wait_for(lambda: not shared.plugin.records(), SOON_S, "no record left")
    assert not shared.plugin.cdi_specs()
    assert not limits_in_force(shared.simulated)
    controller.stop()
    assert controller.refused() == []
