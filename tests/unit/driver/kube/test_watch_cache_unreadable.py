"""A watch cache and objects that it can't read: all others go on, and it says when it no longer knows what there is."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import pytest

from driver.kube import watch_cache
from driver.kube.types import ObjectMeta
from driver.kube.watch_cache import WatchCache
from driver.kube.work_loop import Backoff
from tests.support.api_server import SLICES, Exchange, SliceApi
from tests.support.clock import FakeClock
from tests.support.running import eventually, in_thread


class Spec(msgspec.Struct, frozen=True):
    count: int = 0


class Counted(msgspec.Struct, frozen=True):
    metadata: ObjectMeta
    spec: Spec = Spec()


@pytest.fixture
def api() -> Iterator[SliceApi]:
    with SliceApi(page=2) as api:
        yield api


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_cache, "Backoff", partial(Backoff, first_s=0.01))


def not_13(item: Counted) -> int:
    if item.spec.count == 13:
        raise ArithmeticError("unlucky")
    return item.spec.count


@contextmanager
def counting(
    api: SliceApi,
    clock: Callable[[], float] = lambda: 0.0,
) -> Iterator[WatchCache[Counted, int]]:
    cache = WatchCache(api.server.client(), SLICES, Counted, not_13, clock=clock)
    with in_thread(cache.run, api.end_watches):
        eventually(lambda: api.count("watch") and cache.synced, "it watches")
        yield cache


def counts(cache: WatchCache[Counted, int]) -> dict[str, int]:
    return {key.name: count for key, count in cache.snapshot().items()}


@pytest.mark.parametrize(
    ("spec", "why"), [({"count": "many"}, "Expected `int`, got `str`"), ({"count": 13}, "ArithmeticError: unlucky")]
)
def test_an_object_that_cannot_be_read_is_named_once_and_the_others_are_read(
    api: SliceApi, caplog: pytest.LogCaptureFixture, spec: dict[str, Any], why: str
) -> None:
    for number in range(3):
        api.put(f"slice-{number}", spec={"count": number})
    api.put("slice-1", spec=spec)
    with counting(api) as cache, caplog.at_level(logging.WARNING):
        assert counts(cache) == {"slice-0": 0, "slice-2": 2}
        api.put("slice-1", spec=spec)
        api.forget_history()
        api.end_watches()
        api.put("slice-3", spec={"count": 3})
        eventually(lambda: counts(cache) == {"slice-0": 0, "slice-2": 2, "slice-3": 3}, "the others")
        (unreadable,) = cache.unreadable
        assert unreadable.metadata.name == "slice-1"
        assert why in unreadable.why
    assert caplog.text.count("an object can't be read") == 1
    assert "Traceback" not in caplog.text


def test_an_object_that_can_no_longer_be_read_keeps_its_last_value_until_it_is_deleted(api: SliceApi) -> None:
    api.put("slice-0", spec={"count": 5})
    with counting(api) as cache:
        api.put("slice-0", spec={"count": "many"})
        eventually(lambda: cache.unreadable, "it can't be read")
        assert counts(cache) == {"slice-0": 5}
        api.forget_history()
        api.end_watches()
        eventually(lambda: api.count("list") > 1, "it is listed again")
        api.put("slice-1", spec={"count": 1})
        eventually(lambda: counts(cache) == {"slice-0": 5, "slice-1": 1}, "the value is kept")
        api.drop(f"{SLICES}/slice-0")
        eventually(lambda: counts(cache) == {"slice-1": 1} and not cache.unreadable, "it is gone")


def test_an_object_that_can_be_read_again_is(api: SliceApi) -> None:
    with counting(api) as cache:
        api.put("slice-0", spec={"count": None})
        eventually(lambda: cache.unreadable, "it can't be read")
        api.put("slice-0", spec={"count": 4})
        eventually(lambda: counts(cache) == {"slice-0": 4} and not cache.unreadable, "it is read")


DEEP = '{"a":' * 1700 + "1" + "}" * 1700


def deep(name: str, version: int) -> str:
    metadata = f'{{"name":"{name}","resourceVersion":"{version}"}}'
    return f'{{"metadata":{metadata},"spec":{{"count":7,"opaque":{DEEP}}}}}'


def test_nesting_that_is_of_no_interest_disturbs_neither_list_nor_watch(
    api: SliceApi, caplog: pytest.LogCaptureFixture
) -> None:
    listed = f'{{"metadata":{{"resourceVersion":"100"}},"items":[{deep("listed", 99)}]}}'
    api.once("list", lambda exchange: exchange.send(200, listed.encode()))
    with counting(api) as cache:
        api.send_raw(f'{{"type":"ADDED","object":{deep("watched", 101)}}}'.encode())
        eventually(lambda: counts(cache) == {"listed": 7, "watched": 7}, "both are read")
        assert not cache.unreadable
    assert "watch failed" not in caplog.text


def test_a_cache_is_stale_before_its_first_list_and_when_nothing_arrives_for_two_minutes(api: SliceApi) -> None:
    clock = FakeClock()
    cache = WatchCache(api.server.client(), SLICES, Counted, not_13, clock=clock.monotonic)
    assert cache.stale() == f"{SLICES} has not been listed yet"
    with counting(api, clock=clock.monotonic) as cache:
        clock.advance(119)
        assert cache.stale() is None
        version = api.bookmark()
        eventually(lambda: cache.wait_for_version(version, 0), "the bookmark was read")
        clock.advance(119)
        assert cache.stale() is None
        clock.advance(2)
        assert cache.stale() == f"{SLICES} has brought nothing for 121 s"


def test_a_cache_whose_lists_are_refused_is_stale_after_fifteen_seconds_until_one_is_read(api: SliceApi) -> None:
    clock = FakeClock()
    refused = json.dumps({"kind": "Status", "message": "no", "code": 403}).encode()
    with counting(api, clock=clock.monotonic) as cache:
        api.once("watch", *(lambda exchange: exchange.send(403, refused) for _ in range(1000)))
        api.once("list", *(lambda exchange: exchange.send(403, refused) for _ in range(1000)))
        api.end_watches()
        eventually(lambda: api.count("list") > 1, "a list is refused")
        clock.advance(14)
        assert cache.stale() is None
        clock.advance(2)
        assert cache.stale() == f"{SLICES} can't be listed or watched for 16 s"
        api.as_usual()
        eventually(lambda: cache.stale() is None, "it is current again")


def test_a_watch_that_falls_silent_is_replaced_by_a_list(api: SliceApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_cache, "SILENCE_TIMEOUT_SECONDS", 0.2)

    def silent(exchange: Exchange) -> None:
        exchange.begin_stream()
        eventually(lambda: api.count("list") > 1, "it is listed again")

    api.once("watch", silent)
    with counting(api, clock=time.monotonic) as cache:
        api.put("slice-0", spec={"count": 3})
        eventually(lambda: counts(cache) == {"slice-0": 3}, "what happened meanwhile is known")


def nothing_at_all(exchange: Exchange) -> None:
    exchange.begin_stream()
    exchange.end_stream()


def nothing_until_the_client_gives_up(exchange: Exchange) -> None:
    exchange.begin_stream()
    exchange.rfile.read(1)


@pytest.mark.parametrize("watch", [nothing_at_all, nothing_until_the_client_gives_up])
def test_where_no_watch_brings_a_bookmark_everything_is_listed_in_time_again_and_again(
    api: SliceApi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, watch: Callable[[Exchange], None]
) -> None:
    monkeypatch.setattr(watch_cache, "SILENCE_TIMEOUT_SECONDS", 0.05)
    api.once("watch", *[watch] * 1000)
    with counting(api, clock=time.monotonic):
        eventually(lambda: api.count("list") > 9, "it is listed nine times")
    delays = [record.__dict__["retryIn"] for record in caplog.records if hasattr(record, "retryIn")]
    assert set(delays) <= {"0.0s"}
