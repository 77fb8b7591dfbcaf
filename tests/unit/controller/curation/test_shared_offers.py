"""Which GPUs are open to claims that share them by memory, with counters and with disjoint offers."""

from __future__ import annotations

from collections.abc import Iterable

from controller.curation.disjoint_planner import DisjointPlanner
from driver.model.offer import FULL as FULL_KEY
from driver.model.offer import SHARED as SHARED_KEY
from driver.model.offer import DeviceKind, Offer, Spot
from driver.placement.ranking import Ranking
from tests.support.planners import PLANNERS, Planned, disjoint, with_counters
from tests.support.queues import FULL, Situation, fleet_gpu, profile, request
from tests.support.shared_gpus import BY_MPS, memory, shared_gpu


def shared(gpu: str) -> Offer:
    return Offer(gpu, Spot(SHARED_KEY))


def open_gpus(offers: Iterable[Offer]) -> set[str]:
    assert len({*offers}) == len([*offers])
    return {offer.gpu for offer in offers if offer.spot == Spot(SHARED_KEY)}


def asked_for(there: Situation, *amounts: str) -> Situation:
    for number, amount in enumerate(amounts):
        there.wants(memory(amount), name=f"claim-{number}")
    return there


@PLANNERS
def test_a_gpu_with_room_stays_open_and_a_full_one_is_closed(planned: Planned) -> None:
    there = Situation([shared_gpu("a", 0, 79), shared_gpu("a", 1, 40, 40), shared_gpu("a", 2, 20)])
    assert open_gpus(planned(there, ())) == {"a/0", "a/2"}


@PLANNERS
def test_a_gpu_is_closed_whose_mps_server_serves_no_more_claims(planned: Planned) -> None:
    there = Situation([shared_gpu("a", number, *[1] * held, strategy=BY_MPS) for number, held in enumerate((48, 47))])
    assert open_gpus(planned(there, ())) == {"a/1"}


@PLANNERS
def test_another_gpu_is_opened_for_the_claims_that_an_mps_server_can_not_serve(planned: Planned) -> None:
    gpus = [shared_gpu("a", 0, *[1] * 46, strategy=BY_MPS), shared_gpu("a", 1, strategy=BY_MPS)]
    assert open_gpus(planned(asked_for(Situation(gpus), *["1Gi"] * 2), ())) == {"a/0"}
    assert open_gpus(planned(asked_for(Situation(gpus), *["1Gi"] * 3), ())) == {"a/0", "a/1"}


@PLANNERS
def test_a_gpu_with_claims_is_filled_before_a_second_is_opened(planned: Planned) -> None:
    gpus = [shared_gpu("a", 0), shared_gpu("a", 1, 10), shared_gpu("a", 2), shared_gpu("a", 3)]
    there = Situation(gpus)
    there.template("small", memory("6Gi"))
    assert open_gpus(planned(there, ())) == {"a/1"}
    assert open_gpus(planned(asked_for(there, *["6Gi"] * 11), ())) == {"a/1"}
    assert len(open_gpus(planned(asked_for(Situation(gpus), *["6Gi"] * 12), ()))) == 2


@PLANNERS
def test_few_gpus_are_open_before_any_claim_shares_one(planned: Planned) -> None:
    assert len(open_gpus(planned(Situation([shared_gpu("a", number) for number in range(8)]), ()))) == 2


@PLANNERS
def test_others_are_open_while_no_open_gpu_has_room_for_the_largest_request_of_the_cluster(planned: Planned) -> None:
    there = Situation([shared_gpu("a", 0, 60), *(shared_gpu("a", number) for number in (1, 2, 3))])
    there.template("small", memory("6Gi"))
    assert open_gpus(planned(there, ())) == {"a/0"}
    there.template("large", memory("30Gi"))
    assert len(open_gpus(planned(there, ()))) > 1


@PLANNERS
def test_as_many_gpus_are_opened_as_pending_claims_need(planned: Planned) -> None:
    there = Situation([shared_gpu("a", number) for number in range(4)])
    assert len(open_gpus(planned(asked_for(there, *["50Gi"] * 3), ()))) == 3


