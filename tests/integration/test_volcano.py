"""The real Volcano scheduler on curated nodes: what it binds of its gangs, and what is said of those that wait."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from driver.kube.client import KubeClient, load_configuration
from tests.harness.cluster import Cluster
from tests.integration.kueue import curated_nodes
from tests.integration.volcano import VolcanoGangs, volcano_scheduler
from tests.support.control_plane import control_plane

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

NODES, GPUS = 3, 24


@pytest.fixture(scope="module")
def cluster(volcano_program: Path, volcano_source: Path) -> Iterator[Cluster]:
    with (
        control_plane("volcano") as running,
        curated_nodes(running, NODES),
        volcano_scheduler(running, volcano_program, volcano_source),
    ):
        yield running


@pytest.fixture
def gangs(cluster: Cluster) -> Iterator[VolcanoGangs]:
    found = VolcanoGangs(KubeClient(load_configuration(cluster.kubeconfig), "test"))
    yield found
    found.remove_all()


def test_a_gang_is_bound_whole_and_the_next_one_says_what_it_waits_for_until_it_has_room(gangs: VolcanoGangs) -> None:
    gangs.create("first", 16, min_member=16)
    gangs.wait_running("first", 16)
    gangs.create("second", 16, min_member=16)
    expected = "PodGroup second needs 16 pods with 1 device each at once; free devices are enough for 8 of them at most"
    for kind, name in (("PodGroup", "second"), ("Pod", "second-0"), ("Pod", "second-15")):
        gangs.wait_reason(kind, name, expected)
    assert (gangs.running("second"), gangs.allocated()) == (set(), 16)
    gangs.remove("first")
    gangs.wait_running("second", 16)


@pytest.mark.parametrize(
    ("pods", "min_member", "expected"),
    [
        (
            GPUS + 6,
            GPUS + 6,
            "PodGroupNeedsMore: .* needs 30 pods .* at once; even if nothing were held, there would be room for 24 of",
        ),
        (2, 4, "OfferStandsUnused: claim never-1-gpu-.*: the scheduler reports on pod never-1: .* 2 Pending, 4 minAva"),
    ],
    ids=["more than the cluster has", "pods that are missing"],
)
def test_a_gang_that_nothing_but_a_change_helps_says_so_and_holds_nothing(
    gangs: VolcanoGangs, pods: int, min_member: int, expected: str
) -> None:
    gangs.create("never", pods, min_member)
    gangs.wait_reason("Pod", "never-1", expected)
    assert (gangs.running("never"), gangs.allocated()) == (set(), 0)


def test_more_pods_than_a_gang_needs_wait_each_for_itself(gangs: VolcanoGangs) -> None:
    gangs.create("elastic", GPUS + 1, min_member=GPUS - 4)
    gangs.wait_running("elastic", GPUS)
    [waiting] = {f"elastic-{number}" for number in range(GPUS + 1)} - gangs.running("elastic")
    gangs.wait_reason("Pod", waiting, "AllHeld: ")


def test_pods_that_request_only_devices_are_placed_one_by_one(gangs: VolcanoGangs) -> None:
    """Volcano counts them as placed."""
    gangs.create("small", GPUS + 1, min_member=GPUS + 1, cpu="")
    gangs.wait_running("small", GPUS)


def test_partitions_for_a_gang_are_carved_next_to_those_of_the_default_scheduler(gangs: VolcanoGangs) -> None:
    gangs.pods("single", 10, "gpu-inference-1g-10gb")
    gangs.wait_running("single", 10)
    gangs.create("gang", 20, min_member=20, device_class="gpu-inference-1g-10gb")
    gangs.wait_running("gang", 20)
