"""The watch cache against a real HTTP server: it converges on what the server has, whatever happens on the way."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from driver.kube import watch_cache
from driver.kube.types import Key, ObjectMeta
from driver.kube.watch_cache import Change, WatchCache
from driver.kube.work_loop import Backoff
from tests.support.api_server import SLICES, Answer, Exchange, ObjectApi, Route, SliceApi
from tests.support.running import eventually, in_thread


@pytest.fixture
def api() -> Iterator[SliceApi]:
    with SliceApi(page=2) as api:
        yield api


@pytest.fixture(autouse=True)
def impatient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait milliseconds after a failure, except in the tests that are about waiting."""
    if "slowly" not in request.node.name and "loop" not in request.node.name:
        monkeypatch.setattr(watch_cache, "Backoff", partial(Backoff, first_s=0.01))


class Slice(msgspec.Struct, frozen=True):
    metadata: ObjectMeta
    spec: dict[str, Any] = {}


Spec = dict[str, Any]
SELECTOR = {"fieldSelector": "spec.nodeName=node-a"}


@contextmanager
def cache_of(api: SliceApi, on_change: Callable[[Any], None] = lambda _: None) -> Iterator[WatchCache[Slice, Slice]]:
    cache = WatchCache(api.server.client(), SLICES, Slice, lambda item: item, on_change, SELECTOR)
    with in_thread(cache.run, api.end_watches):
        yield cache


def has(cache: WatchCache[Slice, Slice]) -> dict[str, tuple[str, Spec]]:
    return {key.name: (item.metadata.resource_version, item.spec) for key, item in cache.snapshot().items()}


def there(api: SliceApi) -> dict[str, tuple[str, Spec]]:
    return {name: (item["metadata"]["resourceVersion"], item.get("spec", {})) for name, item in api.objects.items()}


def same(cache: WatchCache[Slice, Slice], api: SliceApi) -> None:
    """Wait until the cache holds exactly what the server has."""
    eventually(lambda: has(cache) == there(api), "the cache is as the server")


def watching(api: SliceApi, times: int = 1) -> None:
    eventually(lambda: api.count("watch") >= times, f"{times} watches were begun")


def test_all_pages_of_a_list_are_read_before_it_counts_as_synced(api: SliceApi) -> None:
    for number in range(5):
        api.put(f"slice-{number}")
    with cache_of(api) as cache:
        eventually(lambda: cache.synced, "the list was read")
        assert has(cache) == there(api)
        assert api.count("list") == 3
        assert all("fieldSelector=spec.nodeName" in path for path in api.queries("list") + api.queries("watch"))


def test_what_others_create_change_and_delete_arrives_without_another_list(api: SliceApi) -> None:
    api.put("old")
    with cache_of(api) as cache:
        watching(api)
        api.put("new", spec={"x": 1})
        api.put("new", spec={"x": 2})
        api.remove("old")
        same(cache, api)
        assert set(cache.snapshot()) == {Key("", "new")}
    assert api.count("list") == 1


def test_a_watch_that_ended_goes_on_where_it_was(api: SliceApi) -> None:
    with cache_of(api) as cache:
        watching(api)
        last = api.put("one")["metadata"]["resourceVersion"]
        same(cache, api)
        api.end_watches()
        watching(api, 2)
        assert f"resourceVersion={last}" in api.queries("watch")[1]


def test_a_watch_that_was_cut_off_resumes_from_the_last_bookmark(api: SliceApi) -> None:
    with cache_of(api) as cache:
        watching(api)
        bookmark = api.bookmark()
        eventually(lambda: cache._resume_at == str(bookmark), "the bookmark arrived")
        api.end_watches(hang_up=True)
        watching(api, 2)
        assert f"resourceVersion={bookmark}" in api.queries("watch")[1]
        api.put("after")
        same(cache, api)
    assert api.count("list") == 1


def test_a_client_that_is_cut_off_hears_of_nothing_until_it_is_back(
    api: SliceApi, caplog: pytest.LogCaptureFixture
) -> None:
    with cache_of(api) as cache:
        watching(api)
        with api._changed:  # the watch wakes when both have happened
            api.cut_off.add("test")
            api.end_watches(hang_up=True)
            api.put("meanwhile")
        eventually(lambda: "watch failed" in caplog.text, "it was cut off")
        assert not cache.snapshot()
        api.reconnect("test")
        same(cache, api)


