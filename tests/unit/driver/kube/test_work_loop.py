"""Work that is done again and again."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

from driver.kube.work_loop import Loop
from tests.support.running import eventually, in_thread


def test_work_that_says_when_it_is_due_is_done_again_though_nothing_changed() -> None:
    done: list[str] = []

    def work() -> float:
        done.append("once more")
        return 0.01

    loop = Loop("testing", work, 0.0)
    loop.notify()
    with in_thread(loop.run, loop.notify):
        eventually(lambda: len(done) > 2, "worked three times")


def test_what_may_wait_is_done_with_what_may_not() -> None:
    done = threading.Event()
    loop = Loop("testing", done.set, 0.0)
    with in_thread(loop.run, loop.notify):
        loop.notify_within(3600)
        assert not done.wait(0.05)
        loop.notify()
        eventually(done.is_set, "worked")


def test_what_may_wait_is_done_when_its_time_has_come() -> None:
    done: list[float] = []
    loop = Loop("testing", lambda: done.append(time.monotonic()), 0.0)
    began = time.monotonic()
    loop.notify_within(0.05)
    loop.notify_within(3600)
    with in_thread(loop.run, loop.notify):
        eventually(lambda: done, "worked")
    assert done[0] - began >= 0.05


def test_changes_during_a_turn_are_handled_together_afterwards() -> None:
    """Else slow work would be done without a pause while changes keep coming, such as one slice update a change."""
    turns: list[tuple[float, float]] = []

    def work() -> None:
        began = time.monotonic()
        loop.notify()
        time.sleep(0.1)
        turns.append((began, time.monotonic()))

    loop = Loop("testing", work, 0.05)
    loop.notify()
    with in_thread(loop.run, loop.notify):
        eventually(lambda: len(turns) > 2, "worked three times")
    assert all(after[0] - before[1] >= 0.05 for before, after in pairwise(turns))
