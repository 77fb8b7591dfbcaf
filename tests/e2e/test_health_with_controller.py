"""A GPU that is cordoned or ill while a controller decides what is offered: nothing of it is, until it is back."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess, plugins
from tests.support.plugin import COMMAND_S, TESSERA, PluginFlags, PluginProcess

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

SOON_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("health") as running:
        install(running)
        yield running


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[PluginProcess]:
    with plugins(cluster, ["n1"], PluginFlags(gpus="sim:h100-1")) as [found]:
        yield found


@pytest.fixture(scope="module")
def controller(cluster: Cluster, node: PluginProcess) -> Iterator[ControllerProcess]:
    found = ControllerProcess(cluster)
    found.start()
    wait_for(lambda: mode(found) == "Planned", SOON_S, "the node follows its plan")
    yield found
    found.stop()
    assert found.refused() == []


def mode(controller: ControllerProcess) -> str:
    return str(controller.plans().get("n1", {}).get("status", {}).get("mode", ""))


def operator(cluster: Cluster, verb: str) -> str:
    command = [TESSERA, verb, "n1/gpu-0", "--kubeconfig", str(cluster.kubeconfig)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMMAND_S).stdout


def test_nothing_of_a_gpu_is_offered_while_it_is_cordoned_or_ill_and_uncordon_finds_it_all_the_same(
    cluster: Cluster, node: PluginProcess, controller: ControllerProcess
) -> None:
    wait_for(lambda: "gpu-0" in node.devices(), SOON_S, "the GPU is offered")
    operator(cluster, "cordon")
    wait_for(lambda: not node.devices(), SOON_S, "nothing of it is offered any more")
    assert len(controller.plans()["n1"]["spec"]["cordoned"]) == 1
    node.fault("xid", "48", "--gpu", "0")
    told = "the plan tells of the fault, and of what the GPU needs"
    wait_for(lambda: len(controller.plans()["n1"]["status"].get("faults", ())) == 2, SOON_S, told)
    assert "cleared: xid-48" in operator(cluster, "uncordon")
    wait_for(lambda: "gpu-0" in node.devices(), SOON_S, "the GPU is offered again")
    assert not node.devices()["gpu-0"].get("taints")
    spec = controller.plans()["n1"]["spec"]
    assert (spec["cordoned"], len(spec["cleared"])) == ([], 1)
