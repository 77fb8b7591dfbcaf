"""A controller that is killed at any step of a preemption, and two leaders at once: the waiting pod is served, no pod
is evicted twice, no second set of pods is, and no reservation outlasts its deadline."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from driver.errors import NOT_FOUND, accepted_status
from tests.harness.waiting import wait_for
from tests.support.contested_node import (
    FULL,
    INTERVAL_S,
    POLICIES,
    POLICY,
    SERVING,
    SOON_S,
    TEAM,
    TWO,
    ContestedNode,
    contested_node,
)
from tests.support.faults import Circumstances, FaultyController, Point
from tests.support.field import CONFIG_MAP, take_lease

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

GPUS, RIVALS = 4, 2
DEADLINE_S = 2 * SOON_S
"""Longest time of a reservation, instead of 300 s: what an earlier leader has left does not last so long."""

RESERVED, EVICTED = Point("fence", "after"), Point("evict", "after")
KILLS = {
    "before the reservation": ([Point("fence", "before")], False, 0),
    "after the reservation is written": ([RESERVED], True, 0),
    "after the reservation is in force": ([RESERVED, Point("probe", "after")], True, 0),
    "after the first eviction is recorded": ([Point("record", "after")], True, 0),
    "between the two evictions": ([EVICTED], True, 1),
    "after the second eviction is recorded": ([EVICTED, Point("record", "after")], True, 1),
    "after the last eviction": ([EVICTED, EVICTED], True, 2),
    "while the pods end": ([EVICTED, EVICTED, Point("lift", "before")], True, 2),
}
"""Where the controller is killed, whether devices are reserved then, and how many pods have been evicted."""


@pytest.fixture(scope="module")
def node() -> Iterator[ContestedNode]:
    with contested_node("preempt-kills", "sim:h100-pcie-4") as running:
        running.api.post(POLICIES, POLICY)
        yield running


class Contest:
    """Two ReplicaSets hold all GPUs; a pod that needs two of them waits. Controllers come one after the other."""

    def __init__(self, node: ContestedNode, stack: ExitStack) -> None:
        self._node, self._stack = node, stack
        self.controllers: list[FaultyController] = []
        stack.callback(node.clear)
        self.first = self.next()
        for name in ("a", "b"):
            node.replica_set(name, FULL, GPUS // 2)
        node.wait(lambda: len(node.bound(node.present(TEAM))) == GPUS, SOON_S, "the notebooks hold all GPUs")
        self.holders = set(node.seen.bound)
        node.rivals(RIVALS)

    def next(self) -> FaultyController:
        """One more controller, which leads: the Lease is taken from the one before."""
        circumstances = Circumstances(lease_s=15, interval_s=INTERVAL_S, reservation_s=DEADLINE_S)
        controller = FaultyController(self._node.cluster, f"c{len(self.controllers)}", circumstances)
        controller.start()
        self._stack.callback(controller.kill)
        if self.controllers:
            take_lease(self._node.cluster)
        self.controllers.append(controller)
        wait_for(controller.leads, SOON_S, "the controller leads")
        return controller

    def contender(self) -> str:
        return self._node.pod("contender", TWO, priorityClassName=SERVING)

    def evictions(self) -> int:
        """Evictions that the API server has admitted."""
        return sum(seen.point == EVICTED for controller in self.controllers for seen in controller.seen())

    def evicted(self) -> set[str]:
        return self.holders & self._node.seen.ending.keys()

    def is_served(self, contender: str) -> bool:
        return contender in self._node.seen.bound

    def deadlines(self) -> list[int]:
        """Of the reservations that there are, in seconds since 1970."""
        with accepted_status(NOT_FOUND):  # nothing has been reserved yet
            data = self._node.api.get(CONFIG_MAP).get("data") or {}
            return [int(entry.rpartition("=")[2]) for entry in " ".join(data.values()).split() if "=" in entry]
        return []

    def ends_well(self, contender: str) -> None:
        """From the moment on at which the last controller leads."""
        began = time.monotonic()
        wait_for(lambda: self.is_served(contender), SOON_S, "the waiting pod is bound")
        wait_for(lambda: not self.deadlines(), SOON_S, "no reservation is left")
        print(f"served {time.monotonic() - began:.1f} s after the takeover")
        assert (len(self.evicted()), self.evictions()) == (2, 2)
        others = self._node.seen.bound.keys() - self.holders - {contender}
        assert not others, "other pods got freed devices"


@pytest.fixture
def contest(node: ContestedNode) -> Iterator[Contest]:
    with ExitStack() as stack:
        yield Contest(node, stack)


@pytest.mark.parametrize(("points", "is_reserved", "evictions"), KILLS.values(), ids=KILLS.keys())
def test_a_controller_that_is_killed_leaves_a_preemption_that_the_next_one_ends(
    contest: Contest, points: list[Point], is_reserved: bool, evictions: int
) -> None:
    contest.first.order(signal.SIGKILL, *points)
    contender = contest.contender()
    wait_for(lambda: not contest.first.running, SOON_S, "the first is killed")
    deadlines = contest.deadlines()
    assert (bool(deadlines), contest.evictions()) == (is_reserved, evictions)
    contest.next()
    contest.ends_well(contender)


STOPS = {
    "before it reserves": [Point("fence", "before")],
    "before the first eviction": [Point("evict", "before")],
    "before the first eviction is recorded": [Point("record", "before")],
    "between the two evictions": [EVICTED],
}


@pytest.mark.parametrize("points", STOPS.values(), ids=STOPS.keys())
def test_a_leader_that_goes_on_after_another_has_taken_over_evicts_no_second_set(
    contest: Contest, points: list[Point]
) -> None:
    contest.first.order(signal.SIGSTOP, *points)
    contender = contest.contender()
    wait_for(contest.first.obeyed, SOON_S, "the first is stopped")
    second = contest.next()
    turns = len(second.seen())
    wait_for(lambda: Point("lift", "after") in [seen.point for seen in second.seen()[turns:]], SOON_S, "it has looked")
    contest.first.signal(signal.SIGCONT)
    contest.ends_well(contender)
