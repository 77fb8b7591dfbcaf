"""What can wait gives way to claims that are worked on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack

from kubelet_plugin.claims import ClaimReference
from kubelet_plugin.lull import QUIET_S, Lull, LullWork
from kubelet_plugin.preparation import PreparedDevice

CLAIM = ClaimReference("default", "claim", "uid-1")


class Waiting(threading.Event):
    """A stop that nobody waits for: waiting for it takes the time on ``now`` alone, and ``meanwhile`` happens."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.meanwhile: list[ExitStack] = []

    def clock(self) -> float:
        return self.now

    def wait(self, timeout: float | None = None) -> bool:
        self.now += timeout or 0.0
        if self.meanwhile:
            self.meanwhile.pop(0).close()
        return self.is_set()


def waited(lull: Lull, most_s: float, time: Waiting) -> float:
    began = time.now
    lull.within(most_s)(time)
    return time.now - began


def test_where_no_claim_is_worked_on_nothing_waits() -> None:
    time = Waiting()
    assert waited(Lull(time.clock), 5.0, time) == 0


def test_after_the_last_claim_of_a_burst_it_is_quiet_for_a_moment_first() -> None:
    time = Waiting()
    lull, claim = Lull(time.clock), ExitStack()
    claim.enter_context(lull.broken())
    time.meanwhile = [ExitStack(), ExitStack(), claim]
    assert round(waited(lull, 5.0, time), 3) == round(4 * QUIET_S, 3)


def test_claims_without_end_keep_nothing_waiting_for_ever() -> None:
    time = Waiting()
    lull = Lull(time.clock)
    with lull.broken():
        assert round(waited(lull, 0.5, time), 3) == 0.5


def test_a_stop_ends_the_waiting() -> None:
    lull, stop = Lull(), threading.Event()
    stop.set()
    with lull.broken():
        lull.within(3600)(stop)


class Worker:
    """Claim work that notes what waits meanwhile would see."""

    def __init__(self, lull: Lull, time: Waiting) -> None:
        self.lull, self.time, self.waits = lull, time, list[float]()

    def prepare(self, reference: ClaimReference) -> Sequence[PreparedDevice]:
        self.waits.append(waited(self.lull, 1.0, self.time))
        return []

    def unprepare(self, reference: ClaimReference) -> None:
        self.waits.append(waited(self.lull, 1.0, self.time))


def test_preparing_and_unpreparing_are_given_way_to() -> None:
    time = Waiting()
    lull = Lull(time.clock)
    worker = Worker(lull, time)
    work = LullWork(worker, lull)
    work.prepare(CLAIM)
    work.unprepare(CLAIM)
    assert [round(wait, 3) for wait in worker.waits] == [1.0, 1.0]