def test_room_is_kept_for_large_claims_first() -> None:
    """50 + 30 and 40 + 40: two GPUs are enough for all four."""
    there = Situation([shared_gpu("a", number) for number in range(4)])
    assert len(open_gpus(with_counters(asked_for(there, "30Gi", "40Gi", "50Gi", "40Gi")))) == 2


@PLANNERS
def test_a_claim_that_may_run_on_one_node_only_opens_a_gpu_there(planned: Planned) -> None:
    there = Situation([shared_gpu("a", 0, 10), shared_gpu("b", 0)])
    for name in "ab":
        there.node(name, {"name": name})
    there.wants(memory("6Gi"), nodeSelector={"name": "b"})
    assert open_gpus(planned(there, ())) == {"a/0", "b/0"}


@PLANNERS
def test_devices_for_one_claim_are_open_on_one_node(planned: Planned) -> None:
    there = Situation([shared_gpu("a", 0, 30), shared_gpu("b", 0, 40), shared_gpu("b", 1)])
    there.wants(memory("40Gi", count=3))
    assert {"b/0", "b/1"} <= open_gpus(planned(there, ()))


@PLANNERS
def test_a_published_device_is_opened_before_others(planned: Planned) -> None:
    there = Situation([shared_gpu("a", number) for number in range(6)])
    assert open_gpus(planned(there, [shared("a/4"), shared("a/2")])) == {"a/2", "a/4"}


@PLANNERS
def test_full_gpus_for_claims_are_not_those_that_claims_share(planned: Planned) -> None:
    there = asked_for(Situation([shared_gpu("a", number) for number in range(4)]), "6Gi")
    there.wants(request(selector=FULL), name="train")
    offers = planned(there, ())
    assert open_gpus(offers).isdisjoint({offer.gpu for offer in offers if offer.spot.kind == FULL_KEY})


def test_disjoint_offers_of_a_gpu_are_shared_or_the_rest() -> None:
    there = asked_for(Situation([shared_gpu("a", number) for number in range(3)]), "6Gi", "7Gi")
    there.wants(request(selector=profile("3g.40gb")), name="part")
    offers = disjoint(there)
    others = {offer.gpu for offer in offers if offer.spot.kind != SHARED_KEY}
    assert others.isdisjoint(open_gpus(offers))
    assert DeviceKind.PARTITION in {offer.spot.kind.type for offer in offers}


def test_disjoint_offers_put_several_claims_on_one_device() -> None:
    there = asked_for(Situation([shared_gpu("a", 0, 10), shared_gpu("a", 1)]), "30Gi", "40Gi", "70Gi", "80Gi")
    by_claim = DisjointPlanner(Ranking()).curate(there.queue, (), {}).by_claim or {}
    planned = {key.removeprefix("default/"): offers for key, offers in by_claim.items()}
    assert planned == {"claim-0": (shared("a/0"),), "claim-1": (shared("a/0"),), "claim-2": (shared("a/1"),)}


def test_a_gang_that_does_not_fit_takes_no_memory_from_others() -> None:
    there = Situation([shared_gpu("a", 0), shared_gpu("a", 1, 80)])
    there.gang("gang", *[memory("50Gi")] * 2).wants(memory("60Gi"), name="other")
    by_claim = DisjointPlanner(Ranking()).curate(there.queue, (), {}).by_claim or {}
    assert by_claim == {"default/other": (shared("a/0"),)}


@PLANNERS
def test_nothing_is_open_where_nothing_can_be_allocated(planned: Planned) -> None:
    """A held share of a GPU with a fault stays held; nobody new gets memory there."""
    faulty = shared_gpu("a", 0, 6, fault="XID 79")
    there = Situation([faulty, shared_gpu("b", 0, 6, why_no_offers="is cordoned"), fleet_gpu("c", 0)])
    assert not open_gpus(planned(asked_for(there, "6Gi"), ()))


@PLANNERS
def test_full_gpus_are_offered_first_where_none_is_meant_to_be_shared(planned: Planned) -> None:
    there = Situation([shared_gpu("a", 0), shared_gpu("a", 1), fleet_gpu("a", 2), fleet_gpu("a", 3)])
    assert {offer.gpu for offer in planned(there, ()) if offer.spot.kind == FULL_KEY} == {"a/2", "a/3"}
