"""What is to be offered: the states of offers, and those that a nominated pod may already have."""

from __future__ import annotations

import pytest

from controller.curation.planner import PlannedOffers
from controller.decision.choose import NOMINATED_SECONDS, ChosenOffers, NominatedPods, WaitsFor
from driver.model.offer import DeviceKind, Offer, OfferKind, Spot
from tests.support.queues import FULL, Situation, fleet_gpu, profile, request
from tests.unit.controller.decision.test_plan_writer import OTHER, SMALL, offer


def test_an_offer_that_waits_is_wanted_and_not_possible() -> None:
    small, other = offer(SMALL), offer(OTHER)
    offers = ChosenOffers(PlannedOffers((small, other), frozenset()), frozenset({small, other}), frozenset())
    offers = offers.let_wait([small], WaitsFor.FENCE)
    assert offers.possible == {other}
    assert offers.waiting_for(WaitsFor.FENCE) == {small}
    assert offers.waiting_for(WaitsFor.CLAIMS) == set()


class TestNominatedPods:
    OFFERS = (
        Offer("a/0", Spot(OfferKind(DeviceKind.FULL))),
        Offer("a/1", Spot(OfferKind(DeviceKind.PARTITION, "1g.10gb"), 6)),
        Offer("a/1", Spot(OfferKind(DeviceKind.PARTITION, "3g.40gb"), 0)),
        Offer("b/0", Spot(OfferKind(DeviceKind.PARTITION, "1g.10gb"), 6)),
    )

    @pytest.fixture(autouse=True)
    def clock(self) -> None:
        self.now = 0.0
        self.nominated = NominatedPods(lambda: self.now)

    def protected(self, node: str, selector: str = profile("1g.10gb")) -> set[str]:
        there = Situation([fleet_gpu("a", 0), fleet_gpu("a", 1), fleet_gpu("b", 0)])
        there.wants(request(selector=selector), status={"nominatedNodeName": node})
        return {str(offer) for offer in self.nominated.update(there.queue, self.OFFERS)}

    def test_offers_that_match_on_the_nominated_node_are_protected(self) -> None:
        assert self.protected("a") == {"a/1/1g.10gb@6"}
        assert self.protected("b") == {"b/0/1g.10gb@6"}
        assert self.protected("a", FULL) == {"a/0/full"}

    def test_nothing_is_protected_for_a_pod_that_is_not_nominated_or_for_an_unknown_node(self) -> None:
        assert self.protected("") == set()
        assert self.protected("gone") == set()

    def test_the_protection_ends_for_a_pod_that_is_never_bound(self) -> None:
        self.protected("a")
        self.now += NOMINATED_SECONDS - 1
        assert self.protected("a") == {"a/1/1g.10gb@6"}
        self.now += 1
        assert self.protected("a") == set()
        assert self.protected("b") == {"b/0/1g.10gb@6"}