def test_a_history_that_is_gone_is_listed_again(api: SliceApi) -> None:
    api.put("lost")
    with cache_of(api) as cache:
        watching(api)
        eventually(lambda: cache.synced, "the first list")
        with api._changed:
            api.end_watches()  # nobody is told of what happens between two watches ...
            api._drop(Route.of(f"{SLICES}/lost"))
            api.objects["found"] = {"metadata": {"name": "found", "uid": "u", "resourceVersion": str(api._version)}}
            api._oldest = api._version + 1  # ... and the server has forgotten it
            api._version += 1
        same(cache, api)
    assert api.count("list") == 2


def refuse(status: int) -> Answer:
    return lambda exchange: exchange.refuse(status, "no")


def hang_up(exchange: Exchange) -> None:
    exchange.cut()


def half_an_answer(exchange: Exchange) -> None:
    exchange.send_response(200)
    exchange.send_header("Content-Length", "1000")
    exchange.end_headers()
    exchange.wfile.write(b'{"metadata"')
    exchange.cut()


def plain(body: bytes) -> Answer:
    return lambda exchange: exchange.send(200, body)


TROUBLE: dict[str, Answer] = {
    "401 Unauthorized": refuse(401),
    "403 Forbidden": refuse(403),
    "410 Gone": refuse(410),
    "429 Too Many Requests": refuse(429),
    "500 Internal Server Error": refuse(500),
    "503 without a Status": lambda exchange: exchange.send(503, b"upstream", "text/plain"),
    "connection closed": hang_up,
    "cut off half-way": half_an_answer,
    "no JSON": plain(b"<html>login</html>"),
    "JSON but no object": plain(b"[1, 2]"),
    "an object without metadata": plain(b"{}"),
    "items without names": plain(b'{"metadata": {"resourceVersion": "5"}, "items": [{}]}'),
    "a version that is no number": plain(b'{"metadata": {"resourceVersion": "abc"}, "items": []}'),
    "bytes that are no text": plain(b"\xff\xfe\x00"),
}


@pytest.mark.parametrize("kind", ["list", "watch"])
@pytest.mark.parametrize("trouble", TROUBLE)
def test_trouble_is_survived(api: SliceApi, kind: str, trouble: str) -> None:
    api.put("one")
    api.once(kind, TROUBLE[trouble])
    with cache_of(api) as cache:
        same(cache, api)
        eventually(lambda: api.count("watch") > (kind == "watch"), "a good watch was begun")
        api.put("two")
        same(cache, api)


LINES: dict[str, bytes] = {
    "no JSON": b"oops",
    "no event": b"{}",
    "no object": b'{"type": "ADDED"}',
    "an object without fields": b'{"type": "ADDED", "object": {}}',
    "an object without a name": b'{"type": "ADDED", "object": {"metadata": {"resourceVersion": "999"}}}',
    "a version that is no number": b'{"type": "ADDED", "object": {"metadata": {"name": "x", "resourceVersion": "y"}}}',
    "an error that is no Status": b'{"type": "ERROR", "object": "boom"}',
    "an error of 500": json.dumps({"type": "ERROR", "object": {"code": 500, "message": "etcd"}}).encode(),
}


