"""GPUs that claims share by memory, on the real scheduler and kubelet: nobody gets more than there is or he asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml
import pytest

from driver.hardware.cgroups.pod_cgroups import PodCgroups
from driver.hardware.host_paths import HostPaths
from driver.model.shared_memory import GIB
from driver.simulator.node import SimulatedNode
from driver.simulator.tree import MACHINE_CGROUPS
from tests.e2e.conftest import skip_without
from tests.harness.cluster import Cluster
from tests.harness.progress import Progress
from tests.harness.settings import Settings
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess, plugins
from tests.support.plugin import PluginFlags, PluginProcess
from tests.support.scheduling import Scheduling, asked, forget
from tests.support.workloads import CLAIMS, PODS, Workloads

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

SHARED, TRAINING = "gpu-shared", "gpu-training"
WHOLE = 79
"""GiB of a simulated H100 that claims can have."""

H100 = Path(__file__).parents[2] / "driver/simulator/data/nodes/h100-pcie-4.yaml"
"""Of a driver that limits no memory."""

SIZES = (1, 2, 3, 6, 10, 20)
PODS_AT_ONCE = 24
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
        reason = wait_for(lambda: told(cluster, "too-large"), SOON_S, "the reason on the claim")
        assert "no shared GPU has so much; the largest has 79 GiB for claims (NVIDIA H100 PCIe)" in reason
    forget(*in_turn, large)
    if with_controller:
        controller.stop()
        assert controller.refused() == []


def told(cluster: Cluster, name: str) -> str:
    events = cluster.api.get("/api/v1/namespaces/default/events")["items"]
    about = [event for event in events if event["involvedObject"].get("name") == name]
    return " ".join(
        event["message"] for event in about if event.get("source", {}).get("component") == "tessera-controller"
    )


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
    workloads: Workloads

    @property
    def simulated(self) -> SimulatedNode:
        node = SimulatedNode.attach(self.plugin.host_root)
        node.nvml.nvmlInit()
        return node

    def claims(self) -> list[dict[str, Any]]:
        return [item for item in self.cluster.api.get(CLAIMS)["items"] if item.get("status", {}).get("allocation")]

    def memory_by_gpu(self) -> Counter[str]:
        """GiB that claims have of each shared device."""
        totals: Counter[str] = Counter()
        for claim in self.claims():
            for result in claim["status"]["allocation"]["devices"]["results"]:
                totals[result["device"]] += int(result["consumedCapacity"]["memory"].removesuffix("Gi"))
        return totals

    def reported(self) -> set[str]:
        """What holds claims to their memory, by their status."""
        entries = [entry for claim in self.claims() for entry in claim["status"].get("devices", ())]
        assert all(entry["shareID"] for entry in entries)
        return {entry["data"]["memory"]["limit"] for entry in entries}

    def limits(self) -> dict[str, int]:
        """GiB to which each pod is limited, by its name."""
        node, paths = self.simulated, HostPaths(self.plugin.host_root, self.plugin.host_root)
        cgroups, found = PodCgroups(paths), {}
        for pod in self.cluster.api.get(PODS)["items"]:
            cgroup = cgroups.find(pod["metadata"]["uid"])
            for index in range(4) if cgroup is not None else ():
                limits = pynvml.c_nvmlGetMemoryLimits_v1_t()
                limits.nameSpace = str(cgroup).encode()
                node.nvml.nvmlDeviceGetMemoryLimits_v1(node.nvml.nvmlDeviceGetHandleByIndex(index), limits)
                if limits.hardLimit != pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX:
                    found[pod["metadata"]["name"]] = limits.hardLimit // GIB
        return found


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedNode]:
    described = tmp_path_factory.mktemp("node") / "h100.yaml"
    described.write_text(H100.read_text().replace("580.95.05", "615.71.09").replace('"13.0"', '"13.4"'))
    with Cluster.start(Settings(name="shared-pods"), Progress()) as running:
        install(running)
        flags = PluginFlags(gpus=f"sim:{described}", shared="all=time-slicing")
        plugin = PluginProcess(running, running.nodes[0], flags)
        plugin.start()
        workloads = Workloads(running)
        yield SharedNode(running, plugin, workloads)
        workloads.delete_all()
        plugin.stop()
        assert plugin.refused() == []


def test_many_pods_share_gpus_and_each_is_held_to_its_memory(shared: SharedNode) -> None:
    controller = ControllerProcess(shared.cluster)
    controller.start()
    wanted = {f"pod-{number:02}": SIZES[number % len(SIZES)] for number in range(PODS_AT_ONCE)}
    for name, gib in wanted.items():
        shared.workloads.pod(name, shared.workloads.claim(name, asked(SHARED, memory=f"{gib}Gi")))
    shared.workloads.running(*wanted)
    assert sum(shared.memory_by_gpu().values()) == sum(wanted.values())
    assert max(shared.memory_by_gpu().values()) <= WHOLE
    assert len(shared.memory_by_gpu()) == 3, "a GPU is filled before another is opened"
    has_limits = (shared.plugin.host_root / MACHINE_CGROUPS).exists()
    if has_limits:
        assert shared.limits() == wanted
    shared.plugin.kill()
    shared.plugin.start()
    controller.kill()
    controller.start()
    if has_limits:
        shared.simulated.reload_driver()
        wait_for(lambda: shared.limits() == wanted, SOON_S, "lost limits set again")
        fault = shared.simulated.faults.fail("nvmlDeviceGetMemoryLimits_v1", code=pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        wait_for(lambda: shared.reported() == {"none"}, SOON_S, "claims that say that their limits have ended")
        shared.simulated.faults.clear(fault)
    reported = {"cgroup" if has_limits else "none"}
    wait_for(lambda: shared.reported() == reported, SOON_S, "claims that say what holds them to their memory")
    shared.workloads.delete_pods(*wanted)
    wait_for(lambda: not list((shared.plugin.state_dir / "claims").iterdir()), SOON_S, "no record left")
    assert not list(Path(shared.plugin.node.cdi_dir).glob("*claim_*"))
    controller.stop()
    assert controller.refused() == []
