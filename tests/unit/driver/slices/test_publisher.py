"""The publisher against a real HTTP server: the slices there become the desired ones, and stay so."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from driver.errors import ApiError
from driver.kube import work_loop as loop
from driver.kube.work_loop import Backoff
from driver.slices import publisher
from driver.slices.build import Content
from driver.slices.publisher import PresentSlices, Publisher, SliceWriteObserver
from driver.slices.slice_names import Pool
from tests.support.api_server import SliceApi
from tests.support.running import eventually, in_thread

POOL = Pool("node-a", "gpu.tessera.dev")


@pytest.fixture
def api() -> Iterator[SliceApi]:
    with SliceApi() as api:
        yield api


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "Backoff", partial(Backoff, first_s=0.01))
    monkeypatch.setattr(publisher, "COALESCE_INTERVAL_SECONDS", 0.0)


class Node(SliceWriteObserver):
    """What the node plugin would publish, and a publisher for it."""

    def __init__(self, api: SliceApi) -> None:
        self.api = api
        self.contents: dict[str, Content] = {
            "00000-counters": {"sharedCounters": [{"name": "gpu-0", "counters": {}}]},
            "00100-devices": {"devices": [{"name": "gpu-0"}]},
        }
        self.client = api.server.client()
        self.monitors_now: dict[str, Content] | None = {}
        self.writes: list[tuple[int, float]] = []
        self.delay: Callable[[float | None], float] = at_once
        self.publisher = Publisher(self.client, POOL, self, observer=self)

    def desired(self, _slices: PresentSlices) -> Mapping[str, Content]:
        return copy.deepcopy(self.contents)

    def monitors(self) -> Mapping[str, Content] | None:
        return copy.deepcopy(self.monitors_now)

    def is_complete(self) -> bool:
        return True

    def creation_delay(self, absent_since: float | None) -> float:
        return self.delay(absent_since)

    def written(self, count: int, seconds: float) -> None:
        self.writes.append((count, seconds))

    def owner(self) -> Mapping[str, Any]:
        if self.api.node is None:
            raise ApiError("--node-name node-a: its Node object can't be read", 404)
        return {"kind": "Node", "name": "node-a", "uid": self.api.node["metadata"]["uid"]}

    def change(self, devices: list[dict[str, Any]]) -> None:
        self.contents["00100-devices"] = {"devices": devices}
        self.publisher.notify()

    def settled(self) -> None:
        """Wait until the server has what is desired."""
        eventually(lambda: self._there() == self.contents, "the slices are as desired")

    def _there(self) -> dict[str, Content]:
        with self.api._changed:
            objects = dict(self.api.objects)
        generations = {item["spec"]["pool"]["generation"] for item in objects.values()}
        counts = {item["spec"]["pool"]["resourceSliceCount"] for item in objects.values()}
        if len(generations) != 1 or counts != {len(self.contents)}:
            return {}
        keys = ("devices", "sharedCounters")
        return {name: {key: item["spec"][key] for key in keys if key in item["spec"]} for name, item in objects.items()}


def at_once(_absent_since: float | None) -> float:
    return 0.0


@contextmanager
def publishing(api: SliceApi, delay: Callable[[float | None], float] = at_once) -> Iterator[Node]:
    node = Node(api)
    node.delay = delay
    publisher = node.publisher
    with in_thread(publisher.cache.run, api.end_watches), in_thread(publisher.run, publisher.notify):
        yield node


def test_monitor_devices_have_a_pool_of_their_own_that_comes_and_goes_without_a_change_of_the_other(
    api: SliceApi,
) -> None:
    with publishing(api) as node:
        node.settled()
        before = {name: item["metadata"]["resourceVersion"] for name, item in api.objects.items()}
        node.monitors_now = {POOL.monitor_slice: {"devices": [{"name": "gpu-0-monitor"}, {"name": "gpu-1-monitor"}]}}
        node.publisher.notify()
        eventually(lambda: POOL.monitor_slice in api.objects, "the monitor devices are published")
        written = api.objects[POOL.monitor_slice]
        assert written["spec"]["pool"] == {
            "name": "node-a-gpu.tessera.dev-monitor", "generation": 1, "resourceSliceCount": 1,
        }  # fmt: skip
        assert len(written["spec"]["devices"]) == 2
        assert node.publisher.device_names() == {"gpu-0"}
        node.monitors_now = None
        node.change([{"name": "gpu-0"}, {"name": "gpu-1"}])
        eventually(lambda: len(api.objects["00100-devices"]["spec"]["devices"]) == 2, "the other pool is written")
        assert POOL.monitor_slice in api.objects
        node.change([{"name": "gpu-0"}])
        eventually(lambda: len(api.objects["00100-devices"]["spec"]["devices"]) == 1, "the other pool is written again")
        before = {name: item["metadata"]["resourceVersion"] for name, item in api.objects.items()}
        del before[POOL.monitor_slice]
        node.monitors_now = {}
        node.publisher.notify()
        eventually(lambda: POOL.monitor_slice not in api.objects, "they are gone")
        assert {name: item["metadata"]["resourceVersion"] for name, item in api.objects.items()} == before


def test_slices_are_created_complete_and_belong_to_the_node(api: SliceApi) -> None:
    with publishing(api) as node:
        node.settled()
    item = api.objects["00100-devices"]
    assert item["metadata"]["ownerReferences"] == [{"kind": "Node", "name": "node-a", "uid": "node-uid-1"}]
    assert item["spec"]["nodeName"] == "node-a"
    assert item["spec"]["pool"] == {"name": "node-a-gpu.tessera.dev", "generation": 1, "resourceSliceCount": 2}


def test_a_change_is_one_update_of_one_slice(api: SliceApi) -> None:
    with publishing(api) as node:
        node.settled()
        api.writes.clear()
        node.change([{"name": "gpu-0-mig-1g10gb-6"}])
        node.settled()
        assert api.writes == ["PUT 00100-devices"]


def test_only_rounds_that_wrote_something_are_measured(api: SliceApi) -> None:
    with publishing(api) as node:
        node.settled()
        eventually(node.publisher.published.is_set, "a round without writes")
        node.change([{"name": "gpu-7"}])
        node.settled()
        eventually(lambda: len(node.writes) == 2, "what the second round wrote is told")
    assert [slices for slices, _ in node.writes] == [2, 1]
    assert all(0 < seconds < 10 for _, seconds in node.writes)


def test_many_notifications_without_a_change_write_nothing(api: SliceApi) -> None:
    with publishing(api) as node:
        node.settled()
        eventually(node.publisher.published.is_set, "a round without writes")
        api.writes.clear()
        for _ in range(20):
            node.publisher.notify()
        node.change([{"name": "gpu-7"}])
        node.settled()
        assert api.writes == ["PUT 00100-devices"]


def test_deleted_edited_and_strange_slices_are_put_right(api: SliceApi) -> None:
    with publishing(api) as node:
        node.settled()
        edited = copy.deepcopy(api.objects["00100-devices"])
        edited["spec"]["devices"] = []
        api.put("00100-devices", **{key: value for key, value in edited.items() if key != "metadata"})
        api.remove("00000-counters")
        api.put("99999-stranger", spec=edited["spec"])
        node.settled()


def test_slices_that_all_vanish_come_back_when_they_may_and_single_ones_at_once(
    api: SliceApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "COALESCE_INTERVAL_SECONDS", 0.2)
    missing: list[float | None] = []

    def delay(absent_since: float | None) -> float:
        missing.append(absent_since)
        return 0.0 if absent_since is None else math.inf

    with publishing(api, delay) as node:
        node.settled()
        api.remove("00100-devices")
        node.settled()
        assert missing == [None]
        with api._changed:
            api.remove("00100-devices")
            api.remove("00000-counters")
        eventually(lambda: len(missing) > 1, "they are missed")
        node.publisher.notify()
        eventually(lambda: len(missing) > 2, "they are missed again")
        assert missing[1] is not None
        assert missing[1] == missing[2]
        assert not api.objects
        node.delay = at_once
        node.publisher.notify()
        node.settled()


def test_the_first_slices_wait_and_existing_ones_count_as_published(api: SliceApi) -> None:
    with publishing(api, lambda _: math.inf) as node:
        eventually(lambda: node.publisher.cache.synced, "it is known that there is none")
        node.publisher.notify()
        assert not node.publisher.published.wait(0.2)
        assert not api.objects
        node.delay = at_once
        node.publisher.notify()
        node.settled()
    with publishing(api, lambda _: math.inf) as node:
        eventually(node.publisher.published.is_set, "those of the last process are published")


def test_a_slice_of_the_same_name_in_another_pool_is_replaced(api: SliceApi) -> None:
    spec = {"driver": POOL.driver, "nodeName": "node-a", "devices": []}
    api.put("00100-devices", spec={**spec, "pool": {"name": "node-a", "generation": 3, "resourceSliceCount": 1}})
    with publishing(api) as node:
        node.settled()
    assert api.objects["00100-devices"]["spec"]["pool"]["name"] == POOL.name


def test_slices_wait_for_the_node_object(api: SliceApi, caplog: pytest.LogCaptureFixture) -> None:
    api.node = None
    with publishing(api) as node:
        eventually(lambda: caplog.records, "a warning")
        assert "its Node object can't be read" in vars(caplog.records[0])["error"]
        assert not api.objects
        api.node = {"metadata": {"uid": "late"}}
        node.settled()


def test_after_the_node_was_registered_anew_slices_belong_to_the_new_one(api: SliceApi) -> None:
    with publishing(api) as node:
        node.settled()
        api.node = {"metadata": {"uid": "node-uid-2"}}
        for name in list(api.objects):
            api.remove(name)  # the garbage collector: their owner is gone
        node.settled()
        assert {item["metadata"]["ownerReferences"][0]["uid"] for item in api.objects.values()} == {"node-uid-2"}


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(lambda exchange: exchange.refuse(500, "etcd"), id="500"),
        pytest.param(lambda exchange: exchange.refuse(409, "conflict"), id="409"),
        pytest.param(lambda exchange: exchange.refuse(403, "forbidden"), id="403"),
        pytest.param(lambda exchange: exchange.send(200, b"<html>"), id="no JSON"),
        pytest.param(lambda exchange: exchange.send(200, b"[]"), id="no object"),
        pytest.param(lambda exchange: exchange.send(200, b"{}"), id="an empty object"),
        pytest.param(lambda exchange: exchange.cut(), id="cut off"),
    ],
)
@pytest.mark.parametrize("kind", ["POST", "PUT"])
def test_a_write_that_fails_is_tried_again(api: SliceApi, kind: str, answer: Any) -> None:
    with publishing(api) as node:
        if kind == "POST":
            api.once(kind, answer)
        node.settled()
        if kind == "PUT":
            api.once(kind, answer)
            node.change([{"name": "gpu-9"}])
            node.settled()


@pytest.mark.parametrize("status", [403, 409, 500])
def test_a_deletion_that_fails_is_tried_again(api: SliceApi, status: int) -> None:
    with publishing(api) as node:
        node.settled()
        api.once("DELETE", lambda exchange: exchange.refuse(status, "no"))
        api.put("99999-stranger", spec=api.objects["00100-devices"]["spec"])
        node.settled()


def test_a_defect_of_ours_does_not_end_the_thread(api: SliceApi, caplog: pytest.LogCaptureFixture) -> None:
    node = Node(api)
    calls: list[None] = []

    def broken_once(_slices: PresentSlices) -> Mapping[str, Content]:
        calls.append(None)
        if len(calls) == 1:
            raise RuntimeError("a defect")
        return node.contents

    node.desired = broken_once  # type: ignore[method-assign]
    publisher = node.publisher
    with in_thread(publisher.cache.run, api.end_watches), in_thread(publisher.run, publisher.notify):
        node.settled()
    assert "a defect" in caplog.text


def test_dropped_fields_are_reported_once_and_not_written_for_ever(
    api: SliceApi, caplog: pytest.LogCaptureFixture
) -> None:
    def without_counters(item: dict[str, Any]) -> dict[str, Any]:
        return {**item, "spec": {key: value for key, value in item["spec"].items() if key != "sharedCounters"}}

    api.stored_as = without_counters
    with publishing(api) as node:
        eventually(node.publisher.published.is_set, "a round without writes")
        assert sorted(api.writes) == ["POST 00000-counters", "POST 00100-devices"]
        node.change([{"name": "gpu-5"}])
        eventually(lambda: "PUT 00100-devices" in api.writes, "the change")
        node.change([{"name": "gpu-6"}])
        eventually(lambda: api.writes.count("PUT 00100-devices") == 2, "the next change")
    assert api.writes.count("POST 00000-counters") == 1
    assert "PUT 00000-counters" not in api.writes
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [vars(record)["field"] for record in errors] == ["spec.sharedCounters"]


def test_two_publishers_of_one_content_end_in_agreement(api: SliceApi) -> None:
    """A second plugin by mistake, or the old one of a rolling update: conflicts are sorted out."""
    with publishing(api) as one, publishing(api) as two:
        one.settled()
        for node in (one, two):
            node.change([{"name": "gpu-3"}])
        one.settled()
        two.settled()
