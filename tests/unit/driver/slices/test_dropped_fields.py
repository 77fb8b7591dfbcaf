"""What the API server keeps of a device: found before the first write, and whenever it may have changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from driver.errors import ApiError
from driver.slices import publisher
from driver.slices.build import Content, PublishedGpu
from driver.slices.dropped_fields import KeptFields
from driver.slices.publisher import PresentSlices, Publisher
from driver.slices.slice_names import Pool
from tests.support.api_server import Exchange, Object, SliceApi
from tests.support.gpus import gpu_of
from tests.support.running import eventually, in_thread

POOL = Pool("node-a", "gpu.tessera.dev")
SLICE = POOL.device_slice(0)
COUNTERS = {"consumesCounters": [{"counterSet": "gpu-0", "counters": {}}]}


def without(*fields: str) -> Callable[[Object], Object]:
    """What an API server makes of a slice that drops these fields of devices."""

    def stored(item: Object) -> Object:
        devices = item["spec"].get("devices", [])
        left = [{key: value for key, value in device.items() if key not in fields} for device in devices]
        return {**item, "spec": {**item["spec"], "devices": left}}

    return stored


def refuses(status: int) -> Callable[[Exchange], None]:
    return lambda exchange: exchange.refuse(status, "no")


@pytest.fixture
def api() -> Iterator[SliceApi]:
    with SliceApi() as api:
        yield api


@pytest.mark.parametrize(
    "dropped", [(), ("consumesCounters",), ("taints",), ("allowMultipleAllocations",), ("consumesCounters", "taints")]
)
def test_fields_that_a_dry_run_does_not_bring_back_are_not_kept(api: SliceApi, dropped: tuple[str, ...]) -> None:
    api.stored_as = without(*dropped)
    fields = KeptFields()
    fields.check(api.server.client(), POOL)
    assert fields.dropped == dropped
    assert not api.writes


@pytest.mark.parametrize("status", [400, 422])
def test_fields_that_the_api_server_refuses_are_not_kept(api: SliceApi, status: int) -> None:
    api.once("POST", refuses(status))
    fields = KeptFields()
    fields.check(api.server.client(), POOL)
    assert fields.dropped == ("consumesCounters", "taints", "allowMultipleAllocations")


@pytest.mark.parametrize("answer", [refuses(403), refuses(503), Exchange.cut])
def test_without_an_answer_nothing_is_assumed_and_the_next_attempt_asks_again(
    api: SliceApi, answer: Callable[[Exchange], None]
) -> None:
    api.once("POST", answer)
    api.stored_as = without("taints")
    fields = KeptFields()
    with pytest.raises(ApiError):
        fields.check(api.server.client(), POOL)
    fields.check(api.server.client(), POOL)
    fields.check(api.server.client(), POOL)
    assert fields.dropped == ("taints",)
    assert api.count("POST") == 2


@dataclass
class OneDevice:
    """A ``SliceSource`` of one device, by the fields that are kept."""

    device: Callable[[KeptFields], Content]
    fields: KeptFields

    def desired(self, _slices: PresentSlices) -> Mapping[str, Content]:
        return {SLICE: {"devices": [self.device(self.fields)]}}

    def monitors(self) -> Mapping[str, Content]:
        return {}

    def is_complete(self) -> bool:
        return True

    def creation_delay(self, absent_since: float | None) -> float:
        return 0.0

    def owner(self) -> Mapping[str, Any]:
        return {}


@contextmanager
def publishing(api: SliceApi, device: Callable[[KeptFields], Content]) -> Iterator[tuple[KeptFields, Publisher]]:
    """A publisher of one device."""
    fields = KeptFields(lambda: found.notify())
    client = api.server.client(observe=fields.observer(None))
    found = Publisher(client, POOL, OneDevice(device, fields), fields)
    with in_thread(found.cache.run, api.end_watches), in_thread(found.run, found.notify):
        eventually(found.published.is_set, "the slices are published")
        yield fields, found


def stored_devices(api: SliceApi) -> list[dict[str, Any]]:
    with api._changed:
        return list(api.objects.get(SLICE, {"spec": {}})["spec"].get("devices", ()))


def counted_if_kept(fields: KeptFields) -> Content:
    return {"name": "gpu-0", **({} if "consumesCounters" in fields.dropped else COUNTERS)}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "COALESCE_INTERVAL_SECONDS", 0.0)


def test_the_first_slices_have_no_field_that_would_be_dropped(api: SliceApi) -> None:
    api.stored_as = without("consumesCounters")
    with publishing(api, counted_if_kept):
        assert stored_devices(api) == [{"name": "gpu-0"}]
    assert api.writes == [f"POST {SLICE}"]


@pytest.mark.parametrize("hang_up", [False, True])
def test_an_upgrade_of_the_api_server_is_noticed_when_the_watch_of_slices_begins_anew(
    api: SliceApi, *, hang_up: bool
) -> None:
    api.stored_as = without("consumesCounters")
    with publishing(api, counted_if_kept) as (fields, _):
        api.stored_as = without()
        api.end_watches(hang_up=hang_up)
        eventually(lambda: stored_devices(api) == [{"name": "gpu-0", **COUNTERS}], "the device has counters")
        assert fields.dropped == ()


def test_a_field_that_a_write_loses_changes_what_is_published_next(api: SliceApi) -> None:
    """The dry run was answered by another API server."""

    def device(fields: KeptFields) -> Content:
        return {"name": "gpu-0", **COUNTERS} if "consumesCounters" not in fields.dropped else {"name": "gpu-1"}

    def old(item: Object) -> Object:
        return item if item["metadata"]["name"].startswith("dry-run-") else without("consumesCounters")(item)

    api.stored_as = old
    with publishing(api, device):  # a later dry run may say once more that the field is kept
        eventually(lambda: stored_devices(api) == [{"name": "gpu-1"}], "other devices are published")


def test_the_publisher_knows_which_slices_have_counters(api: SliceApi) -> None:
    with publishing(api, counted_if_kept) as (_, found):
        assert found.has_counters(PublishedGpu(gpu_of(), 0, (), ()))
        assert not found.has_counters(PublishedGpu(gpu_of(), 0, (), (), divided=True))
