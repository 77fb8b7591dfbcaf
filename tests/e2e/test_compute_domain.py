"""NVIDIA's compute-domain plugin on the nodes of Tessera: a pod of a multi-node job has a claim of each."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pynvml
import pytest

from driver.config.flag_values import NVIDIA_DRIVER
from driver.simulator.description import load_description
from driver.simulator.node import SimulatedNode
from driver.simulator.state.latency import ZERO_LATENCY
from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import plugins
from tests.support.other_drivers import CHANNEL, COMPUTE_DOMAINS, channel_class, channel_slice, clique_of_domain
from tests.support.plugin import DRIVER, SLICES, PluginFlags, PluginProcess
from tests.support.workloads import CLAIMS, PODS, request

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

TRAY = Path(__file__).parents[2] / "driver" / "simulator" / "data" / "nodes" / "gb200-nvl72-tray.yaml"
FIRST, SECOND = "5f3c9d2e-7a41-4b8e-9c60-1d2e3f4a5b6c", "0b7e1c55-3f0d-4a57-8a53-6c1f6f1f0a02"
NODES = {"rack-a-1": FIRST, "rack-a-2": FIRST, "rack-b-1": SECOND}
GPUS = {f"gpu-{number}" for number in range(4)}
SOON_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("domains") as running:
        install(running)
        running.apply(channel_class())
        yield running


@pytest.fixture(scope="module")
def trays(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, PluginProcess]]:
    """Trays of two racks, each with a compute-domain plugin that the kubelet has registered."""
    folder, processes = tmp_path_factory.mktemp("racks"), {}
    with ExitStack() as stack:
        for node, rack in NODES.items():
            registry = cluster.directory / node / "kubelet" / "plugins_registry"
            registry.mkdir(parents=True, exist_ok=True)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(registry / f"{COMPUTE_DOMAINS}-reg.sock"))
            listener.listen()
            description = folder / f"{rack}.yaml"
            description.write_text(TRAY.read_text().replace(FIRST, rack))
            flags = PluginFlags(gpus=f"sim:{description}")
            [processes[node]] = stack.enter_context(plugins(cluster, [node], flags))
            cluster.api.post(SLICES, channel_slice(node))
        yield processes


def pod_of_job(cluster: Cluster, name: str, clique: str) -> None:
    """A pod with four GPUs of that clique, and the channel of its domain."""
    gpus = request("gpu-training", selector=f'device.attributes["{DRIVER}"].fabricClique == "{clique}"')
    gpus["exactly"]["count"] = 4
    for claim, part in ((f"{name}-gpus", gpus), (f"{name}-channel", request(CHANNEL, name="channel"))):
        cluster.api.post(CLAIMS, {"metadata": {"name": claim}, "spec": {"devices": {"requests": [part]}}})
    claims = [{"name": part, "resourceClaimName": f"{name}-{part}"} for part in ("gpus", "channel")]
    container = {"resources": {"claims": [{"name": part} for part in ("gpus", "channel")]}}
    cluster.api.post(PODS, busybox_pod(name, container=container, resourceClaims=claims))


def results(cluster: Cluster, claim: str) -> list[dict[str, Any]]:
    status = cluster.api.get(f"{CLAIMS}/{claim}").get("status", {})
    found: list[dict[str, Any]] = status.get("allocation", {}).get("devices", {}).get("results", [])
    return found


def published(cluster: Cluster, node: str) -> set[str]:
    """The devices of Tessera on a node."""
    slices = [item["spec"] for item in cluster.api.get(SLICES)["items"] if item["spec"]["driver"] == DRIVER]
    of_node = [spec for spec in slices if spec["nodeName"] == node]
    return {device["name"] for spec in of_node for device in spec.get("devices") or ()}


def test_the_plugin_of_compute_domains_is_no_driver_of_gpus(cluster: Cluster, trays: dict[str, PluginProcess]) -> None:
    for node, tray in trays.items():
        wait_for(lambda node=node: published(cluster, node) >= GPUS, SOON_S, "all are offered")  # type: ignore[misc]
        assert "found another GPU driver" not in tray.log.read_text()


def test_gpus_and_channel_of_a_pod_are_of_one_node_and_their_cliques_agree(
    cluster: Cluster, trays: dict[str, PluginProcess], tmp_path: Path
) -> None:
    nvml = SimulatedNode.open(load_description("gb200-nvl72-tray"), tmp_path, latency=ZERO_LATENCY).nvml
    nvml.nvmlInit()
    info = pynvml.c_nvmlGpuFabricInfo_v2_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(nvml.nvmlDeviceGetHandleByIndex(0), ctypes.byref(info))
    clique = clique_of_domain(info)
    for index in range(2):
        pod_of_job(cluster, f"rank-{index}", clique)
    nodes = set()
    for index in range(2):
        gpus = wait_for(lambda index=index: results(cluster, f"rank-{index}-gpus"), SOON_S, "GPUs")  # type: ignore[misc]
        [channel] = results(cluster, f"rank-{index}-channel")
        assert (channel["driver"], channel["device"]) == (COMPUTE_DOMAINS, "channel-0")
        assert {result["pool"] for result in gpus} == {f"{channel['pool']}-{DRIVER}"}
        nodes.add(channel["pool"])
    assert nodes == {"rack-a-1", "rack-a-2"}
    assert NVIDIA_DRIVER not in {item["spec"]["driver"] for item in cluster.api.get(SLICES)["items"]}
