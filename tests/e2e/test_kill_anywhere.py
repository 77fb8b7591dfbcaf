"""The node plugin is killed before and after each of its steps: restarted, it has lost nothing and leaked nothing."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import pytest

from kubelet_plugin.mps.protocol import SOCKET
from kubelet_plugin.step_names import NodeStep
from tests.harness.cluster import Cluster
from tests.harness.processes import STOP_GRACE_S, ProcessTable, stop
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.kill_matrix import OF_MAKE_TEST, SCENARIOS, Case, Scenario, kill, one_of_each, watch
from tests.support.kill_node import KillNode
from tests.support.killable import READY_S, zygote
from tests.support.mps import end_daemons, serving

pytestmark = [pytest.mark.cluster, pytest.mark.core, pytest.mark.timeout(900), pytest.mark.needs("shared counters")]

NODES = 3
"""Plugins that are killed side by side; each waits for the API server most of the time."""

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None

SHOWN = 5
"""Failures whose whole story is told: the first explain the rest."""

A = TypeVar("A")
R = TypeVar("R")


class Nodes:
    """Several nodes on which cases happen side by side."""

    def __init__(self, nodes: Iterable[KillNode]) -> None:
        self._idle: SimpleQueue[KillNode] = SimpleQueue()
        for node in nodes:
            self._idle.put(node)

    def each(self, work: Callable[[KillNode, A], list[R]], items: Iterable[A]) -> list[R]:
        """What ``work`` returns for all items, in their order."""
        with ThreadPoolExecutor(NODES) as pool:
            return [found for each in pool.map(partial(self._on_one, work), items) for found in each]

    def _on_one(self, work: Callable[[KillNode, A], list[R]], item: A) -> list[R]:
        node = self._idle.get()
        try:
            return work(node, item)
        finally:
            self._idle.put(node)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("kill") as running:
        install(running)
        yield running


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[Nodes]:
    root = Path(tempfile.mkdtemp(prefix="tk-", dir=MEMORY))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, root)
        mps = root / "mps"
        mps.mkdir()
        stack.callback(end_daemons, mps)
        served = ProcessTable(cluster.directory).spawn("mps", serving(mps), cluster.logs_dir / "mps.log")
        stack.callback(stop, [served], STOP_GRACE_S)
        wait_for((mps / SOCKET).exists, READY_S, "the process of the MPS daemons")
        parent = stack.enter_context(zygote(cluster, mps))
        nodes = [KillNode(cluster, parent, f"kill-{number}", root, mps) for number in range(NODES)]
        for node in nodes:
            stack.callback(node.close)
        yield Nodes(nodes)


def killed(nodes: Nodes, cases: Iterable[Case]) -> None:
    failures = nodes.each(kill, cases)
    told = "\n\n".join(failures[:SHOWN])
    assert not failures, f"{len(failures)} kills did harm, among them:\n\n{told}"


@pytest.fixture(scope="module")
def quick_cases(nodes: Nodes) -> list[Case]:
    """A kill before and one after each step, found by letting scenarios happen once unharmed."""
    return one_of_each(nodes.each(watch, OF_MAKE_TEST))


def test_every_step_is_met_by_a_scenario(quick_cases: list[Case]) -> None:
    assert {case.point.step for case in quick_cases} == set(NodeStep)


def test_a_plugin_killed_before_or_after_a_step_loses_and_leaks_nothing(nodes: Nodes, quick_cases: list[Case]) -> None:
    killed(nodes, quick_cases)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_a_plugin_killed_at_any_point_loses_and_leaks_nothing(
    nodes: Nodes, scenario: Scenario, record_property: Callable[[str, object], None]
) -> None:
    cases = nodes.each(watch, [scenario])
    record_property("said in the end", f"kill matrix: {len(cases)} kills in {scenario}")
    killed(nodes, cases)
