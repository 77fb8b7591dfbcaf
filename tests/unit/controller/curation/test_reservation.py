"""Reservations: a large claim is not kept waiting for ever by small ones."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from itertools import chain

import pytest

from controller.curation.counters_planner import CountersPlanner
from controller.curation.disjoint_planner import DisjointPlanner
from controller.curation.reservation import WAIT_SECONDS, Reservations, apart, devices_for, without
from controller.explain.pipeline import reason_with_disjoint_offers
from controller.explain.situation import DisjointPlan
from driver.model.offer import DeviceKind, Offer, OfferKind, Spot
from driver.placement.ranking import Ranking
from tests.support.queues import FULL, Situation, fleet_gpu, profile, request

BUSY = fleet_gpu("a", 0, "NVIDIA H100 80GB HBM3", "mig-1g10gb-0", "mig-2g20gb-2", "mig-1g10gb-4")
BUSIER = fleet_gpu("a", 1, "NVIDIA H100 80GB HBM3", "mig-3g40gb-4", "mig-2g20gb-2", "mig-1g10gb-0")


class TestReservation:
    @pytest.fixture(autouse=True)
    def clock(self) -> None:
        self.now = 0.0
        self.reservations = Reservations(lambda: self.now)

    def planned(self, *gpus: object, small: int = 0, large: int = 1, after: float = 0.0) -> dict[str, set[str]]:
        """The GPUs of the planned devices by claim, ``after`` more seconds; claims for full GPUs are the oldest."""
        self.now += after
        there = Situation([*gpus])  # type: ignore[list-item]
        for at in range(large):
            there.wants(request(selector=FULL), name=f"large-{at}", priority=1)
        for at in range(small):
            there.wants(request(selector=profile("1g.10gb")), name=f"small-{at}")
        queue = there.queue
        reserved = self.reservations.update(queue)
        found = DisjointPlanner(Ranking()).curate(queue, [], {}, reserved)
        plan = DisjointPlan(found.by_claim or {}, (), 1)
        reasons = (reason_with_disjoint_offers(pending, queue, plan) for pending in queue.pending)
        self.reasons = {reason.pending.key: reason.sentence for reason in reasons if reason is not None}
        self.offered = {offer.gpu for offer in found.offers}
        return {key.removeprefix("default/"): gpus_of(offers) for key, offers in (found.by_claim or {}).items()}

    def test_after_two_minutes_nothing_new_is_offered_on_the_gpu_with_the_most_free_memory(self) -> None:
        assert self.planned(BUSIER, BUSY, small=2).keys() == {"small-0", "small-1"}
        assert self.offered == {"a/0", "a/1"}
        assert self.planned(BUSIER, BUSY, small=2, after=WAIT_SECONDS) == {"small-0": {"a/1"}}
        assert self.offered == {"a/1"}
        assert "planned for default/small-0" in self.reasons["default/small-1"]

    def test_the_reservation_ends_when_the_gpu_is_free(self) -> None:
        self.planned(BUSIER, BUSY)
        self.planned(BUSIER, BUSY, after=WAIT_SECONDS)
        assert self.planned(BUSIER, BUSY.unheld, small=1, after=1) == {"large-0": {"a/0"}, "small-0": {"a/1"}}

    def test_the_reservation_ends_with_the_pod(self) -> None:
        self.planned(BUSIER, BUSY)
        self.planned(BUSIER, BUSY, after=WAIT_SECONDS)
        self.planned(BUSIER, BUSY, large=0)
        assert self.offered == {"a/0", "a/1"}

    def test_one_pod_at_a_time_has_a_reservation(self) -> None:
        self.planned(BUSIER, BUSY, large=3)
        self.planned(BUSIER, BUSY, large=3, after=WAIT_SECONDS)
        assert self.offered == {"a/1"}


def gpus_of(offers: Iterable[object]) -> set[str]:
    return {offer.gpu for offer in offers}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("selector", "uid", "offered"),
    [
        pytest.param(FULL, "claim", set(), id="the GPU is not free yet"),
        pytest.param(
            profile("1g.10gb"),
            "claim",
            {f"a/0/1g.10gb@{start}" for start in (1, 5, 6)},
            id="for a claim, next to others",
        ),
        pytest.param(profile("1g.20gb"), "pod-of-claim", {"a/0/1g.20gb@6"}, id="for a pod"),
        pytest.param(FULL, "another", set(), id="nothing for the next pod of an owner that has none yet"),
    ],
)
def test_of_a_gpu_that_is_reserved_for_a_pod_only_what_it_may_have_is_offered(
    selector: str, uid: str, offered: set[str]
) -> None:
    queue = Situation([BUSY, BUSIER]).wants(request(selector=selector)).queue
    devices = devices_for(queue, {"a/0": {uid}})
    assert {str(offer) for offer in chain(*devices.values())} == offered
    others = CountersPlanner().curate(without(queue.feasibility.fleet, {"a/0"}))
    assert {offer.gpu for offer in others} == {"a/1"}


def test_disjoint_offers_of_reserved_gpus_do_not_overlap_and_are_as_many_as_the_claims_ask_for() -> None:
    """Published ones come first."""
    queue = Situation([BUSY]).wants(request(selector=profile("1g.10gb"), count=2)).queue
    devices = devices_for(queue, {"a/0": {"claim"}})
    published = Offer("a/0", Spot(OfferKind(DeviceKind.PARTITION, "1g.10gb"), 6))
    assert [str(offer) for offer in apart(queue, devices, {published})["default/claim"]] == [
        "a/0/1g.10gb@6",
        "a/0/1g.10gb@1",
    ]
    both = (
        Situation([BUSY.unheld]).wants(request(selector=FULL), name="x").wants(request(selector=FULL), name="y").queue
    )
    devices = devices_for(both, {"a/0": {"x", "y"}})
    assert {key: len(of) for key, of in devices.items()} == {"default/x": 1, "default/y": 1}
    assert apart(both, devices, ()).keys() == {"default/x"}


def test_a_claim_of_very_many_pods_costs_little_memory() -> None:
    """Tenants choose how many pods share one, also while GPUs are reserved for others."""
    there = Situation([BUSY])
    there.claim("claim", request(selector=FULL))
    for number in range(1000):
        there.pod(f"pod-{number}", "claim")
    queue = there.queue
    tracemalloc.start()
    offers = devices_for(queue, {"a/0": {"another"}})
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert offers == {}
    assert most < 1_000_000
