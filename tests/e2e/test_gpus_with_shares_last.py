"""GPUs that are divided into shares are left for shares as long as another serves, on the real scheduler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess, plugins
from tests.support.plugin import PluginFlags, PluginProcess
from tests.support.scheduling import Scheduling, asked, forget

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300), pytest.mark.needs("shared counters")]

SMALL, TRAINING, DEV = "gpu-inference-1g-10gb", "gpu-training", "gpu-dev"
SETTLED_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("shares-last") as running:
        install(running)
        yield running


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[PluginProcess]:
    """Four H100, of which the first and the last are divided into six shares each."""
    with plugins(cluster, ["n1"], PluginFlags(gpus="sim:h100-pcie-4", shares="0=6,3=6")) as [found]:
        yield found


def full_gpus(node: PluginProcess) -> set[str]:
    return {name for name, device in node.devices().items() if device["attributes"]["type"]["string"] == "gpu"}


def given_in_turn(cluster: Cluster) -> list[str]:
    """The devices that a partition, a full GPU, a share and another full GPU got, one asked for after the other."""
    wanted = [("partition", SMALL), ("first", TRAINING), ("notebook", DEV), ("second", TRAINING)]
    asking = [(Scheduling(cluster, name), device_class) for name, device_class in wanted]
    given = []
    for each, device_class in asking:
        each.ask(asked(device_class))
        given.append(each.given()[0].device)
    forget(*(each for each, _ in asking))
    return given


def assert_shares_last(given: list[str]) -> None:
    partition, first, notebook, second = given
    assert {first, partition.partition("-mig-")[0]} == {"gpu-1", "gpu-2"}
    assert {second, notebook.partition("-share-")[0]} == {"gpu-0", "gpu-3"}


def test_full_gpus_and_partitions_come_from_gpus_without_shares_while_there_are_any(
    cluster: Cluster, node: PluginProcess
) -> None:
    # In this order and in one test: a node goes on with a stopped controller's plan for up to 90 seconds.
    assert_shares_last(given_in_turn(cluster))
    controller = ControllerProcess(cluster, flags=("--offer-mode", "counters"))
    controller.start()
    wait_for(lambda: full_gpus(node) == {"gpu-1", "gpu-2"}, SETTLED_S, "only full GPUs that have no shares offered")
    assert_shares_last(given_in_turn(cluster))
    controller.stop()
    assert controller.refused() == []
