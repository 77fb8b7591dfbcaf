"""Leader election and heartbeat against a real HTTP server, by an injected clock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driver.errors import ApiError, UsageError
from driver.kube.controller_heartbeat import (
    EVICT_AFTER,
    FAILURE_INTERVAL_SECONDS,
    HEARTBEAT,
    LEAVING,
    Heartbeat,
    HeartbeatWatch,
)
from driver.kube.lease import LeaderElector, Timing, leases
from tests.support.api_server import Answer, Exchange, Object, ObjectApi
from tests.support.clock import FakeClock
from tests.support.running import eventually, in_thread

LEASE = f"{leases('tessera')}/tessera-controller"


@pytest.fixture
def api() -> Iterator[ObjectApi]:
    with ObjectApi() as api:
        yield api


TIMING = Timing(15, 10.0, 2.0)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def elector(api: ObjectApi, clock: FakeClock, identity: str) -> LeaderElector:
    client = api.server.client(agent=identity)
    return LeaderElector(client, "tessera", "tessera-controller", identity, timing=TIMING, clock=clock)


def spec(api: ObjectApi) -> Object:
    found: Object = api.folder(leases("tessera"))["tessera-controller"]["spec"]
    return found


# One try after the other


def test_the_first_to_come_leads_and_renewing_keeps_its_time_of_acquiring(api: ObjectApi, clock: FakeClock) -> None:
    one = elector(api, clock, "one")
    assert one.attempt()
    first = spec(api)
    assert first == {
        "holderIdentity": "one",
        "leaseDurationSeconds": 15,
        "acquireTime": "2026-11-21T00:16:40.000000Z",
        "renewTime": "2026-11-21T00:16:40.000000Z",
        "leaseTransitions": 0,
    }
    clock.advance(2)
    assert one.attempt()
    assert spec(api) == {**first, "renewTime": "2026-11-21T00:16:42.000000Z"}
    assert api.count("get") == 1  # a leader renews with one request


def test_another_waits_until_it_saw_no_renewal_for_the_whole_duration(api: ObjectApi, clock: FakeClock) -> None:
    one, two = elector(api, clock, "one"), elector(api, clock, "two")
    assert one.attempt()
    clock.advance(100)  # an old time in the Lease says nothing: clocks differ
    assert not two.attempt()
    clock.advance(14.9)
    assert not two.attempt()
    clock.advance(0.1)
    assert two.attempt()
    assert (spec(api)["holderIdentity"], spec(api)["leaseTransitions"]) == ("two", 1)


def test_every_renewal_seen_starts_the_wait_anew(api: ObjectApi, clock: FakeClock) -> None:
    one, two = elector(api, clock, "one"), elector(api, clock, "two")
    for _ in range(5):
        assert one.attempt()
        assert not two.attempt()
        clock.advance(10)


def test_a_leader_that_was_replaced_learns_it_at_its_next_renewal(api: ObjectApi, clock: FakeClock) -> None:
    one, two = elector(api, clock, "one"), elector(api, clock, "two")
    assert one.attempt()
    assert not two.attempt()
    clock.advance(15)
    assert not one.leading()
    assert two.attempt()
    assert not one.attempt()
    assert not one.leading()
    assert two.leading()


def test_the_faster_of_two_that_take_over_at_once_wins(api: ObjectApi, clock: FakeClock) -> None:
    one, two = elector(api, clock, "one"), elector(api, clock, "two")

    def too_late(exchange: Exchange) -> None:
        assert one.attempt()
        exchange.refuse(409, "already exists")

    api.once("POST", too_late)
    assert not two.attempt()
    assert one.leading()
    assert not two.leading()


def test_a_lease_that_was_deleted_is_made_again_by_its_leader(api: ObjectApi, clock: FakeClock) -> None:
    one = elector(api, clock, "one")
    assert one.attempt()
    api.drop(LEASE)
    assert not one.attempt()
    assert one.attempt()
    assert spec(api)["holderIdentity"] == "one"


def test_a_lease_without_a_holder_is_free_at_once(api: ObjectApi, clock: FakeClock) -> None:
    api.store(LEASE, spec={"leaseDurationSeconds": 15, "leaseTransitions": 7, "renewTime": "2026-11-21T00:16:40.0Z"})
    assert elector(api, clock, "one").attempt()
    assert spec(api)["leaseTransitions"] == 8


@pytest.mark.parametrize("body", [b"<html>", b"{}", b"[]"])
def test_an_answer_that_is_no_lease_is_an_error_of_the_request(api: ObjectApi, clock: FakeClock, body: bytes) -> None:
    one = elector(api, clock, "one")
    api.once("get", lambda exchange: exchange.send(200, body))
    with pytest.raises(ApiError, match=r"no Lease|no JSON object"):
        one.attempt()
    api.once("POST", lambda exchange: exchange.send(201, b"{}"))
    with pytest.raises(ApiError, match=r"no Lease|no JSON object"):
        one.attempt()


def test_timing_that_would_let_two_lead_is_refused() -> None:
    with pytest.raises(UsageError, match="lease_s > renew_deadline_s"):
        Timing(lease_s=10, renew_deadline_s=10)
    with pytest.raises(UsageError, match="retry_s"):
        Timing(retry_s=9)


MOVES = st.lists(
    st.sampled_from(["one tries", "two tries", "an answer is lost", "3 s", "8 s"]), min_size=20, max_size=30
)


@pytest.mark.long
@settings(max_examples=10, deadline=None)
@given(MOVES)
def test_never_do_two_lead_whatever_gets_lost_and_however_late_they_come(moves: list[str]) -> None:
    clocks = {"one": FakeClock(0.0), "two": FakeClock(90_000.0)}
    with ObjectApi() as api:
        electors = {name: elector(api, clock, name) for name, clock in clocks.items()}
        for move in moves:
            what, _, unit = move.partition(" ")
            if unit == "tries":
                electors[what]._try()
            elif unit == "s":
                for clock in clocks.values():
                    clock.advance(int(what))
            else:
                api.once("PUT", stored_but_not_answered(api))
            assert sum(each.leading() for each in electors.values()) <= 1


def stored_but_not_answered(api: ObjectApi) -> Answer:
    def answer(exchange: Exchange) -> None:
        exchange.send = lambda *_: exchange.cut()  # type: ignore[method-assign]
        api._write(exchange)

    return answer


# Running


class Candidate:
    """An elector in a thread, and whether it leads."""

    def __init__(self, api: ObjectApi, clock: FakeClock, identity: str, others: list[Candidate]) -> None:
        self.elector = elector(api, clock, identity)
        self.leads = False
        self.terms = 0
        self.overlapped = False
        self._others = others
        others.append(self)

    def lead(self, lost: threading.Event) -> None:
        self.overlapped |= any(other.leads for other in self._others)
        self.leads = True
        self.terms += 1
        lost.wait(120)
        self.leads = False

    def run(self, stop: threading.Event) -> None:
        self.elector.run(stop, self.lead)


@contextmanager
def candidates(api: ObjectApi, clock: FakeClock, *names: str) -> Iterator[tuple[list[Candidate], list[ExitStack]]]:
    """Running candidates, the first elected; closing a stack stops its candidate."""
    everyone: list[Candidate] = []
    stacks: list[ExitStack] = []
    with ExitStack() as all_of_them:
        for name in names:
            candidate = Candidate(api, clock, name, everyone)
            stacks.append(all_of_them.enter_context(ExitStack()))
            stacks[-1].enter_context(in_thread(candidate.run))
            eventually(lambda: everyone[0].leads, "the first leads")
        yield everyone, stacks
    assert not any(candidate.overlapped for candidate in everyone)


def test_the_second_takes_over_at_once_when_the_first_is_stopped(api: ObjectApi, clock: FakeClock) -> None:
    with candidates(api, clock, "one", "two") as ([one, two], stacks):
        eventually(lambda: api.count("get") >= 2 and clock.waiters >= 3, "both looked")
        before = clock.monotonic()
        stacks[0].close()
        assert not one.leads
        clock.run_until(lambda: two.leads, "the second leads")
        assert clock.monotonic() - before < 5  # one wait of a candidate, not the Lease's 15 s
        assert spec(api)["leaseTransitions"] == 1


def test_a_leader_cut_off_stops_before_another_takes_over_even_while_its_request_hangs(
    api: ObjectApi, clock: FakeClock
) -> None:
    with candidates(api, clock, "one", "two") as ([one, two], _):
        eventually(lambda: clock.waiters >= 3, "everyone waits")
        api.cut_off.add("one")
        # The first's guard, and the second; renewing waits for its answer.
        clock.run_until(lambda: not one.leads, "the first stops leading", waiters=2)
        assert clock.monotonic() - 1000 == 10
        assert not two.leads
        clock.run_until(lambda: two.leads, "the second leads")
        assert clock.monotonic() - 1000 >= 15
        api.reconnect("one")
        eventually(lambda: spec(api)["holderIdentity"] == "two", "the first does not take it back")


def test_a_leader_that_can_renew_goes_on_leading(api: ObjectApi, clock: FakeClock) -> None:
    with candidates(api, clock, "one") as ([one], _):
        for _ in range(20):
            eventually(lambda: clock.waiters >= 2, "renewed")
            renewed = spec(api)["renewTime"]
            clock.advance(2)
            eventually(lambda renewed=renewed: spec(api)["renewTime"] > renewed, "renewed")  # type: ignore[misc]
        assert (one.leads, one.terms) == (True, 1)


def test_failing_renewals_are_survived_for_as_long_as_the_deadline(api: ObjectApi, clock: FakeClock) -> None:
    with candidates(api, clock, "one") as ([one], _):
        for _ in range(3):
            api.once("PUT", lambda exchange: exchange.refuse(500, "etcd"))
            eventually(lambda: clock.waiters >= 2, "it waits")
            clock.advance(2)
            eventually(lambda: not api._faults["PUT"], "the refusal was met")
        eventually(lambda: clock.waiters >= 2, "it waits")
        clock.advance(2)
        eventually(lambda: spec(api)["renewTime"] == "2026-11-21T00:16:48.000000Z", "renewed at last")
        assert (one.leads, one.terms) == (True, 1)


def test_what_the_leader_raises_ends_the_election_after_giving_up_the_lease(api: ObjectApi, clock: FakeClock) -> None:
    def broken(lost: threading.Event) -> None:
        raise RuntimeError("a defect")

    raised: list[BaseException] = []

    def run(stop: threading.Event) -> None:
        try:
            elector(api, clock, "one").run(stop, broken)
        except RuntimeError as error:
            raised.append(error)

    with in_thread(run):
        clock.run_until(lambda: raised, "the defect shows")
    assert "holderIdentity" not in spec(api)


# Heartbeat


@contextmanager
def watched(api: ObjectApi, clock: FakeClock) -> Iterator[HeartbeatWatch]:
    watch = HeartbeatWatch(api.server.client(agent="node"), "tessera", clock=clock)
    with in_thread(watch.run, api.end_watches):
        eventually(lambda: api.count("watch"), "the node watches")
        yield watch


def heart(api: ObjectApi, clock: FakeClock, identity: str = "one") -> Heartbeat:
    return Heartbeat(api.server.client(agent=identity), "tessera", identity, {EVICT_AFTER: "120.0"}, clock)


def test_a_controller_is_alive_while_it_renews_and_for_thirty_seconds_after(api: ObjectApi, clock: FakeClock) -> None:
    with watched(api, clock) as watch:
        assert not watch.alive()
        for _ in range(4):
            clock.advance(31)
            assert not watch.alive()
            heart(api, clock).beat()
            eventually(watch.alive, "alive")
        clock.advance(30)
        assert watch.alive()
        clock.advance(0.1)
        assert not watch.alive()


def test_word_of_being_uninstalled_is_heard_is_no_sign_of_life_and_outlives_its_lease(
    api: ObjectApi, clock: FakeClock
) -> None:
    path = f"{leases('tessera')}/{HEARTBEAT}"
    heart(api, clock).beat()
    with watched(api, clock) as watch:
        eventually(lambda: watch._cache.synced, "the list")
        client = api.server.client()
        client.patch(path, {"metadata": {"annotations": {LEAVING: "true"}}})
        eventually(lambda: watch.leaving, "heard")
        assert not watch.alive()
        client.patch(path, {"metadata": {"annotations": {LEAVING: None}}})
        eventually(lambda: not watch.leaving, "it was not meant")
        client.patch(path, {"metadata": {"annotations": {LEAVING: "true"}}})
        eventually(lambda: watch.leaving, "heard again")
        client.delete(path)
        eventually(lambda: not watch._cache.snapshot(), "the Lease is gone")
        assert watch.leaving


def test_a_lease_that_was_left_by_a_dead_controller_is_no_sign_of_life(api: ObjectApi, clock: FakeClock) -> None:
    heart(api, clock).beat()
    with watched(api, clock) as watch:
        eventually(lambda: watch._cache.synced, "the list")
        assert not watch.alive()
        clock.advance(10)
        heart(api, clock).beat()
        eventually(watch.alive, "alive")


def test_clocks_that_are_days_apart_make_no_difference(api: ObjectApi, clock: FakeClock) -> None:
    with watched(api, clock) as watch:
        heart(api, FakeClock(900_000.0)).beat()
        eventually(watch.alive, "alive")
        heart(api, FakeClock(0.0), "two").beat()
        clock.advance(30)
        eventually(watch.alive, "still alive")


def test_a_node_that_is_cut_off_stands_alone_after_thirty_seconds(api: ObjectApi, clock: FakeClock) -> None:
    with watched(api, clock) as watch:
        heart(api, clock).beat()
        eventually(watch.alive, "alive")
        api.cut_off.add("node")
        api.end_watches(hang_up=True)
        clock.advance(31)
        heart(api, clock).beat()
        assert not watch.alive()
        api.reconnect("node")
        eventually(watch.alive, "alive again")


def test_the_heart_beats_every_ten_seconds_whatever_the_api_server_says(
    api: ObjectApi, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    api.once("PATCH", lambda exchange: exchange.refuse(500, "etcd"))
    with in_thread(heart(api, clock).run, lambda: clock.advance(10)):
        eventually(lambda: "no heartbeat" in caplog.text and clock.waiters, "the failure is logged")
        for beat in range(1, 4):
            clock.advance(10)
            eventually(lambda beat=beat: api.count("PATCH") > beat and clock.waiters, "the next beat")  # type: ignore[misc]
    assert api.folder(leases("tessera"))[HEARTBEAT]["spec"]["holderIdentity"] == "one"
    assert api.folder(leases("tessera"))[HEARTBEAT]["metadata"]["annotations"] == {EVICT_AFTER: "120.0"}


def test_a_controller_that_decides_nothing_shows_no_sign_of_life(api: ObjectApi, clock: FakeClock) -> None:
    well = threading.Event()
    failure = lambda: None if well.is_set() else "claims are stale"  # noqa: E731
    with in_thread(lambda stop: heart(api, clock).run(stop, failure), lambda: clock.advance(10)):
        for _ in range(3):
            eventually(lambda: clock.waiters, "it looks")
            clock.advance(FAILURE_INTERVAL_SECONDS)
        assert api.count("PATCH") == 0
        well.set()
        clock.run_until(lambda: api.count("PATCH") > 0, "a beat")
