"""The record of evictions, as another leader reads it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from controller.eviction.recent_evictions import ANNOTATION, MAX_RECORD_BYTES, Eviction, RecentEvictions, Record
from driver.errors import ApiError
from driver.kube.types import Metadata, Pod
from tests.support.api_server import Exchange
from tests.support.clock import FakeClock
from tests.support.evictions import ClusterApi

CONFIG_MAPS = "/api/v1/namespaces/tessera/configmaps"


@pytest.fixture
def api() -> Iterator[ClusterApi]:
    with ClusterApi() as api:
        yield api


def pod(name: str) -> Pod:
    return Pod(Metadata(name=name, namespace="team", uid=f"uid-of-{name}"))


def test_a_refused_eviction_does_not_come_back_when_the_record_is_read_again(api: ClusterApi) -> None:
    record = RecentEvictions(api.server.client(), "tessera", FakeClock())
    record.refresh()
    record.add(pod("serve"), "team/deployment")
    record.discard(pod("serve"))
    record.refresh()
    assert record.of_owner("team/deployment", ()) == 0


def test_a_refused_eviction_is_forgotten_here_even_if_the_api_server_cannot_be_told(api: ClusterApi) -> None:
    record = RecentEvictions(api.server.client(), "tessera", FakeClock())
    record.refresh()
    record.add(pod("serve"), "team/deployment")

    def forbid(exchange: Exchange) -> None:
        exchange.refuse(403, "not any more")

    api.once("PATCH", forbid)
    record.discard(pod("serve"))
    assert record.of_owner("team/deployment", ()) == 0


def test_nodes_that_go_on_asking_are_remembered_by_another_leader(api: ClusterApi) -> None:
    clock = FakeClock()
    nodes = {f"n{number}" for number in range(20)}
    RecentEvictions(api.server.client(), "tessera", clock).asking(nodes, 600)
    clock.advance(300)
    RecentEvictions(api.server.client(), "tessera", clock).asking(nodes, 600)
    clock.advance(301)
    assert RecentEvictions(api.server.client(), "tessera", clock).asking({"n0"}, 600) == nodes


def test_nodes_that_ask_often_are_not_written_each_time(api: ClusterApi) -> None:
    clock = FakeClock()
    record = RecentEvictions(api.server.client(), "tessera", clock)
    record.asking({"n0"}, 600)
    written = api.folder(CONFIG_MAPS)["tessera-fence"]["metadata"]["resourceVersion"]
    for _ in range(10):
        clock.advance(10)
        record.asking({"n0"}, 600)
    assert api.folder(CONFIG_MAPS)["tessera-fence"]["metadata"]["resourceVersion"] == written


def test_nobody_is_evicted_once_the_record_is_longer_than_the_api_server_takes(api: ClusterApi) -> None:
    clock = FakeClock()
    evictions = tuple(Eviction(f"uid-{n}", "team/" + "x" * 250, "n" * 250, clock.now().timestamp()) for n in range(379))
    text = msgspec.json.encode(Record(evictions)).decode()
    assert MAX_RECORD_BYTES - 4000 < len(text) < MAX_RECORD_BYTES
    api.store(f"{CONFIG_MAPS}/tessera-fence", metadata={"annotations": {ANNOTATION: text}})
    record = RecentEvictions(api.server.client(), "tessera", clock)
    record.refresh()

    def evict_many() -> None:
        for number in range(100):
            record.add(pod(f"serve-{number}"), "team/deployment")

    with pytest.raises(ApiError, match="no pod is evicted"):
        evict_many()
    stored = api.folder(CONFIG_MAPS)["tessera-fence"]["metadata"]["annotations"][ANNOTATION]
    assert len(text) < len(stored) <= MAX_RECORD_BYTES
