"""Alive and ready: what the pages say, what the watchdog notices, and when the API server counts as reached."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from driver.config.flag_values import ListenAddress
from driver.errors import ApiError
from driver.http import Check, Endpoint, health_pages
from driver.kube.client import ApiReach
from driver.kube.work_loop import Loop
from driver.step_observer import observed, unobserved
from driver.watchdog import STUCK_TIMEOUT_SECONDS, Watchdog
from kubelet_plugin.step_names import NodeStep
from tests.harness.waiting import wait_for
from tests.support.metrics import fetch

LOCAL = ListenAddress("127.0.0.1", 0)


class Hand:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def served(live: list[Check], ready: list[Check]) -> Iterator[int]:
    with ExitStack() as stack:
        endpoint = Endpoint(health_pages(live, ready), LOCAL, "--health-address")
        stack.callback(endpoint.close)
        yield endpoint.address.port


def well() -> None:
    return None


def test_a_page_is_ok_in_short_and_names_its_checks_when_asked() -> None:
    with served([Check("loops", well)], [Check("registered", well), Check("api", well)]) as port:
        assert fetch(port, "/livez") == (200, "ok")
        assert fetch(port, "/readyz?verbose") == (200, "[+]registered ok\n[+]api ok\nreadyz check passed\n")


def test_one_failed_check_fails_its_page_alone_and_is_told_with_its_reason() -> None:
    with served([Check("loops", well)], [Check("registered", well), Check("api", lambda: "no answer")]) as port:
        assert fetch(port, "/readyz") == (503, "[+]registered ok\n[-]api failed: no answer\nreadyz check failed\n")
        assert fetch(port, "/livez")[0] == 200


def test_a_check_with_a_defect_fails_by_itself() -> None:
    def broken() -> str | None:
        raise KeyError("x")

    with served([], [Check("broken", broken), Check("api", well)]) as port:
        status, body = fetch(port, "/readyz")
    assert status == 503
    assert "[-]broken failed: internal error, please report it: KeyError: 'x'\n[+]api ok" in body


def test_there_is_nothing_else_to_get() -> None:
    with served([], []) as port:
        assert fetch(port, "/metrics") == (404, "only GET /livez, /readyz is answered\n")
        assert fetch(port, "/livez", "POST")[0] == 404


def test_a_thread_that_ended_is_named() -> None:
    stop = threading.Event()
    dog = Watchdog(stop)

    def lasts(until: threading.Event) -> None:
        until.wait()

    def ends(_: threading.Event) -> None:
        pass

    lasting = dog.start(lasts)
    assert dog.failure() is None
    dog.start(ends)
    assert "ends has ended" in str(wait_for(dog.failure, 60, "the thread that ended is noticed"))
    stop.set()
    assert dog.failure() is None
    lasting.join(60)


def test_work_that_does_not_end_is_named_and_work_that_fails_is_not() -> None:
    clock, stop = Hand(), threading.Event()
    dog = Watchdog(stop, clock)
    watched, go, begun = dog.watch("publishing"), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go.wait(60)
        raise ApiError("refused")

    loop = dog.loops(Loop, watched)("publishing", work, 0.0)
    loop.notify()
    working = dog.start(loop.run)
    assert begun.wait(60)
    assert dog.failure() is None
    clock.now += STUCK_TIMEOUT_SECONDS + 1
    assert dog.failure() == f"publishing takes {STUCK_TIMEOUT_SECONDS + 1:.0f} s"
    go.set()
    wait_for(lambda: watched.failure == "refused", 60, "the turn ended")
    assert dog.failure() is None
    stop.set()
    loop.notify()
    working.join(60)  # what it still has to log is not for the next test


def test_a_step_that_does_not_end_is_named() -> None:
    clock = Hand()
    dog = Watchdog(threading.Event(), clock)
    observer = dog.steps(unobserved, NodeStep.DISCOVER, dog.watch("discovering"))
    with observed(observer, NodeStep.DISCOVER):
        clock.now += STUCK_TIMEOUT_SECONDS + 1
        assert dog.failure() is not None
    assert dog.failure() is None
    with observed(observer, NodeStep.LISTEN):
        clock.now += STUCK_TIMEOUT_SECONDS + 1
        assert dog.failure() is None


@pytest.mark.parametrize(("status", "reached"), [(200, True), (404, True), (403, True), (None, False), (500, False)])
def test_what_counts_as_an_answer_of_the_api_server(status: int | None, reached: bool) -> None:
    reach = ApiReach()
    assert reach.failure() is not None
    told: list[object] = []
    reach.observer(lambda *request: told.append(request))("GET", "/api", None, status, 0.1)
    assert (reach.failure() is None) is reached
    assert told == [("GET", "/api", None, status, 0.1)]


def test_the_election_is_alive_while_it_asks_whatever_the_answer() -> None:
    clock = Hand()
    reach = ApiReach(clock)
    assert not reach.requested_within(60)
    reach.observer(None)("PUT", "/lease", None, None, 10.0)
    assert reach.requested_within(60)
    clock.now += 61
    assert not reach.requested_within(60)
