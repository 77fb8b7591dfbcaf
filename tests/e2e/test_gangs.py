"""Gangs (PodGroups) on a real API server and scheduler of Kubernetes 1.37 with the gate GenericWorkload.

Three nodes of 8 GPUs; of two gangs that need 16 each, one is bound whole, and nothing of the other one is allocated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from driver.kube.client import KubeClient, load_configuration
from tests.bench.placement.fleet import Mode, RunningFleet, running_fleet
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess
from tests.support.gangs import GANGS, POD_GROUPS, SERVED, gang_of, gang_with_one_claim, members
from tests.support.plugin import SLICES
from tests.support.workloads import CLAIMS, PODS

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not SERVED, reason="PodGroups of v1beta1 are served from Kubernetes 1.37 on"),
]

FULL_GPU = re.compile(r"gpu-\d+")
SOON_S, BOUND_S = 60.0, 90.0
"""The scheduler tries a gang again after 1, 2, 4, ... seconds."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("gangs", GANGS) as running:
        install(running)
        yield running


@pytest.fixture(params=["counters", "disjoint"], scope="module")
def controller(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[ControllerProcess]:
    found = ControllerProcess(cluster, f"gangs-{request.param}", ("--offer-mode", request.param))
    with running_fleet(cluster, 3, Mode.CURATED) as fleet:
        found.start()
        follow(fleet)
        yield found
        found.stop()
    assert found.refused() == []
    for node in fleet.nodes:
        cluster.api.request("DELETE", f"/api/v1/nodes/{node.name}")


def follow(fleet: RunningFleet) -> None:
    wait_for(lambda: all(node.settled for node in fleet.nodes), BOUND_S, "all nodes follow their plans")


class Gangs:
    """The gangs of one test."""

    def __init__(self, cluster: Cluster) -> None:
        self._client = KubeClient(load_configuration(cluster.kubeconfig), "test")
        self._created: dict[str, list[str]] = {}

    def create(self, name: str, pods: int, gpus_per_pod: int = 1, first: int | None = None) -> Callable[[], None]:
        """Create a gang, at first only so many of its pods. Returns the creation of the others."""
        group, claims, bodies = gang_of(name, pods, gpus_per_pod)
        self._created[name] = members(name, pods)
        self._client.create(POD_GROUPS, group)
        for claim in claims:
            self._client.create(CLAIMS, claim)
        for pod in bodies[:first]:
            self._client.create(PODS, pod)

        def rest() -> None:
            for pod in bodies[first:] if first is not None else ():
                self._client.create(PODS, pod)

        return rest

    def delete(self, name: str) -> None:
        for each in self._created.pop(name):
            self._client.delete(f"{PODS}/{each}", missing_ok=True)
            self._client.delete(f"{CLAIMS}/{each}")
        self._client.delete(f"{POD_GROUPS}/{name}")

    def delete_all(self) -> None:
        for name in list(self._created):
            self.delete(name)

    def bound(self, name: str) -> int:
        pods = self._client.get_object(PODS)["items"]
        return sum(1 for pod in pods if pod["metadata"]["name"] in self._created[name] and pod["spec"].get("nodeName"))

    def allocated(self, name: str) -> int:
        claims = self._client.get_object(CLAIMS)["items"]
        return sum(
            1
            for claim in claims
            if claim["metadata"]["name"] in self._created[name] and claim.get("status", {}).get("allocation")
        )

    def wait_message(self, about: str, expected: str) -> None:
        """Wait until one of the messages begins with ``expected``."""
        what = f"an Event on {about} that begins with: {expected}"
        wait_for(lambda: any(each.startswith(expected) for each in self.messages(about)), SOON_S, what)

    def open_gpus(self) -> int:
        """The number of GPUs that can be allocated whole."""
        slices = self._client.get_object(SLICES)["items"]
        devices = [device for each in slices for device in each["spec"].get("devices") or ()]
        return sum(1 for each in devices if FULL_GPU.fullmatch(each["name"]) and not each.get("taints"))

    def refusals(self, name: str) -> list[str]:
        """What the scheduler reported on pods of a gang that it could not place."""
        events = self._client.get_object("/api/v1/namespaces/default/events")["items"]
        return [
            each["message"]
            for each in events
            if each["involvedObject"].get("name") in self._created[name] and each.get("reason") == "FailedScheduling"
        ]

    def messages(self, about: str) -> list[str]:
        """The messages of the controller's Events about a PodGroup or a claim."""
        events = self._client.get_object("/api/v1/namespaces/default/events")["items"]
        return [each["message"] for each in events if each["involvedObject"].get("name") == about and "message" in each]


@pytest.fixture
def gangs(cluster: Cluster, controller: ControllerProcess) -> Iterator[Gangs]:
    found = Gangs(cluster)
    yield found
    found.delete_all()


def test_a_gang_is_bound_whole_and_the_next_one_says_what_it_waits_for_until_it_has_room(gangs: Gangs) -> None:
    gangs.create("first", 16)
    wait_for(lambda: gangs.bound("first") == 16, BOUND_S, "the first gang is bound")
    gangs.create("second", 16)
    expected = "PodGroup second needs 16 pods with 1 device each at once; free devices are enough for 8 of them at most"
    for about in ("second", "second-0", "second-15"):
        gangs.wait_message(about, expected)
    assert (gangs.bound("second"), gangs.allocated("second")) == (0, 0)
    gangs.delete("first")
    wait_for(lambda: gangs.bound("second") == 16, BOUND_S, "the second gang is bound")


def test_a_gang_without_room_keeps_a_single_pod_from_nothing(gangs: Gangs) -> None:
    gangs.create("large", 4, gpus_per_pod=8)
    expected = (
        "PodGroup large needs 4 pods with 8 devices each at once; even if nothing were held, there would be room for"
    )
    gangs.wait_message("large", f"{expected} 3 of them at most, on 3 nodes")
    gangs.create("single", 1, gpus_per_pod=8)
    wait_for(lambda: gangs.bound("single") == 1, BOUND_S, "the single pod is bound")
    assert gangs.allocated("large") == 0


@pytest.mark.parametrize("controller", ["counters"], indirect=True)
def test_the_offers_for_a_gang_stand_when_its_last_pod_is_created(
    gangs: Gangs,
) -> None:
    """Otherwise the scheduler would find too few of them, and try again a second or more later."""
    rest = gangs.create("early", 16, first=4)
    wait_for(lambda: gangs.open_gpus() >= 16, SOON_S, "16 GPUs are in the slices without a taint")
    rest()
    wait_for(lambda: gangs.bound("early") == 16, BOUND_S, "the gang is bound")
    assert gangs.refusals("early") == []


def test_pods_that_share_the_claim_of_their_pod_group_are_bound_to_the_node_of_its_devices(
    gangs: Gangs, cluster: Cluster
) -> None:
    group, template, pods = gang_with_one_claim("shared", 4, gpus=8)
    templates = CLAIMS.replace("resourceclaims", "resourceclaimtemplates")
    for path, body in ((POD_GROUPS, group), (templates, template), *((PODS, pod) for pod in pods)):
        cluster.api.post(path, body)
    names = members("shared", 4)
    nodes = wait_for(lambda: nodes_of(cluster, names), BOUND_S, "the pods are bound")
    assert len(nodes) == 1
    [claim] = [each for each in cluster.api.get(CLAIMS)["items"] if each["metadata"]["name"].startswith("shared-")]
    assert len(claim["status"]["allocation"]["devices"]["results"]) == 8
    for name in names:
        cluster.api.request("DELETE", f"{PODS}/{name}")
    cluster.api.request("DELETE", f"{POD_GROUPS}/shared")
    cluster.api.request("DELETE", f"{templates}/shared")
    wait_for(lambda: gangs.open_gpus() >= 1 and not cluster.api.get(CLAIMS)["items"], BOUND_S, "the claim is gone")


def nodes_of(cluster: Cluster, pods: list[str]) -> set[str]:
    """The nodes of the pods; none until all are bound."""
    found = [pod["spec"].get("nodeName") for pod in cluster.api.get(PODS)["items"] if pod["metadata"]["name"] in pods]
    return {*found} if len(found) == len(pods) and all(found) else set()
