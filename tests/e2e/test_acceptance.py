"""The acceptance test of a GPU in a cluster: pods keep away from it meanwhile, and a killed plugin leaves nothing."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from driver.simulator.description import load_description
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess, plugins
from tests.support.plugin import TESSERA, PluginFlags, PluginProcess
from tests.support.scheduling import Scheduling, asked

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

SETTLED_S = 120.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("acceptance") as running:
        install(running)
        yield running


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[PluginProcess]:
    """A node with one H100, and a controller."""
    with plugins(cluster, ["n1"], PluginFlags(gpus="sim:h100-1")) as [plugin]:
        controller = ControllerProcess(cluster)
        controller.start()
        yield plugin
        controller.stop()
        assert controller.refused() == []
        assert plugin.refused() == []


def accept(node: PluginProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [TESSERA, "acceptance", "--kubelet-dir", str(node.node.kubelet_dir), "-o", "json", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def is_cordoned(node: PluginProcess) -> bool:
    return "tessera acceptance tests it" in json.dumps(
        node.cluster.api.get("/apis/gpu.tessera.dev/v1alpha1/gpunodeplans")
    )


def test_a_gpu_that_a_claim_holds_is_not_tested(cluster: Cluster, node: PluginProcess) -> None:
    holder = Scheduling(cluster, "holder")
    holder.ask(asked("gpu-training"))
    assert holder.given()[0].device == "gpu-0"
    wait_for(
        lambda: '"gpu-0 ' in json.dumps(cluster.api.get("/apis/gpu.tessera.dev/v1alpha1/gpunodeplans")),
        SETTLED_S,
        "the plan names the holder",
    )
    answer = accept(node, "gpu-0", "--yes")
    holder.forget()
    assert answer.returncode == 1
    assert "claims hold gpu-0" in json.loads(answer.stdout)[-1]["detail"]
    assert node.partitions() == []


def test_pods_wait_for_the_end_of_the_test_and_a_killed_plugin_leaves_nothing(
    cluster: Cluster, node: PluginProcess, tmp_path: Path
) -> None:
    capture, pod = tmp_path / "node.yaml", Scheduling(cluster, "waiting")
    with ThreadPoolExecutor(1) as pool:
        test = pool.submit(accept, node, "gpu-0", "--yes", "--kill-plugin", "--capture", str(capture))
        wait_for(lambda: is_cordoned(node), SETTLED_S, "the cordon in the plan's status")
        pod.ask(asked("gpu-training"))
        assert pod.refused()
        wait_for(lambda: not node.running, SETTLED_S, "the plugin kills itself")
        assert len(node.partitions()) == 1
        node.spawn()
        answer = test.result()
    assert answer.returncode == 0, answer.stdout + answer.stderr
    steps = {step["step"]: step for step in json.loads(answer.stdout)}
    assert {steps.pop(step)["state"] for step in ("memory-limit", "mps")} == {"Skipped"}, (
        "driver 580; nothing is shared"
    )
    assert {step["state"] for step in steps.values()} == {"Passed"}
    assert "the next process has removed the partition" in steps["killed-plugin"]["detail"]
    assert node.nothing_left()
    assert pod.given()[0].device == "gpu-0"
    pod.forget()
    assert load_description(str(capture)).product == "NVIDIA H100 80GB HBM3"
