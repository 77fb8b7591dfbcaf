"""Many loops whose work few threads do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from driver.errors import ApiError
from driver.kube.work_loop import LoopPool
from tests.support.running import eventually


@pytest.fixture
def pool() -> Iterator[LoopPool]:
    """Three threads work."""
    found, stop = LoopPool(), threading.Event()
    threads = [threading.Thread(target=found.run, args=(stop,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    yield found
    stop.set()
    found.wake()
    for thread in threads:
        thread.join()


def test_more_loops_than_threads_all_do_their_work(pool: LoopPool) -> None:
    done: set[int] = set()

    def work(number: int) -> Callable[[], None]:
        return lambda: done.add(number)

    for number in range(50):
        pool.loop("testing", work(number), 0.0).notify()
    eventually(lambda: len(done) == 50, "all have worked")


def test_a_loop_is_worked_on_by_one_thread_at_a_time(pool: LoopPool) -> None:
    inside, most, rounds = 0, 0, 0

    def work() -> None:
        nonlocal inside, most, rounds
        inside += 1
        most = max(most, inside)
        time.sleep(0.001)  # long enough for another thread to come in, if it could
        inside -= 1
        rounds += 1

    loop = pool.loop("testing", work, 0.0)

    def again() -> bool:
        loop.notify()
        return rounds >= 20

    eventually(again, "worked twenty times")
    assert most == 1


def test_a_change_during_the_work_is_worked_on_afterwards(pool: LoopPool) -> None:
    began, go_on, rounds = threading.Event(), threading.Event(), []

    def work() -> None:
        rounds.append("once")
        began.set()
        go_on.wait(60)

    loop = pool.loop("testing", work, 0.0)
    loop.notify()
    assert began.wait(60)
    loop.notify()
    go_on.set()
    eventually(lambda: len(rounds) == 2, "worked a second time")


def test_what_fails_is_tried_again_and_keeps_nobody_else_waiting(pool: LoopPool) -> None:
    failures = [ApiError("not today"), RuntimeError("a defect")]
    others: list[str] = []

    def work() -> None:
        if failures:
            raise failures.pop()

    pool.loop("testing", work, 0.0).notify()
    pool.loop("testing", lambda: others.append("done"), 0.0).notify()
    eventually(lambda: others and not failures, "both were tried")


def test_work_that_says_when_it_is_due_is_done_again_though_nothing_changed(pool: LoopPool) -> None:
    rounds: list[str] = []

    def work() -> float:
        rounds.append("once more")
        return 0.01

    pool.loop("testing", work, 0.0).notify()
    eventually(lambda: len(rounds) > 2, "worked three times")


def test_what_may_wait_is_done_with_what_may_not(pool: LoopPool) -> None:
    done = threading.Event()
    loop = pool.loop("testing", done.set, 0.0)
    loop.notify_within(3600)
    assert not done.is_set()
    loop.notify()
    eventually(done.is_set, "worked")
