"""What `tessera simulate --cluster` predicts for a pod is what the real scheduler and the real controller then do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.command import run_tessera
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess
from tests.support.plugin import PluginFlags, PluginProcess, bare_node
from tests.support.scheduling import asked, matching
from tests.support.workloads import CLAIMS, PODS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SOON_S = 60.0
PLANS = "/apis/gpu.tessera.dev/v1alpha1/gpunodeplans"
EVENTS = "/api/v1/namespaces/default/events"
NODES = {"a-hopper": "sim:dgx-h100", "b-plain": "sim:l40s-8"}
HOPPER = 'device.attributes["gpu.tessera.dev"].architecture == "Hopper"'
PLAIN = 'device.attributes["gpu.tessera.dev"].productName == "NVIDIA L40S"'
Object = dict[str, Any]

ASKED: dict[str, tuple[list[Object], list[Object]]] = {
    "small": ([asked("gpu-inference-1g-10gb")], []),
    "two-sizes": ([asked("gpu-inference-1g-10gb", name="one"), asked("gpu-inference-3g-40gb", name="other")], []),
    "full": ([asked("gpu-training", HOPPER, count=3)], []),
    "clique": ([asked("gpu-training", HOPPER, count=3)], [matching("gpu.tessera.dev/nvlinkClique")]),
    "plain": ([asked("gpu-training", PLAIN, count=8)], []),
    "plain-again": ([asked("gpu-training", PLAIN)], []),
    "hopper-again": ([asked("gpu-training", HOPPER, count=2)], []),
    "large": ([asked("gpu-inference-3g-40gb", count=2)], []),
    "too-many": ([asked("gpu-training", count=9)], []),
    "no-class": ([asked("no-such-class")], []),
}
"""The requests and constraints of claims, which come one after the other."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("simulate") as running:
        install(running)
        plugins = [PluginProcess(running, bare_node(running, name), PluginFlags(gpus=g)) for name, g in NODES.items()]
        controller = ControllerProcess(running)
        controller.start()
        for plugin in plugins:
            plugin.spawn()
        for plugin in plugins:
            plugin.wait_published()
        yield running
        controller.stop()
        for plugin in plugins:
            plugin.stop()


def manifests(name: str) -> list[Object]:
    """A claim and its pod."""
    requests, constraints = ASKED[name]
    spec = {"devices": {"requests": requests, "constraints": constraints}}
    claim = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name}, "spec": spec}
    container = {"resources": {"claims": [{"name": "gpu"}]}}
    return [claim, busybox_pod(name, container=container, resourceClaims=[{"name": "gpu", "resourceClaimName": name}])]


def simulated(cluster: Cluster, objects: list[Object], *options: str) -> Object:
    """What the command prints."""
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    ran = run_tessera(cluster, "simulate", "-", "--cluster", "-o", "json", *options, stdin=text)
    found: Object = json.loads(ran.stdout)
    own = [each for each in found["placements"] if not each["pendingNow"]]
    assert ran.exit_code == (0 if all(each["node"] for each in own) else 1), ran.output
    return found


Answer = tuple[str, Any]
"""The node and the devices of a claim, or the code and the message of the reason why it is pending."""


def predicted(cluster: Cluster, name: str) -> Answer:
    """What the command says of a claim."""
    found = next(
        each
        for each in simulated(cluster, manifests(name))["placements"]
        if each["pod"] == f"default/{name}" and not each["pendingNow"]
    )
    if found["node"] is None:
        [reason] = found["reasons"]
        return reason["code"], reason["message"]
    [claim] = found["claims"]
    return found["node"], [(each["request"], each["device"]) for each in claim["devices"]]


def real(cluster: Cluster, name: str) -> Answer | None:
    """What became of it in the cluster, if anything."""
    allocation = cluster.api.get(f"{CLAIMS}/{name}").get("status", {}).get("allocation")
    if allocation is not None:
        [term] = allocation["nodeSelector"]["nodeSelectorTerms"]
        node = term["matchFields"][0]["values"][0]
        return node, [(each["request"], each["device"]) for each in allocation["devices"]["results"]]
    about = (each for each in cluster.api.get(EVENTS)["items"] if each["involvedObject"].get("name") == name)
    told = [each for each in about if each["involvedObject"]["kind"] == "ResourceClaim"]
    return (told[-1]["reason"], told[-1]["message"]) if told else None


def settled(cluster: Cluster) -> bool:
    """Whether the plans hold every allocated device and the nodes have followed them."""
    allocated = {
        f"{result['device']} default/{claim['metadata']['name']}"
        for claim in cluster.api.get(CLAIMS)["items"]
        for result in claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", ())
    }
    plans = [{"spec": {}, **each} for each in cluster.api.get(PLANS)["items"]]
    held = {each for plan in plans for each in plan["spec"].get("held", ())}
    statuses = [plan.get("status", {}) for plan in plans]
    reported = len(plans) == len(NODES) and all(status.get("mode") == "Planned" for status in statuses)
    observed = [status.get("observedGeneration") for status in statuses]
    followed = reported and observed == [plan["metadata"]["generation"] for plan in plans]
    return followed and held == allocated and any(plan["spec"].get("offers") for plan in plans)


@pytest.fixture(scope="module")
def answers(cluster: Cluster) -> dict[str, tuple[Answer, Answer]]:
    """What was predicted for each claim, and what became of it then."""
    found: dict[str, tuple[Answer, Answer]] = {}
    for name in ASKED:
        wait_for(lambda: settled(cluster), SOON_S, "plans that hold what is allocated")
        expected = predicted(cluster, name)
        claim, pod = manifests(name)
        cluster.api.post(CLAIMS, claim)
        cluster.api.post(PODS, pod)
        answer = wait_for(partial(real, cluster, name), SOON_S, f"an answer for claim {name}")
        assert answer is not None
        found[name] = (expected, answer)
    return found


def test_what_is_simulated_happens(answers: dict[str, tuple[Answer, Answer]]) -> None:
    assert {name: simulated for name, (simulated, _) in answers.items()} == {
        name: real for name, (_, real) in answers.items()
    }
    placed = {name for name, (_, (node, _)) in answers.items() if node in NODES}
    assert placed == {"small", "two-sizes", "full", "clique", "plain", "large"}


@pytest.mark.usefixtures("answers")
def test_the_end_of_a_claim_is_imagined(cluster: Cluster) -> None:
    wait_for(lambda: settled(cluster), SOON_S, "plans that hold what is allocated")
    found = simulated(cluster, [], "--without", "default/plain", "--fill", "gpu-training")
    now = {each["pod"]: each["node"] for each in found["placements"]}
    assert now["default/plain-again"] == "b-plain"
    assert found["fill"]["byProduct"] == {"NVIDIA L40S": 7}