@pytest.mark.parametrize("line", LINES)
def test_a_senseless_event_costs_a_new_list_and_nothing_else(
    api: SliceApi, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    api.put("one")
    with cache_of(api) as cache:
        watching(api)
        api.send_raw(LINES[line])
        eventually(lambda: api.count("list") == 2, "a new list")
        api.put("two")
        same(cache, api)
    assert "watch failed, trying again" in caplog.text
    assert "Traceback" not in caplog.text


class KindlessCache(WatchCache[Slice, Slice]):
    message_if_not_installed = "no such kind"


def test_a_resource_that_the_server_does_not_know_is_told_once_and_asked_for_until_it_is_there(
    api: SliceApi, caplog: pytest.LogCaptureFixture
) -> None:
    api.put("there")
    api.once("list", *[refuse(404)] * 4)
    cache = KindlessCache(api.server.client(), SLICES, Slice, lambda item: item)
    with in_thread(cache.run, api.end_watches):
        same(cache, api)
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told.count("no such kind") == 1
    assert "watch failed, trying again" not in told


def test_a_resource_that_is_gone_again_is_told_again(api: SliceApi, caplog: pytest.LogCaptureFixture) -> None:
    api.put("there")
    api.once("list", refuse(404), refuse(503), refuse(404))
    cache = KindlessCache(api.server.client(), SLICES, Slice, lambda item: item)
    with in_thread(cache.run, api.end_watches):
        same(cache, api)
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told[:3] == ["no such kind", "watch failed, trying again", "no such kind"]


def test_a_defect_of_ours_does_not_end_the_thread(api: SliceApi, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[None] = []

    def broken_once(_: object) -> None:
        calls.append(None)
        if len(calls) == 1:
            raise RuntimeError("a defect")

    with cache_of(api, broken_once) as cache:
        watching(api)
        api.put("one")
        same(cache, api)
    assert "a defect" in caplog.text


def test_failures_are_retried_more_and_more_slowly(api: SliceApi) -> None:
    api.once("list", *[refuse(500)] * 3)
    with cache_of(api) as cache:
        eventually(lambda: cache.synced, "the fourth list")
    times = api.times("list")
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert len(pauses) == 3
    assert [pause >= least for pause, least in zip(pauses, (0.1, 0.2, 0.4), strict=True)] == [True] * 3


def test_a_server_that_ends_every_watch_at_once_is_not_asked_in_a_loop(api: SliceApi) -> None:
    def nothing(exchange: Exchange) -> None:
        exchange.begin_stream()
        exchange.end_stream()

    api.once("watch", *[nothing] * 3)
    with cache_of(api):
        watching(api, 4)
    times = api.times("watch")
    assert times[3] - times[0] >= 0.1 + 0.2 + 0.4


def test_our_own_write_is_not_overtaken_by_older_news(api: SliceApi) -> None:
    first = api.put("slice", spec={"x": "old"})
    with cache_of(api) as cache:
        watching(api)
        eventually(lambda: cache.synced, "the list")
        newer = {"metadata": {**first["metadata"], "resourceVersion": "900"}, "spec": {"x": "ours"}}
        cache.observe(newer)
        api.put("slice", spec={"x": "older than ours"})
        api.put("marker")
        eventually(lambda: cache.get(Key("", "marker")), "the events arrived")
        assert has(cache)["slice"] == ("900", {"x": "ours"})


def test_a_deletion_of_ours_is_seen_at_once_and_a_creation_after_it_stays(api: SliceApi) -> None:
    api.put("slice")
    with cache_of(api) as cache:
        eventually(lambda: cache.synced, "the list")
        watching(api)
        api.remove("slice")
        cache.forget(Key("", "slice"))
        again = api.put("slice", spec={"x": "again"})
        cache.observe(again)
        same(cache, api)


def test_readers_get_a_snapshot_that_does_not_change_under_them(api: SliceApi) -> None:
    api.put("one")
    with cache_of(api) as cache:
        eventually(lambda: cache.synced, "the list")
        before = cache.snapshot()
        watching(api)
        api.put("two")
        same(cache, api)
    assert set(before) == {Key("", "one")}


PODS = "/api/v1/pods"


class Labelled(ObjectMeta, frozen=True):
    labels: dict[str, str] = msgspec.field(default_factory=dict)


class Pod(msgspec.Struct, frozen=True):
    metadata: Labelled


def team(pod: Pod) -> str | None:
    """What is kept of a pod: its team; nothing of pods without one."""
    return pod.metadata.labels.get("team")


Told = list[Sequence[Change[str]]]


@contextmanager
def teams(api: ObjectApi, told: Told) -> Iterator[WatchCache[Pod, str]]:
    cache = WatchCache(api.server.client(), PODS, Pod, team, told.append)
    with in_thread(cache.run, api.end_watches):
        eventually(lambda: api.count("watch"), "a watch was begun")
        yield cache


def put_pod(api: ObjectApi, namespace: str, name: str, *, phase: str = "", **labels: str) -> int:
    path = f"/api/v1/namespaces/{namespace}/pods/{name}"
    stored = api.store(path, metadata={"name": name, "labels": labels}, status={"phase": phase})
    return int(stored["metadata"]["resourceVersion"])


def test_what_is_kept_is_a_projection_by_namespace_and_name(api: SliceApi) -> None:
    put_pod(api, "one", "pod", team="red")
    put_pod(api, "two", "pod", team="blue")
    put_pod(api, "two", "other")
    with teams(api, []) as cache:
        assert cache.snapshot() == {Key("one", "pod"): "red", Key("two", "pod"): "blue"}


def test_changes_are_told_with_key_old_and_new_value_and_only_when_the_value_changed(api: SliceApi) -> None:
    put_pod(api, "one", "early", team="red")
    told: Told = []
    with teams(api, told) as cache:
        put_pod(api, "one", "late", team="blue")
        put_pod(api, "one", "late", team="blue", phase="Running")
        put_pod(api, "one", "late", team="green")
        put_pod(api, "one", "late")
        put_pod(api, "one", "late", team="grey")
        api.drop("/api/v1/namespaces/one/pods/late")
        put_pod(api, "one", "nobody")
        assert cache.wait_for_version(put_pod(api, "one", "nobody", phase="Failed"), 60)
    late = Key("one", "late")
    assert told == [
        [Change(Key("one", "early"), None, "red")],
        [Change(late, None, "blue")],
        [Change(late, "blue", "green")],
        [Change(late, "green", None)],
        [Change(late, None, "grey")],
        [Change(late, "grey", None)],
    ]


def test_a_new_list_tells_what_happened_meanwhile_at_once(api: SliceApi) -> None:
    put_pod(api, "one", "stays", team="red")
    put_pod(api, "one", "changes", team="red")
    put_pod(api, "one", "goes", team="red")
    told: Told = []
    with teams(api, told):
        with api._changed:
            api.end_watches()
            put_pod(api, "one", "changes", team="blue")
            put_pod(api, "one", "comes", team="blue")
            api.drop("/api/v1/namespaces/one/pods/goes")
            api._events.clear()  # nobody was told
            api.forget_history()
        eventually(lambda: len(told) > 1, "a new list")
    assert len(told) == 2
    assert {change.key.name: (change.old, change.new) for change in told[1]} == {
        "changes": ("red", "blue"),
        "comes": (None, "blue"),
        "goes": ("red", None),
    }


def test_an_empty_list_is_told_too_so_that_waiting_for_it_ends(api: SliceApi) -> None:
    told: Told = []
    with teams(api, told):
        assert told == [[]]


def is_at(cache: WatchCache[Any, Any], version: int) -> bool:
    """Whether everything up to ``version`` was processed, and nothing later."""
    return cache.wait_for_version(version, 0) and not cache.wait_for_version(version + 1, 0)


def test_a_version_is_reached_when_its_event_was_processed_even_if_nothing_of_it_is_kept(api: SliceApi) -> None:
    with teams(api, []) as cache:
        assert cache.wait_for_version(put_pod(api, "one", "nobody"), 60)
        assert is_at(cache, api._version)


def test_a_version_that_never_comes_is_waited_for_no_longer_than_said(api: SliceApi) -> None:
    with teams(api, []) as cache:
        assert not cache.wait_for_version(10**9, 0.01)


def test_a_version_is_reached_only_after_the_change_was_told(api: SliceApi) -> None:
    told_at: list[bool] = []
    going_on = threading.Event()

    def slow(changes: Sequence[Change[str]]) -> None:
        if changes:
            going_on.wait(60)
            told_at.append(True)

    cache = WatchCache(api.server.client(), PODS, Pod, team, slow)
    with in_thread(cache.run, api.end_watches):
        eventually(lambda: api.count("watch"), "a watch was begun")
        version = put_pod(api, "one", "pod", team="red")
        eventually(lambda: cache.get(Key("one", "pod")), "the value is there")
        assert not cache.wait_for_version(version, 0.01)
        going_on.set()
        assert cache.wait_for_version(version, 60)
        assert told_at


def test_our_own_write_shows_but_says_nothing_of_what_others_wrote_before(api: SliceApi) -> None:
    told: Told = []
    with teams(api, told) as cache:
        eventually(lambda: cache.synced, "the list")
        before = api._version
        cache.observe(
            {"metadata": {"namespace": "n", "name": "x", "resourceVersion": "900", "labels": {"team": "red"}}}
        )
        assert cache.get(Key("n", "x")) == "red"
        assert is_at(cache, before)


def test_the_late_answer_to_a_write_does_not_bring_back_what_was_deleted_since(api: SliceApi) -> None:
    with cache_of(api) as cache:
        eventually(lambda: cache.synced, "the list")
        watching(api)
        stored = api.put("slice")
        api.remove("slice")
        assert cache.wait_for_version(api._version, 60)
        cache.observe(stored)
        assert not cache.snapshot()


def test_a_cluster_restored_from_a_backup_is_taken_as_it_is(api: SliceApi) -> None:
    api.put("old")
    with cache_of(api) as cache:
        watching(api)
        with api._changed:
            api.objects.clear()
            api._version = 50
            api._events.clear()
            api.objects["restored"] = {"metadata": {"name": "restored", "uid": "u", "resourceVersion": "40"}}
        api.once("watch", refuse(410))
        api.end_watches()
        same(cache, api)
        eventually(lambda: is_at(cache, 50), "the version of the backup")
