"""The controller on a real API server and scheduler: what it leaves to choose from, and what its end changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess, plugins
from tests.support.plugin import PluginFlags, PluginProcess
from tests.support.scheduling import Scheduling, asked

pytestmark = [pytest.mark.cluster, pytest.mark.core, pytest.mark.timeout(300), pytest.mark.needs("shared counters")]

SMALL, TRAINING = "gpu-inference-1g-10gb", "gpu-training"
EVERYTHING = 208
"""Devices that a DGX H100 offers when nothing is held."""

DEFAULT_OFFERS = 4
"""Two full GPUs and two of the smallest profile: no claim asks for a larger one."""

SOON_S = 60.0
COUNTERS = ("--offer-mode", "counters")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("controller") as running:
        install(running)
        yield running


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[list[PluginProcess]]:
    """Two, each of which offers whatever fits while there is no controller."""
    with plugins(cluster, ["n1", "n2"], PluginFlags()) as found:
        wait_for(lambda: devices(found) == len(found) * EVERYTHING, SOON_S, "everything offered without a controller")
        yield found


@pytest.fixture
def controller(cluster: Cluster, nodes: list[PluginProcess]) -> Iterator[ControllerProcess]:
    """Leading, and everything superfluous taken back."""
    found = ControllerProcess(cluster, flags=COUNTERS)
    found.start()
    wait_for(lambda: devices(nodes) == DEFAULT_OFFERS, SOON_S, "two offers of each default kind")
    yield found
    found.stop()
    assert found.refused() == []


def devices(nodes: list[PluginProcess]) -> int:
    """How many devices the scheduler has to look at."""
    return sum(len(node.devices()) for node in nodes)


def offered(nodes: list[PluginProcess]) -> Counter[str]:
    """Published devices by profile, full GPUs as ``none``."""
    return Counter(d["attributes"]["profile"]["string"] for node in nodes for d in node.devices().values())


def told(controller: ControllerProcess) -> int:
    """How many offers the nodes say they have."""
    return sum(plan.get("status", {}).get("summary", {}).get("offered", 0) for plan in controller.plans().values())


def full_gpus_asked_for(controller: ControllerProcess) -> int:
    return sum(
        offer.endswith("/full") for plan in controller.plans().values() for offer in plan["spec"].get("offers", ())
    )


def test_with_a_controller_two_of_each_default_kind_are_offered_and_plans_are_readable(
    cluster: Cluster, nodes: list[PluginProcess], controller: ControllerProcess
) -> None:
    wait_for(lambda: set(offered(nodes).values()) == {2}, SOON_S, "two of each kind")
    assert wait_for(lambda: told(controller) == DEFAULT_OFFERS, SOON_S, "the plans' summaries")
    table = cluster.kubectl("get", "gpunodeplans").splitlines()
    assert table[0].split() == ["NAME", "MODE", "GPUS", "HELD", "OFFERED", "DEDICATED", "PAUSED", "AGE"]
    assert [line.split()[1] for line in table[1:]] == ["Planned", "Planned"]


def test_small_partitions_gather_on_one_gpu_and_new_offers_follow(
    cluster: Cluster, nodes: list[PluginProcess], controller: ControllerProcess
) -> None:
    asking = [Scheduling(cluster, f"small-{index}") for index in range(7)]
    for each in asking:
        each.ask(asked(SMALL))
    given = [each.given()[0] for each in asking]
    assert len({(device.pool, device.device.split("-mig-")[0]) for device in given}) == 1
    wait_for(lambda: full_gpus_asked_for(controller) == 2, SOON_S, "two full GPUs to be offered beside them")
    for each in asking:
        each.forget()
    wait_for(lambda: devices(nodes) == DEFAULT_OFFERS, SOON_S, "two offers of each default kind again")


def test_a_burst_is_served_whatever_k_is(
    cluster: Cluster, nodes: list[PluginProcess], controller: ControllerProcess
) -> None:
    asking = [Scheduling(cluster, f"burst-{index}") for index in range(20)]
    for each in asking:
        each.ask(asked(SMALL if each.name[-1] in "02468" else TRAINING))
    served = [each for each in asking if each.name[-1] in "02468"]
    assert all(each.given() for each in served)
    full = [each for each in asking if each not in served]
    assert all(each.given() for each in full)
    for each in asking:
        each.forget()
    wait_for(lambda: devices(nodes) == DEFAULT_OFFERS, SOON_S, "two offers of each default kind again")


def test_a_claim_that_nothing_can_satisfy_is_told_why(cluster: Cluster, controller: ControllerProcess) -> None:
    asking = Scheduling(cluster, "impossible")
    asking.ask(asked("gpu-inference-7g-141gb"))
    assert "cannot allocate all claims" in asking.refused()

    def told() -> str:
        events = cluster.api.get("/api/v1/namespaces/default/events")["items"]
        about = [event for event in events if event["involvedObject"].get("name") == "impossible"]
        return next(
            (event["message"] for event in about if event["source"].get("component") == "tessera-controller"), ""
        )

    assert "7g.141gb" in wait_for(told, SOON_S, "an Event on the claim")
    asking.forget()


def dedicate(cluster: Cluster, node: str, uses: dict[int, str | None]) -> None:
    """Label GPUs with their uses; None takes the label away."""
    labels = {f"gpu-{number}.gpu.tessera.dev/dedicated-to": use for number, use in uses.items()}
    cluster.api.patch(f"/api/v1/nodes/{node}", {"metadata": {"labels": labels}})


def test_a_gpu_that_a_label_dedicates_is_offered_for_that_use_alone(
    cluster: Cluster, nodes: list[PluginProcess], controller: ControllerProcess
) -> None:
    training: dict[int, str | None] = dict.fromkeys(range(8), "training")
    dedicate(cluster, "n1", {**training, 7: "inference"})
    dedicate(cluster, "n2", training)

    def uses(node: str) -> list[str]:
        return [each.rpartition("=")[2] for each in controller.plans()[node]["spec"].get("dedicatedGPUs", ())]

    wait_for(lambda: uses("n1") == ["training"] * 7 + ["inference"], SOON_S, "the uses in the plan, by number of GPU")

    def partitioned() -> set[tuple[int, str]]:
        """The GPUs of which partitions are published: which node, and what names begin with."""
        names = ((at, name.split("-mig-")) for at, node in enumerate(nodes) for name in node.devices())
        return {(at, parts[0]) for at, parts in names if len(parts) > 1}

    wait_for(lambda: partitioned() == {(0, "gpu-7")}, SOON_S, "partitions of the one GPU for inference alone")
    for node in ("n1", "n2"):
        dedicate(cluster, node, dict.fromkeys(range(8)))
    wait_for(lambda: devices(nodes) == DEFAULT_OFFERS, SOON_S, "two offers of each default kind again")


def test_a_label_that_can_not_be_followed_is_answered_on_its_node(
    cluster: Cluster, nodes: list[PluginProcess], controller: ControllerProcess
) -> None:
    dedicate(cluster, "n2", {3: "traning", 8: "dev"})

    def told() -> str:
        events = cluster.api.get("/api/v1/namespaces/default/events")["items"]
        about = [event for event in events if event["involvedObject"].get("name") == "n2"]
        return next((event["message"] for event in about if event["reason"] == "LabelIgnored"), "")

    message = wait_for(told, SOON_S, "an Event on the node")
    assert "did you mean training?" in message
    assert "the node has no GPU 8" in message
    assert "LabelIgnored" in cluster.kubectl("describe", "node", "n2")
    assert devices(nodes) == DEFAULT_OFFERS
    dedicate(cluster, "n2", {3: None, 8: None})


def test_a_killed_controller_changes_nothing_and_the_next_goes_on(
    cluster: Cluster, nodes: list[PluginProcess], controller: ControllerProcess
) -> None:
    before = [node.devices().keys() for node in nodes]
    holder = Scheduling(cluster, "holder")
    holder.ask(asked(SMALL))
    [held] = holder.given()
    controller.kill()
    assert any(held.device in node.devices() for node in nodes)
    follower = ControllerProcess(cluster, "second", COUNTERS)
    follower.start()
    late = Scheduling(cluster, "late")
    late.ask(asked(SMALL))
    assert late.given()
    for each in (holder, late):
        each.forget()
    wait_for(lambda: devices(nodes) == DEFAULT_OFFERS, 60, "two offers of each kind, by the next leader")
    assert len(before) == 2
    follower.stop()
