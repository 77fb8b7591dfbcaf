"""A Deployment that any partition would serve gets small ones, on the real scheduler; `tessera simulate` says the same.

Each case comes from a number that a failure names. Two hundred of them:
``TESSERA_CASES=200 pytest tests/e2e/test_smallest_profile.py -m slow -s``
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from random import Random
from typing import Any

import msgspec
import pytest

from controller.cluster.fleet import Fleet, FleetGpu
from driver.kube.types import Claim, ClaimSpec, DeviceClass, Metadata, Node, Pod, PodResourceClaim, PodSpec
from driver.model.device import Device
from tessera.simulate.imagined_cluster import ClusterContent, ImaginedCluster
from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.support.control_plane import control_plane
from tests.support.fleets import possible
from tests.support.plugin import DRIVER
from tests.support.podgen import Case
from tests.support.twin_fleets import CURATED, TwinFleets, twin_fleets

pytestmark = [pytest.mark.cluster, pytest.mark.needs("shared counters")]

REPLICAS = 12
QUICK = 20
PATIENCE_S = 20.0
CLASSES = "/apis/resource.k8s.io/v1/deviceclasses"
ANY_PARTITION: dict[str, Any] = {
    "devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu-inference"}}]}
}
TOLERATIONS = [{"operator": "Exists"}]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Of this module: another process may use that of the session."""
    with control_plane("smallest") as running:
        yield running


@pytest.fixture(scope="module")
def fleets(cluster: Cluster) -> Iterator[TwinFleets]:
    with twin_fleets(cluster) as running:
        yield running


def deployment(number: int) -> Case:
    """The pods of a Deployment, each with a claim from one template."""
    name = f"any-{number}"
    claims = [{"name": "gpu", "resourceClaimTemplateName": name}]
    pods = [
        busybox_pod(f"{name}-{replica}", resourceClaims=claims, tolerations=TOLERATIONS) for replica in range(REPLICAS)
    ]
    for pod in pods:
        pod["metadata"]["labels"] = {"case": name}
    template = {"metadata": {"name": name}, "spec": {"spec": ANY_PARTITION}}
    return Case(name=name, claims=[], templates=[template], pods=pods)


def fleet_of(fleets: TwinFleets) -> Fleet:
    """The curated nodes with what is held before the case."""
    gpus = []
    for node in fleets.sides[CURATED].nodes.values():
        for entry in node.inventory.published():
            shares = next((device.shares for device in node.inventory.devices_on(entry.gpu) if device.shares > 1), 0)
            gpus.append(FleetGpu(node.name, entry.gpu, entry.number, entry.held, shares=shares))
    return Fleet.of(gpus)


def given_out(fleets: TwinFleets) -> list[tuple[str, str]]:
    """Node and device of each claim, in the order in which they were allocated."""
    claims = fleets.cluster.api.get(f"{fleets.sides[CURATED].devices}/resourceclaims")["items"]
    claims.sort(key=lambda claim: int(claim["metadata"]["resourceVersion"]))
    results = [claim["status"]["allocation"]["devices"]["results"][0] for claim in claims if "status" in claim]
    return [(result["pool"].removesuffix(f"-{DRIVER}"), result["device"]) for result in results]


def too_large(fleet: Fleet, devices: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Devices that were given out though a smaller partition was free on the same node at that time."""
    for node, name in devices:
        gpu = next(entry for entry in fleet.nodes[node] if entry.device_named(name) is not None)
        device = gpu.device_named(name)
        assert device is not None
        smaller = [free for entry in fleet.nodes[node] for free in possible(entry) if memory(free) < memory(device)]
        if smaller:
            yield f"{name} on {node}, where {smaller[0]} was free"
        fleet = fleet.changed([gpu.holding((*gpu.held, device))])


def memory(device: Device) -> float:
    """In bytes; of what the class does not select, infinite."""
    return device.profile.memory_bytes if device.profile is not None else float("inf")


def promised(cluster: Cluster, fleet: Fleet) -> list[tuple[str, str]]:
    """Node and device of each pod, as `tessera simulate` says."""
    classes = [msgspec.convert(item, DeviceClass) for item in cluster.api.get(CLASSES)["items"]]
    nodes = tuple(Node(Metadata(name, labels={"kubernetes.io/hostname": name})) for name in fleet.nodes)
    content = ClusterContent(fleet, nodes, {device_class.metadata.name: device_class for device_class in classes})
    imagined = ImaginedCluster(DRIVER, content)
    spec, devices = msgspec.convert(ANY_PARTITION, ClaimSpec), []
    for number in range(REPLICAS):
        metadata = Metadata(f"any-{number}", "default")
        imagined.add(Claim(metadata, spec))
        pod = Pod(metadata, PodSpec(resource_claims=(PodResourceClaim("gpu", metadata.name),)))
        for _, allocation in imagined.place(pod).allocations:
            [result] = allocation.devices.results
            devices.append((result.pool.removesuffix(f"-{DRIVER}"), result.device))
        imagined.settle()
    return devices


def check(fleets: TwinFleets, number: int) -> Mapping[str, int]:
    """Run one case; returns how many pods got each profile."""
    fleets.occupy(Random(number))
    fleets.wait_settled()
    fleet, side = fleet_of(fleets), fleets.sides[CURATED]
    expected = promised(fleets.cluster, fleet)
    outcome = fleets.run_curated(
        deployment(number), lambda seen: len(seen.bound) >= min(REPLICAS, len(expected)), PATIENCE_S
    )
    devices = given_out(fleets)
    fleets.forget(side)
    assert len(outcome.bound) == len(expected), f"case {number}: `simulate` placed {len(expected)}, {outcome}"
    assert not [*too_large(fleet, devices)], f"case {number}"
    assert not [*too_large(fleet, expected)], f"case {number}, `simulate`"
    return Counter(name.split("-")[3] for _, name in devices)


@pytest.mark.timeout(600)
def test_every_replica_gets_the_smallest_partition_of_its_node(fleets: TwinFleets) -> None:
    profiles = sum((Counter(check(fleets, number)) for number in range(QUICK)), Counter())
    assert profiles.total() > QUICK * REPLICAS / 2, profiles


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_so_it_is_in_many_fleets(fleets: TwinFleets) -> None:
    numbers = range(int(os.environ.get("TESSERA_CASES", "200")))
    print(sum((Counter(check(fleets, number)) for number in numbers), Counter()))
