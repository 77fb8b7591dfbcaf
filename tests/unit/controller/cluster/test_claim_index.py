"""All claims of the cluster: who waits, who holds what."""

from __future__ import annotations

import msgspec
import pytest

from controller.cluster.claim_index import ClaimIndex
from driver.kube.types import Claim, Key

DRIVER = "gpu.tessera.dev"
SMALL, OTHER = "gpu-0-mig-1g10gb-6", "gpu-0-mig-1g10gb-5"


def claim(name: str, *devices: str, pool: str = "a", driver: str = DRIVER, admin: bool = False) -> Claim:
    """One that has ``devices``, or waits."""
    results = [
        {"request": "gpu", "driver": driver, "pool": pool, "device": device, "adminAccess": admin} for device in devices
    ]
    status = {"allocation": {"devices": {"results": results}}} if devices else {}
    return msgspec.convert({"metadata": {"name": name, "namespace": "default", "uid": name}, "status": status}, Claim)


@pytest.fixture
def book() -> ClaimIndex:
    return ClaimIndex(DRIVER, [claim("one", SMALL), claim("two")])


def key(name: str) -> Key:
    return Key("default", name)


def test_a_claim_waits_until_it_has_devices(book: ClaimIndex) -> None:
    assert [each.metadata.name for each in book.unallocated] == ["two"]
    assert book.put(key("two"), claim("two", OTHER)) == {"a"}
    assert book.unallocated == ()
    assert {device: held.claim for device, held in book.held("a").items()} == {
        SMALL: "default/one",
        OTHER: "default/two",
    }


def test_what_a_claim_that_goes_had_is_held_no_more(book: ClaimIndex) -> None:
    assert book.put(key("one"), None) == {"a"}
    assert book.held("a") == {}
    assert book.allocation(key("one")) is None


def test_a_change_of_what_nobody_holds_is_no_news_of_any_pool(book: ClaimIndex) -> None:
    assert book.put(key("one"), claim("one", SMALL)) == set()
    assert book.put(key("three"), claim("three")) == set()


def test_a_device_that_two_claims_have_stays_held_while_one_of_them_has_it(book: ClaimIndex) -> None:
    book.put(key("two"), claim("two", SMALL))
    book.put(key("two"), None)
    assert book.held("a")[SMALL].claim == "default/one"
    book.put(key("one"), None)
    assert book.held("a") == {}


def test_admin_access_and_other_drivers_hold_nothing(book: ClaimIndex) -> None:
    assert book.put(key("three"), claim("three", OTHER, admin=True)) == set()
    assert book.put(key("four"), claim("four", OTHER, driver="nic.example.com")) == set()
    assert set(book.held("a")) == {SMALL}


def test_monitor_devices_are_held_in_a_pool_of_their_own(book: ClaimIndex) -> None:
    assert book.put(key("three"), claim("three", "gpu-0-monitor", pool="a-monitor", admin=True)) == {"a-monitor"}
    assert set(book.held("a-monitor")) == {"gpu-0-monitor"}
    assert set(book.held("a")) == {SMALL}


def test_a_reader_is_not_disturbed_by_what_comes_later(book: ClaimIndex) -> None:
    reading = book.view()
    book.put(key("two"), claim("two", OTHER))
    assert [each.metadata.name for each in reading.unallocated] == ["two"]


def test_a_pod_is_satisfied_when_all_of_its_claims_are(book: ClaimIndex) -> None:
    assert book.satisfies([key("one")])
    assert not book.satisfies([key("one"), key("two")])
    assert not book.satisfies([key("one"), key("unheard-of")])
    assert not book.satisfies([])
