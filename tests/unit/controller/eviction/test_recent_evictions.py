"""The record of evictions, as another leader reads it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from controller.eviction.gpu_policy import GpuPolicy
from controller.eviction.recent_evictions import (
    ANNOTATION,
    HISTORY_SECONDS,
    MAX_HISTORY_BYTES,
    MAX_RECORD_BYTES,
    RECORD_SECONDS,
    Eviction,
    RecentEvictions,
    Record,
)
from driver.errors import ApiError
from driver.kube.types import Metadata, Pod
from tests.support.api_server import Exchange
from tests.support.clock import FakeClock
from tests.support.evictions import ClusterApi
from tests.support.preemption import policy

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
    evictions = tuple(Eviction(f"uid-{n}", "team/" + "x" * 250, "n" * 250, clock.now().timestamp()) for n in range(369))
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


class OldEviction(msgspec.Struct, array_like=True):
    """As earlier versions write it."""

    pod: str
    owner: str
    node: str
    at: float
    policy: str = ""


class OldRecord(msgspec.Struct):
    evictions: tuple[OldEviction, ...] = ()
    asked_at: dict[str, float] = {}


def test_controllers_of_two_versions_count_the_evictions_of_each_other() -> None:
    full = Eviction("uid", "team/owner", "n", 1.5, "p", "team/serve", "preemption", "team/train", 2.5)
    short = OldEviction("uid", "team/owner", "n", 1.5, "p")
    assert msgspec.json.decode(msgspec.json.encode(Record((full,))), type=OldRecord) == OldRecord((short,))
    assert msgspec.json.decode(msgspec.json.encode(OldRecord((short,))), type=Record).evictions == (
        Eviction("uid", "team/owner", "n", 1.5, "p"),
    )


SMALL: GpuPolicy = policy("small", budget={"podsPerHour": 1})


def stored(api: ClusterApi) -> Record:
    text = api.folder(CONFIG_MAPS)["tessera-fence"]["metadata"]["annotations"][ANNOTATION]
    return msgspec.json.decode(text, type=Record)


@pytest.mark.parametrize(
    ("seconds", "counts", "is_shown"),
    [(0, True, True), (RECORD_SECONDS - 1, True, True), (RECORD_SECONDS, False, True), (HISTORY_SECONDS, False, False)],
)
def test_an_eviction_counts_for_an_hour_and_is_shown_for_a_day(
    api: ClusterApi, seconds: float, counts: bool, is_shown: bool
) -> None:
    clock = FakeClock()
    record = RecentEvictions(api.server.client(), "tessera", clock)
    record.refresh()
    record.add(pod("serve"), "team/deployment", "preemption", policy="small", contender="x/train", gpu_hours=1.5)
    clock.advance(seconds)
    record.refresh()
    assert record.of_owner("team/deployment", ()) == counts
    assert (record.limit([(pod("next"), SMALL)]) is not None) == counts
    [shown] = record.record.evictions or [None]
    assert (shown is not None) == is_shown
    if shown is not None:
        assert (shown.name, shown.trigger, shown.contender) == ("team/serve", "preemption", "x/train")


def test_a_long_record_forgets_first_what_does_not_count_any_more(api: ClusterApi) -> None:
    clock = FakeClock()
    names = [f"pod-{number:03}{'x' * 240}" for number in range(300)]
    record = RecentEvictions(api.server.client(), "tessera", clock)
    record.refresh()
    for name in names[:100]:
        record.add(pod(name), "team/deployment")
    clock.advance(RECORD_SECONDS)
    for name in names[100:]:
        record.add(pod(name), "team/deployment")
    kept = stored(api).evictions
    assert [past.name for past in kept] == [f"team/{name}" for name in names[100:]], "they are more than is kept"
    assert len(msgspec.json.encode(Record(kept))) > MAX_HISTORY_BYTES
    clock.advance(RECORD_SECONDS)
    record.add(pod("last"), "team/deployment")
    kept = stored(api).evictions
    assert kept[-1].name == "team/last"
    assert MAX_HISTORY_BYTES - 1500 < len(msgspec.json.encode(Record(kept))) <= MAX_HISTORY_BYTES
