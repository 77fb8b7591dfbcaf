"""What prepared claims say about their devices, and the writer that keeps it so, against a real HTTP server."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.clock import seconds_time
from driver.kube import work_loop as loop
from driver.kube.events import Type
from driver.kube.types import Reference
from driver.kube.work_loop import Backoff
from driver.model.gpu_settings import TimeSlice
from driver.model.offer import DeviceKind
from kubelet_plugin.checkpoint.records import VERSION, ClaimRecord, DeviceRecord
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.status import claim_status as module
from kubelet_plugin.status.claim_status import StatusWriter, device_statuses, status_path
from kubelet_plugin.status.events import PluginEvents
from tests.support.api_server import Exchange, HttpServer
from tests.support.claims import DRIVER, POOL
from tests.support.running import eventually, in_thread

BEGAN = datetime(2026, 11, 21, 8, 0, tzinfo=UTC)


def claim(name: str, uid: str = "") -> ClaimReference:
    return ClaimReference("default", name, uid or f"uid-{name}")


def prepared(name: str, device: str, gpu: str, kind: DeviceKind, **fields: Any) -> ClaimRecord:
    """The record of a claim with one device."""
    entry = DeviceRecord((), POOL, device, 0, gpu, kind, **fields)
    return ClaimRecord(VERSION, "default", name, f"uid-{name}", "prepared", (entry,))


def full(name: str, gpu: str = "GPU-0") -> ClaimRecord:
    return prepared(name, gpu.lower(), gpu, DeviceKind.FULL)


def share(name: str, number: int = 0, asked: TimeSlice | None = None, gpu: str = "GPU-0") -> ClaimRecord:
    return prepared(name, f"{gpu.lower()}-share-{number}", gpu, DeviceKind.SHARE, shares=10, time_slice=asked)


class ClaimApi:
    """Claims behind an HttpServer: read, and their status applied. Thread-safe enough for one writer."""

    def __init__(self) -> None:
        self.claims: dict[str, dict[str, Any]] = {}
        self.reads: list[str] = []
        self.applied: list[str] = []
        self.refusals: list[tuple[str, int, str]] = []
        """(claim, status, message): the next answers to its writer, in order."""
        self.server = HttpServer(self._answer)

    def allocate(self, *names: str) -> None:
        for name in names:
            self.claims[name] = {"metadata": {"name": name, "uid": f"uid-{name}"}, "status": {"allocation": {"a": 1}}}

    def entries(self, name: str) -> list[dict[str, Any]]:
        return list(self.claims[name]["status"].get("devices", ()))

    def entry(self, name: str) -> dict[str, Any]:
        (only,) = self.entries(name)
        return only

    def _answer(self, exchange: Exchange) -> None:
        name = exchange.route.removesuffix("/status").rpartition("/")[2]
        found = self.claims.get(name)
        if exchange.command == "GET":
            self.reads.append(name)
        else:
            self.applied.append(name)
            refusal = next((refusal for refusal in self.refusals if refusal[0] == name), None)
            if refusal is not None:
                self.refusals.remove(refusal)
                return exchange.refuse(*refusal[1:])
        if found is None:
            return exchange.refuse(404, f'resourceclaims "{name}" not found')
        if exchange.command == "GET":
            return exchange.send_json(found)
        return self._apply(exchange, found)

    def _apply(self, exchange: Exchange, found: dict[str, Any]) -> None:
        body = json.loads(exchange.body)
        assert exchange.headers["Content-Type"] == "application/apply-patch+yaml"
        assert exchange.query == {"fieldManager": DRIVER, "force": "true"}
        if body["metadata"]["uid"] != found["metadata"]["uid"]:
            return exchange.refuse(422, "metadata.uid: Invalid value: field is immutable")
        if "allocation" not in found["status"]:
            return exchange.refuse(422, "status.devices[0]: Invalid value: must be an allocated device in the claim")
        found["status"]["devices"] = body["status"]["devices"]
        return exchange.send_json(found)


class Node:
    """What is prepared, and the clock. Setting ``prepared`` tells the writer."""

    def __init__(self, api: ClaimApi) -> None:
        self.now = BEGAN
        self._prepared: tuple[ClaimRecord, ...] = ()
        self.writer = StatusWriter(
            api.server.client(), DRIVER, lambda: device_statuses(self._prepared), lambda: self.now
        )

    def prepare(self, *devices: ClaimRecord) -> None:
        self._prepared = devices
        self.writer.notify()


@pytest.fixture
def api() -> Iterator[ClaimApi]:
    api = ClaimApi()
    with api.server:
        yield api


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "Backoff", partial(Backoff, first_s=0.01))
    monkeypatch.setattr(module, "CLAIM_STATUS_COALESCE_SECONDS", 0.0)


@contextmanager
def writing(api: ClaimApi, *prepared: ClaimRecord) -> Iterator[Node]:
    """A node whose writer runs; ``prepared`` was prepared before it started."""
    node = Node(api)
    node.prepare(*prepared)
    with in_thread(node.writer.run, node.writer.notify):
        if not prepared:
            _wait_for_a_round(node)
        yield node


def _wait_for_a_round(node: Node) -> None:
    asked = threading.Event()
    desired = node.writer._desired

    def counted() -> Any:
        found = desired()  # first: what is prepared once it was asked for is news
        asked.set()
        return found

    node.writer._desired = counted
    node.writer.notify()
    eventually(asked.is_set, "a look at what is prepared")


def test_a_full_gpu_says_its_uuid_and_since_when_it_is_ready(api: ClaimApi) -> None:
    api.allocate("training")
    with writing(api) as node:
        node.prepare(full("training"))
        eventually(lambda: api.entries("training"), "the entry")
    assert api.entry("training") == {
        "driver": DRIVER,
        "pool": POOL,
        "device": "gpu-0",
        "conditions": [
            {
                "type": "Ready",
                "status": "True",
                "reason": "Prepared",
                "message": "the whole GPU",
                "lastTransitionTime": "2026-11-21T08:00:00Z",
            }
        ],
        "data": {"uuid": "GPU-0"},
    }
    assert api.reads == []


def test_a_partition_says_its_own_uuid_and_its_gpus() -> None:
    record = prepared("a", "gpu-0-mig-1g10gb-0", "GPU-0", DeviceKind.PARTITION, uuid="MIG-1")
    (status,) = device_statuses([record])[claim("a")]
    assert status.data == {"uuid": "MIG-1", "parentUUID": "GPU-0"}
    assert "isolated by hardware" in status.message


def test_a_share_says_how_many_share_the_gpu_and_the_interval_in_force() -> None:
    devices = [
        share("a", 0, TimeSlice.LONG),
        share("b", 1, TimeSlice.SHORT),
        share("c", 2),
        share("d", 0, TimeSlice.MEDIUM, "GPU-1"),
    ]
    found = device_statuses(devices)
    sharing = {name: found[claim(name)][0].data["sharing"] for name in "abcd"}
    assert sharing["a"] == sharing["b"] == sharing["c"] == {"shares": 10, "inUse": 3, "timeSlice": "Short"}
    assert sharing["d"] == {"shares": 10, "inUse": 1, "timeSlice": "Medium"}
    assert found[claim("a")][0].data["uuid"] == found[claim("a")][0].data["parentUUID"] == "GPU-0"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.booleans()), max_size=20))
def test_every_prepared_device_has_one_entry_and_the_order_of_preparing_changes_none(
    drawn: list[tuple[int, int, bool]],
) -> None:
    devices = [
        share(str(name), number, gpu=f"GPU-{gpu}") if shared else full(str(name), f"GPU-{gpu}")
        for number, (name, gpu, shared) in enumerate(drawn)
    ]
    found = device_statuses(devices)
    assert sum(len(entries) for entries in found.values()) == len(devices)
    again = device_statuses(reversed(devices))
    assert {key: sorted(map(str, value)) for key, value in found.items()} == {
        key: sorted(map(str, value)) for key, value in again.items()
    }


def test_when_a_neighbour_comes_the_others_say_so_and_stay_ready_since_they_were(api: ClaimApi) -> None:
    api.allocate("a", "b")
    with writing(api) as node:
        node.prepare(share("a"))
        eventually(lambda: api.entries("a"), "the entry")
        node.now += timedelta(minutes=5)
        node.prepare(share("a"), share("b", 1))
        eventually(lambda: api.entries("b"), "the neighbour's entry")
        eventually(lambda: api.entry("a")["data"]["sharing"]["inUse"] == 2, "two on the GPU")
        node.prepare(share("b", 1))
        eventually(lambda: api.entry("b")["data"]["sharing"]["inUse"] == 1, "one again")
    times = [api.entry(name)["conditions"][0]["lastTransitionTime"] for name in "ab"]
    assert times == [seconds_time(BEGAN), seconds_time(BEGAN + timedelta(minutes=5))]


def test_what_did_not_change_is_not_sent_again(api: ClaimApi) -> None:
    api.allocate("a", "b")
    with writing(api) as node:
        node.prepare(full("a"))
        eventually(lambda: api.entries("a"), "the entry")
        for _ in range(20):
            node.writer.notify()
        node.prepare(full("a"), full("b", "GPU-1"))
        eventually(lambda: api.entries("b"), "the other's entry")
    assert api.applied == ["a", "b"]


def test_after_a_restart_what_is_written_stays_and_keeps_its_time(api: ClaimApi) -> None:
    api.allocate("a", "b")
    with writing(api) as node:
        node.prepare(share("a"))
        eventually(lambda: api.entries("a"), "the entry")
    before, api.applied = api.entry("a"), []
    later = Node(api)
    later.now += timedelta(days=1)
    later.prepare(share("a"), full("b", "GPU-1"))
    with in_thread(later.writer.run, later.writer.notify):
        eventually(lambda: api.entries("b"), "what the process before had not written yet")
        assert (api.applied, api.entry("a")) == (["b"], before)
        later.prepare(share("a", asked=TimeSlice.LONG), full("b", "GPU-1"))
        eventually(lambda: api.entry("a")["data"]["sharing"]["timeSlice"] == "Long", "the change")
    assert api.entry("a")["conditions"][0]["lastTransitionTime"] == seconds_time(BEGAN)


@pytest.mark.parametrize("how", ["gone", "another", "another, told by 409", "deallocated", "gone before the start"])
def test_a_claim_that_is_gone_is_left_alone_and_the_others_go_on(api: ClaimApi, how: str) -> None:
    api.allocate("a", "b")
    if how.startswith("another"):
        api.claims["a"]["metadata"]["uid"] = "uid-new"
        api.refusals += [("a", 409, "Precondition failed: UID in precondition")] if "409" in how else []
    elif how == "deallocated":
        del api.claims["a"]["status"]["allocation"]
    else:
        del api.claims["a"]
    with writing(api, *([full("a")] if how == "gone before the start" else [])) as node:
        node.prepare(full("a"), full("b", "GPU-1"))
        eventually(lambda: api.entries("b"), "the other claim's entry")
        api.allocate("c")
        node.prepare(share("a"), full("b", "GPU-1"), full("c", "GPU-2"))
        eventually(lambda: api.entries("c"), "the third claim's entry")
    assert api.applied.count("a") == (0 if how == "gone before the start" else 1)
    assert "devices" not in api.claims.get("a", {"status": {}})["status"]


@pytest.mark.parametrize(
    ("status", "message"),
    [(500, "etcd is away"), (429, "slow down"), (409, "the object has been modified"), (422, "data: too long")],
)
def test_a_refusal_that_may_pass_is_tried_again_and_stops_no_other_claim(
    api: ClaimApi, status: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    api.allocate("a", "b")
    api.refusals += [("a", status, message)] * 3
    with writing(api) as node:
        node.prepare(full("a"), full("b", "GPU-1"))
        eventually(lambda: api.entries("a"), "the entry after all")
    assert api.applied.count("a") == 4
    assert api.applied.count("b") == 1
    assert message in str([record.__dict__ for record in caplog.records])


def test_an_api_server_that_is_away_gets_the_status_once_it_is_back(
    api: ClaimApi, caplog: pytest.LogCaptureFixture
) -> None:
    api.allocate("a")
    hang_up: list[Callable[[Exchange], None]] = [Exchange.cut] * 2
    answer = api.server.answer
    api.server.answer = lambda exchange: (hang_up.pop() if hang_up else answer)(exchange)
    with writing(api) as node:
        node.prepare(full("a"))
        eventually(lambda: api.entries("a"), "the entry")
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (403, 'User "x" cannot patch resource "resourceclaims/status"'),
        (422, 'status.devices: Forbidden: changing status.devices requires resource="resourceclaims/driver"'),
    ],
)
def test_a_missing_permission_is_said_once_with_the_role_it_takes(
    api: ClaimApi, status: int, message: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FORBIDDEN_RETRY_SECONDS", (0.01, 0.01))
    api.allocate("a")
    api.refusals += [("a", status, message)] * 3
    with writing(api) as node:
        node.prepare(full("a"))
        eventually(lambda: api.entries("a"), "the entry, once the role is there")
    (said,) = caplog.records
    assert said.levelno == logging.ERROR
    text = str(said.__dict__)
    for part in (message[:20], "resourceclaims/status: patch", "associated-node:patch", DRIVER):
        assert part in text


def test_a_missing_permission_is_not_tried_again_with_every_change(
    api: ClaimApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FORBIDDEN_RETRY_SECONDS", (600.0, 600.0))
    api.allocate("a", "b")
    api.refusals += [("a", 403, "forbidden")]
    with writing(api) as node:
        node.prepare(full("a"))
        eventually(lambda: api.applied, "the try")
        for _ in range(20):
            node.prepare(full("a"), full("b", "GPU-1"))
    assert api.applied == ["a"]


def test_an_api_server_that_forbids_it_for_a_moment_is_asked_again_soon(
    api: ClaimApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FORBIDDEN_RETRY_SECONDS", (0.01, 600.0))
    api.allocate("a")
    api.refusals += [("a", 403, "not yet ready to handle request")]
    with writing(api) as node:
        node.prepare(full("a"))
        eventually(lambda: api.entries("a"), "the entry")


def test_a_defect_in_what_is_desired_does_not_end_the_writer(api: ClaimApi, caplog: pytest.LogCaptureFixture) -> None:
    api.allocate("a")
    node = Node(api)
    answers: list[Callable[[], Any]] = [lambda: 1 // 0, lambda: device_statuses([full("a")])]
    node.writer._desired = lambda: answers.pop(0)() if len(answers) > 1 else answers[0]()
    with in_thread(node.writer.run, node.writer.notify):
        eventually(lambda: api.entries("a"), "the entry")
    assert "defect while writing claim status" in caplog.text


def test_the_status_is_a_subresource_of_the_claim() -> None:
    assert status_path(claim("a")) == "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/a/status"


def test_a_pod_is_told_once_that_its_device_became_unhealthy_also_by_a_plugin_that_has_started_since(
    api: ClaimApi,
) -> None:
    api.allocate("a")
    api.claims["a"]["status"]["reservedFor"] = [{"resource": "pods", "name": "user", "uid": "u"}]
    trouble, written = dict[str, str](), list[tuple[str, str, str]]()

    def record(about: Reference, reason: str, message: str, _type: Type, _series: str) -> None:
        written.append((about.kind, reason, message.partition(", so that")[0]))

    def is_told(message: str) -> bool:
        return bool(api.entry("a")["conditions"][0]["message"] == message)

    def process(*troubles: str) -> None:
        """One process of the plugin, which finds the claim prepared, and its device with these troubles."""
        node = Node(api)
        node.writer._events = PluginEvents(record, "node-a")
        node.writer._desired = lambda: device_statuses([full("a")], trouble.get)
        with in_thread(node.writer.run, node.writer.notify):
            eventually(lambda: api.entries("a"), "the entry")
            for message in troubles:
                trouble["gpu-0"] = message
                node.writer.notify()
                eventually(partial(is_told, message), "the trouble")

    process("xid-48: XID 48", "xid-48: XID 48")
    process("xid-48: XID 48", "needs-reset: NVML says so")
    said = "gpu-0, which the pod uses, is unhealthy: {}; its programs may fail: if they do, delete the pod"
    messages = [said.format("xid-48: XID 48"), said.format("needs-reset: NVML says so")]
    expected = [(kind, "DeviceUnhealthy", message) for message in messages for kind in ("ResourceClaim", "Pod")]
    assert written == expected


def test_a_device_that_is_not_well_says_why_and_since_when_and_is_ready_again(api: ClaimApi) -> None:
    api.allocate("a")
    trouble: dict[str, str] = {}
    with writing(api) as node:
        node.writer._desired = lambda: device_statuses([full("a")], trouble.get)
        node.prepare(full("a"))
        eventually(lambda: api.entries("a"), "the entry")
        node.now += timedelta(minutes=5)
        trouble["gpu-0"] = "XID 48: the GPU needs a reset"
        node.writer.notify()
        eventually(lambda: api.entry("a")["conditions"][0]["status"] == "False", "the trouble")
        bad = api.entry("a")["conditions"][0]
        node.now += timedelta(minutes=5)
        trouble.clear()
        node.writer.notify()
        eventually(lambda: api.entry("a")["conditions"][0]["status"] == "True", "the recovery")
    assert (bad["reason"], bad["message"]) == ("Unhealthy", "XID 48: the GPU needs a reset")
    assert bad["lastTransitionTime"] == seconds_time(BEGAN + timedelta(minutes=5))
    assert api.entry("a")["conditions"][0]["lastTransitionTime"] == seconds_time(BEGAN + timedelta(minutes=10))
