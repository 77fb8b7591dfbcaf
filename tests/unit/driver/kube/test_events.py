"""Events against a real HTTP server: what an operator finds there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.kube import events
from driver.kube.events import BURST, MAX_WAITING, MESSAGE_BYTES, REPEAT_INTERVAL_SECONDS, RESERVED, Recorder, shortened
from driver.kube.types import Reference
from tests.support.api_server import Object, ObjectApi
from tests.support.clock import FakeClock
from tests.support.running import eventually, in_thread

CLAIM = Reference("ResourceClaim", "training", "team-a", "uid-7", "resource.k8s.io/v1")
NODE = Reference("Node", "node-a", uid="uid-8")


@pytest.fixture
def api() -> Iterator[ObjectApi]:
    with ObjectApi() as api:
        yield api


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@contextmanager
def recording(api: ObjectApi, clock: FakeClock) -> Iterator[Recorder]:
    recorder = Recorder(api.server.client(), "tessera-controller", "controller-0", clock)
    with in_thread(recorder.run, recorder.wake):
        yield recorder


def found(api: ObjectApi, namespace: str = "team-a") -> list[Object]:
    return list(api.folder(f"/api/v1/namespaces/{namespace}/events").values())


def settled(api: ObjectApi, namespace: str, **wanted: object) -> Object:
    """The one Event of a namespace, once its fields are as wanted."""

    def there() -> Object | None:
        items = found(api, namespace)
        return items[0] if items and {**items[0], **wanted} == items[0] else None

    eventually(there, f"an Event with {wanted}")
    [item] = found(api, namespace)
    return item


def test_an_event_points_at_its_object_and_says_when_and_by_whom(api: ObjectApi, clock: FakeClock) -> None:
    with recording(api, clock) as recorder:
        recorder.event(CLAIM, "NothingFits", "no GPU of the cluster has 141 GB", "Warning")
        event = settled(api, "team-a", reason="NothingFits")
    assert event["involvedObject"] == {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "name": "training",
        "namespace": "team-a",
        "uid": "uid-7",
    }
    assert (event["type"], event["message"]) == ("Warning", "no GPU of the cluster has 141 GB")
    assert event["firstTimestamp"] == event["lastTimestamp"] == "2026-11-21T00:16:40Z"
    assert event["source"] == {"component": "tessera-controller"}
    assert event["count"] == 1


def test_events_of_a_node_lie_where_kubectl_looks_for_them(api: ObjectApi, clock: FakeClock) -> None:
    with recording(api, clock) as recorder:
        recorder.event(NODE, "StandsAlone", "the node has had no plan for a minute")
        event = settled(api, "default", reason="StandsAlone")
    assert "namespace" not in event["involvedObject"]


def test_a_message_that_changes_is_followed_by_the_same_event(api: ObjectApi, clock: FakeClock) -> None:
    with recording(api, clock) as recorder:
        for count, message in enumerate(("waits for 1g.10gb", "waits for 2g.20gb", "waits for 3g.40gb"), 1):
            recorder.event(CLAIM, "Waiting", message)
            settled(api, "team-a", message=message, count=count)
            clock.advance(1)
        event = settled(api, "team-a", count=3)
    assert (event["firstTimestamp"], event["lastTimestamp"]) == ("2026-11-21T00:16:40Z", "2026-11-21T00:16:42Z")


def test_the_same_again_is_counted_and_written_once_a_minute(api: ObjectApi, clock: FakeClock) -> None:
    with recording(api, clock) as recorder:
        recorder.event(CLAIM, "Waiting", "waits")
        settled(api, "team-a", count=1)
        for _ in range(50):
            recorder.event(CLAIM, "Waiting", "waits")
        recorder.event(NODE, "Marker", "written after the others were not")
        settled(api, "default", reason="Marker")
        assert settled(api, "team-a")["count"] == 1
        clock.advance(REPEAT_INTERVAL_SECONDS)
        settled(api, "team-a", count=51)
    assert api.count("PATCH") == 1


def test_two_reasons_and_two_objects_are_apart(api: ObjectApi, clock: FakeClock) -> None:
    other = Reference("ResourceClaim", "training", "team-a", "uid-of-its-successor", "resource.k8s.io/v1")
    with recording(api, clock) as recorder:
        recorder.event(CLAIM, "Waiting", "waits")
        recorder.event(CLAIM, "NothingFits", "nothing fits")
        recorder.event(other, "Waiting", "waits")
        eventually(lambda: len(found(api)) == 3, "three Events")


def test_after_a_restart_the_event_of_before_goes_on(api: ObjectApi, clock: FakeClock) -> None:
    for count, message in ((1, "one"), (2, "two"), (3, "three")):
        with recording(api, clock) as recorder:
            recorder.event(CLAIM, "Waiting", message)
            settled(api, "team-a", message=message)
            recorder.event(CLAIM, "Waiting", f"{message} and more")
            settled(api, "team-a", message=f"{message} and more", count=2 * count)


def test_an_event_that_expired_is_made_anew(api: ObjectApi, clock: FakeClock) -> None:
    with recording(api, clock) as recorder:
        recorder.event(CLAIM, "Waiting", "one")
        name = settled(api, "team-a", message="one")["metadata"]["name"]
        api.drop(f"/api/v1/namespaces/team-a/events/{name}")
        recorder.event(CLAIM, "Waiting", "two")
        settled(api, "team-a", message="two", count=1)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_event_that_can_not_be_written_now_is_written_later_with_what_came_since(
    api: ObjectApi, clock: FakeClock, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    api.once("POST", lambda exchange: exchange.refuse(status, "not now"))
    with recording(api, clock) as recorder:
        recorder.event(CLAIM, "Waiting", "one")
        eventually(lambda: "trying again" in caplog.text, "the failure")
        recorder.event(CLAIM, "Waiting", "two")
        clock.run_until(lambda: found(api), "written")
        settled(api, "team-a", message="two", count=2)


@pytest.mark.parametrize("status", [403, 404, 422])
def test_an_event_that_is_refused_is_dropped_and_the_next_is_written(
    api: ObjectApi, clock: FakeClock, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    api.once("POST", lambda exchange: exchange.refuse(status, "never"))
    with recording(api, clock) as recorder:
        recorder.event(CLAIM, "Waiting", "one")
        recorder.event(NODE, "Other", "two")
        settled(api, "default", message="two")
    assert not found(api)
    assert "an Event can't be written" in caplog.text


def test_a_flood_is_written_at_the_rate_that_is_allowed(api: ObjectApi, clock: FakeClock) -> None:
    with recording(api, clock) as recorder:
        for number in range(BURST + 50):
            recorder.event(Reference("Pod", f"pod-{number:03}", "team-a", f"uid-{number}"), "Waiting", "waits")
        eventually(lambda: clock.waiters and len(found(api)) == BURST, "the burst")
        clock.advance(2)
        eventually(lambda: clock.waiters and len(found(api)) == BURST + 20, "two seconds more")


def test_repetitions_leave_room_for_what_is_new(api: ObjectApi, clock: FakeClock) -> None:
    def say(name: str, count: int) -> None:
        for number in range(count):
            recorder.event(Reference("Pod", f"{name}-{number}", "team-a", f"{name}-{number}"), "Waiting", "waits")

    with recording(api, clock) as recorder:
        say("pod", BURST)
        eventually(lambda: clock.waiters and len(found(api)) == BURST, "the burst")
        say("pod", BURST)
        clock.advance(REPEAT_INTERVAL_SECONDS)
        repeated = BURST - RESERVED
        eventually(lambda: clock.waiters and api.count("PATCH") == repeated, "as many repetitions as are allowed")
        say("new", RESERVED)
        eventually(lambda: len(found(api)) == BURST + RESERVED, "all that is new, at once")


def test_callers_are_never_held_up_and_the_oldest_is_dropped_when_too_many_wait(
    api: ObjectApi, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(api.server.client(), "tessera-controller", "controller-0", clock)
    began = time.monotonic()
    for number in range(MAX_WAITING + 1):
        recorder.event(Reference("Pod", f"pod-{number}", "team-a"), "Waiting", "waits")
    assert time.monotonic() - began < 5
    assert len(recorder._waiting) == MAX_WAITING
    assert "pod-0" not in {waiting.about.name for waiting in recorder._waiting.values()}
    assert "too many Events" in caplog.text


def test_a_defect_does_not_end_the_thread(
    api: ObjectApi, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = threading.Event()

    def name(key: events.Identity) -> str:
        if not broken.is_set():
            broken.set()
            raise RuntimeError("a defect")
        return key[2]

    monkeypatch.setattr(events, "event_name", name)
    with recording(api, clock) as recorder:
        recorder.event(CLAIM, "Waiting", "one")
        eventually(lambda: "a defect" in caplog.text, "the defect is logged")
        recorder.event(CLAIM, "Waiting", "two")
        settled(api, "team-a", message="two")


@given(st.text(min_size=300, max_size=2000))
def test_a_long_message_is_cut_to_what_the_api_takes(message: str) -> None:
    cut = shortened(message)
    assert len(cut.encode()) <= MESSAGE_BYTES
    assert cut == message or (cut.endswith("…") and message.startswith(cut[:-1]) and len(cut.encode()) > 1015)


def test_a_stop_just_after_it_was_checked_ends_the_thread(api: ObjectApi) -> None:
    class StopAfterCheck(threading.Event):
        def is_set(self) -> bool:
            before = super().is_set()
            self.set()
            recorder.wake()
            return before

    recorder = Recorder(api.server.client(), "tessera-controller", "controller-0")
    thread = threading.Thread(target=recorder.run, args=(StopAfterCheck(),), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_a_lasting_state_that_is_recorded_while_it_is_written_is_counted_once(api: ObjectApi, clock: FakeClock) -> None:
    with recording(api, clock) as recorder:

        def again() -> None:
            recorder.event(CLAIM, "AllHeld", "all GPUs are held", lasting=True)

        def stored_as(event: Object) -> Object:
            again()
            return event

        api.stored_as = stored_as
        again()
        settled(api, "team-a", reason="AllHeld")
        clock.advance(2 * REPEAT_INTERVAL_SECONDS)
        again()
        assert settled(api, "team-a", lastTimestamp="2026-11-21T00:18:40Z")["count"] == 1


def test_what_is_recorded_while_another_message_is_written_has_the_last_word(api: ObjectApi, clock: FakeClock) -> None:
    with recording(api, clock) as recorder:

        def no_device() -> None:
            recorder.event(CLAIM, "NothingMatches", "no device", series="pending")

        def stored_as(event: Object) -> Object:
            if event["reason"] == "Allocated":
                no_device()
            return event

        no_device()
        settled(api, "team-a", reason="NothingMatches")
        api.stored_as = stored_as
        recorder.event(CLAIM, "Allocated", "gpu-0", series="pending")
        settled(api, "team-a", reason="NothingMatches", count=3)
