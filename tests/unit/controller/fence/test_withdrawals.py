"""From an offer that is wanted no longer to a device that may leave the slices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from controller.cluster.claim_index import PoolDevice
from controller.fence.fence import Fence, FenceSettings
from controller.fence.withdrawals import Withdrawals
from tests.support.fence_race import POOL, ClaimsCache, allocate, claims_cache, new_claim
from tests.support.running import eventually, in_thread
from tests.unit.controller.fence.test_fence import FencedApi

A, B, C = (PoolDevice(POOL, f"gpu-{number}") for number in range(3))
LINGER_S = 10.0


class Taking:
    """Withdrawals on a clock that stands still, and what they said last."""

    def __init__(self, api: FencedApi, claims: ClaimsCache) -> None:
        self.now = 100.0
        self.claims = claims
        self.fence = Fence(api.server.client(), claims, FenceSettings(settle_s=0))
        self.changes = 0
        self.withdrawals = Withdrawals(self.fence, self.changed, LINGER_S, lambda: self.now)

    def changed(self) -> None:
        self.changes += 1

    def decide(self, *excess: PoolDevice, published: tuple[PoolDevice, ...] = (A, B, C)) -> frozenset[PoolDevice]:
        return self.withdrawals.decide(excess, published.__contains__)

    def after(self, seconds: float) -> None:
        """Time passes, and the work that is due is done."""
        self.now += seconds
        before = self.changes
        with in_thread(self.withdrawals.loop.run, self.withdrawals.loop.notify):
            self.withdrawals.loop.notify()
            eventually(lambda: self.changes > before, "it was taken back")


@pytest.fixture
def api() -> Iterator[FencedApi]:
    with FencedApi() as api:
        yield api


@pytest.fixture
def taking(api: FencedApi) -> Iterator[Taking]:
    with claims_cache(api.server.client(), api.end_watches) as claims:
        yield Taking(api, claims)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.fence.withdrawals.COALESCE_SECONDS", 0)


def test_a_device_lingers_before_it_is_fenced_and_may_go(api: FencedApi, taking: Taking) -> None:
    assert taking.decide(A, B) == frozenset()
    assert taking.withdrawals._take_back() == LINGER_S
    assert not api.fenced()
    taking.now += LINGER_S
    taking.withdrawals._take_back()
    assert api.fenced() == {A, B}
    assert taking.decide(A, B) == {A, B}
    assert taking.changes == 1


def test_what_is_wanted_again_before_it_is_ripe_is_not_fenced(api: FencedApi, taking: Taking) -> None:
    taking.decide(A, B)
    taking.now += LINGER_S - 1
    taking.decide(B)
    taking.decide(A, B)
    taking.now += 1
    assert taking.withdrawals._take_back() == LINGER_S - 1
    assert api.fenced() == {B}
    assert taking.decide(A, B) == {B}


def test_what_is_wanted_again_afterwards_may_no_longer_go(api: FencedApi, taking: Taking) -> None:
    taking.decide(A, B)
    taking.after(LINGER_S)
    assert taking.decide(A) == {A}
    taking.fence.lift([B])
    assert taking.decide(A, B) == {A}


def test_what_has_left_the_slices_is_forgotten(taking: Taking) -> None:
    taking.decide(A, B)
    taking.after(LINGER_S)
    assert taking.decide(A, B, published=(B,)) == {B}


def test_what_is_no_longer_fenced_may_not_go(taking: Taking) -> None:
    """Its time has run out before the node took it away, or a node alone has lifted it."""
    taking.decide(A, B)
    taking.after(LINGER_S)
    taking.fence.lift([B])
    assert taking.decide(A, B) == {A}


def test_what_somebody_was_given_meanwhile_stays(api: FencedApi, taking: Taking) -> None:
    client = api.server.client()
    taking.decide(A, B)
    allocate(client, new_claim(client, "holder"), A)
    taking.after(LINGER_S)
    assert taking.decide(A, B) == {B}
    assert api.fenced() == {B}


def test_a_fence_that_an_earlier_leader_writes_late_wakes_the_decision_that_lifts_it(
    api: FencedApi, taking: Taking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.fence.fenced_devices.REREAD_SECONDS", 0)
    monkeypatch.setattr("controller.fence.withdrawals.REREAD_SECONDS", 0.01)
    earlier = Fence(api.server.client(), taking.claims, FenceSettings(settle_s=0))
    earlier.start([])
    taking.fence.start([])
    with in_thread(taking.withdrawals.loop.run, taking.withdrawals.loop.notify):
        taking.withdrawals.loop.notify()
        earlier.take_back([A])
        eventually(lambda: taking.changes > 0, "it was noticed")
    assert A in taking.fence.fenced.devices
