"""54 workloads on 10 GPUs of two real nodes, as `make demo-54` tells it: run once, looked at from several sides."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.demo import nodes, pods
from tests.demo.picture import draw
from tests.demo.promises import Group, Workload, broken, broken_time_slices
from tests.demo.resets import SETTLED_S
from tests.harness.cluster import Cluster
from tests.harness.progress import Progress
from tests.harness.settings import Settings
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.plugin import PluginProcess
from tests.support.workloads import Workloads

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

TRAIN = Group("more-train", "gpu-training", "gpu", 1)
ONE_TOO_MANY: dict[tuple[Group, ...], tuple[Group, ...]] = {
    pods.EVERYBODY: (TRAIN, Group("more-note", "gpu-dev", "share", 1)),
    pods.BY_MEMORY: (TRAIN, Group("more-note", "gpu-shared", "shared", 1, gib=24)),
}
"""24 GiB: two of the three GPUs have 11 notebooks of 7 GiB then, the third has 8 of them and 23 GiB left."""


@dataclass(frozen=True)
class Story:
    """What was there before the pods, while all of them ran, and after they went."""

    groups: tuple[Group, ...]
    offered_before: frozenset[tuple[str, str]]
    workloads: list[Workload]
    time_slices: dict[tuple[str, int], str]
    picture: str
    why_waiting: dict[str, str]
    left_behind: list[str]
    offered_after: frozenset[tuple[str, str]]


@pytest.fixture(scope="module", params=[pods.EVERYBODY, pods.BY_MEMORY], ids=["shares", "memory"])
def groups(request: pytest.FixtureRequest) -> tuple[Group, ...]:
    """The pods, whose notebooks ask for a share of a GPU or for memory."""
    found: tuple[Group, ...] = request.param
    return found


@pytest.fixture(scope="module")
def cluster(groups: tuple[Group, ...]) -> Iterator[Cluster]:
    """Two real nodes, with Tessera's classes and RBAC."""
    binaries = os.environ.get("TESSERA_BINARIES")
    settings = Settings(name="e2e-54", nodes=len(nodes.PLANS), binaries=Path(binaries) if binaries else None)
    with Cluster.start(settings, Progress()) as running:
        install(running)
        yield running


@pytest.fixture(scope="module")
def story(cluster: Cluster, groups: tuple[Group, ...]) -> Story:
    """The whole scenario, from plugins that start to pods that are gone."""
    plans = nodes.PLANS_BY_MEMORY if groups is pods.BY_MEMORY else nodes.PLANS
    plugins = nodes.node_plugins(cluster, plans, sim_latency="zero")
    nodes.start(plugins)
    nodes.reset_for_mig(plugins, plans)
    before = nodes.offers(plugins)
    pods.create(cluster, groups)
    pods.wait_running(cluster, 54)
    workloads = pods.look(cluster, plugins, groups)
    intervals = nodes.time_slices(plugins)
    picture = draw(nodes.slices(plugins), pods.held(cluster, plugins))
    reasons = _one_too_many(cluster, ONE_TOO_MANY[groups])
    pods.delete(cluster)
    left = nodes.left_behind(plugins)
    return Story(groups, before, workloads, intervals, picture, reasons, left, _offered_again(plugins, before))


def _one_too_many(cluster: Cluster, more: tuple[Group, ...]) -> dict[str, str]:
    """Why one more training and one more notebook wait, by pod."""
    pods.create(cluster, more)
    look = Workloads(cluster)
    names = [pod for group in more for pod in group.pods]

    def reasons() -> dict[str, str]:
        found = {pod: look.why_waiting(pod) for pod in names}
        return found if all(found.values()) else {}

    return wait_for(reasons, 60, f"why {names} wait")


def _offered_again(plugins: list[PluginProcess], before: frozenset[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    wait_for(lambda: nodes.offers(plugins) >= before, SETTLED_S, "everything is offered again")
    return nodes.offers(plugins)


def test_54_pods_run_at_once_on_ten_gpus_of_two_nodes(story: Story) -> None:
    kinds = Counter(each.group.device_class for each in story.workloads)
    assert kinds == {"gpu-training": 4, "gpu-inference-1g-10gb": 20, story.groups[2].device_class: 30}
    gpus = {(each.holding.device.node, each.holding.device.gpu) for each in story.workloads}
    assert gpus == {(node, number) for node in ("node-0", "node-1") for number in range(5)}


def test_each_container_sees_what_it_was_promised_and_nothing_of_others(story: Story) -> None:
    assert broken(story.workloads) == []


def test_only_the_gpus_of_notebooks_have_the_time_slice_that_notebooks_ask_for(story: Story) -> None:
    assert broken_time_slices(story.workloads, story.time_slices) == []
    short = 3 if story.groups is pods.EVERYBODY else 0
    assert Counter(story.time_slices.values()) == Counter({"Short": short, "Default": 10 - short})


def test_the_picture_names_every_pod_once(story: Story) -> None:
    assert {each.holding.pod: story.picture.count(each.holding.pod) for each in story.workloads} == {
        each.holding.pod: 1 for each in story.workloads
    }


def test_one_more_training_waits_although_a_partition_is_free_and_one_more_notebook_waits(story: Story) -> None:
    assert len(story.why_waiting) == 2
    assert all("cannot allocate all claims" in reason for reason in story.why_waiting.values())


def test_when_the_pods_go_everything_is_back(story: Story) -> None:
    assert story.left_behind == []
    assert story.offered_after == story.offered_before
