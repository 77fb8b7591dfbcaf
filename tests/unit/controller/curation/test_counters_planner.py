"""What is offered on small fleets that one can look through."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest

from controller.cluster.fleet import Fleet
from controller.cluster.unheld_devices import UnheldDevices
from controller.curation.counters_planner import CountersPlanner
from controller.curation.ranked_fleet import RankedFleet
from controller.demand.demand import Demand
from controller.demand.requirements import AskedKinds
from driver.model.gpu import MigMode
from driver.model.offer import FULL, SHARE, DeviceKind, Offer, OfferKind, Spot
from driver.placement.ranking import Ranking, Terms
from tests.support.fleets import SMALL, holding, node, partition, possible, take
from tests.support.queues import Situation, fleet_gpu, node_of, profile, request

CURATOR = CountersPlanner(Ranking())


def fleet_of(*names: str, gpus: int = 2, shares: int = 0) -> Fleet:
    return Fleet.of(entry for name in names for entry in node(name, gpus, shares=shares))


def offer(uuid: str, profile: str, start: int) -> Offer:
    return Offer(uuid, Spot(OfferKind(DeviceKind.PARTITION, profile), start))


def of_key(offers: Iterable[Offer], key: OfferKind) -> list[str]:
    """The offers of ``key``, spelled as people read them."""
    return sorted(str(offer) for offer in offers if offer.spot.kind == key)


def gpus_of(offers: Iterable[Offer], key: OfferKind) -> set[str]:
    return {offer.gpu for offer in offers if offer.spot.kind == key}


def fits_next_to(fleet: Fleet, offer: Offer, taken: Offer) -> bool:
    return offer in {device.offer for device in possible(take(fleet, taken).gpus[offer.gpu])}


def terms_of(fleet: Fleet, offer: Offer) -> Terms:
    ranked = RankedFleet(fleet, CURATOR.ranking)
    place = ranked.place(offer)
    assert place is not None
    return ranked.terms(place)


A100_40 = "NVIDIA A100-SXM4-40GB"
PROFILES = ("1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")


def asked(*names: str) -> AskedKinds:
    return AskedKinds(frozenset(map(partition, names)))


def test_two_full_gpus_and_two_of_the_smallest_profile_are_offered_without_pending_claims() -> None:
    offers = CURATOR.curate(fleet_of("a", "b", "c"))
    assert Counter(str(offer.spot.kind) for offer in offers) == {"full": 2, "1g.10gb": 2}


def test_larger_profiles_are_offered_if_a_claim_asks_for_them_but_never_one_as_large_as_the_gpu() -> None:
    offers = CURATOR.curate(fleet_of("a", "b", "c"), asked=asked(*PROFILES))
    expected = dict.fromkeys(("full", *PROFILES[:-1]), 2)
    assert Counter(str(offer.spot.kind) for offer in offers) == expected


def test_each_product_has_offers_of_its_own_smallest_profile() -> None:
    small_a100 = [fleet_gpu("a", number, A100_40, facts={"mig_mode": MigMode.ENABLED}) for number in range(2)]
    offers = CURATOR.curate(Fleet.of([*node("h", 2), *small_a100]))
    assert Counter((offer.gpu[0], str(offer.spot.kind)) for offer in offers if offer.spot.kind != FULL) == {
        ("h", "1g.10gb"): 2,
        ("a", "1g.5gb"): 2,
    }, "an A100 of 40 GB has a 1g.10gb, too, which is not its smallest"


def test_a_profile_as_large_as_the_gpu_is_offered_as_often_as_claims_wait_for_it() -> None:
    whole = partition("7g.80gb")
    assert len(of_key(CURATOR.curate(fleet_of("a", "b"), [Demand(whole, 1)]), whole)) == 1


def test_a_larger_offer_can_not_be_taken_before_a_smaller_one_of_its_gpu_by_a_claim_that_accepts_both() -> None:
    either = AskedKinds(frozenset(), frozenset({frozenset(map(partition, PROFILES))}))
    fleet = fleet_of("a", "b")
    offers = CURATOR.curate(fleet, [Demand(partition("7g.80gb"), 1), Demand(partition("3g.40gb"), 2)], asked=either)
    larger = [offer for offer in offers if offer.spot.kind not in {SMALL, FULL}]
    small = [offer for offer in offers if offer.spot.kind == SMALL]
    assert len(larger) == 3
    for offer in larger:
        overlapping = (device for device in small if not fits_next_to(fleet, offer, device))
        assert any(overlapping), offer
    again = CURATOR.curate(
        fleet, [Demand(partition("7g.80gb"), 1), Demand(partition("3g.40gb"), 2)], offers, asked=either
    )
    assert again == offers


def test_partitions_gather_on_the_node_that_is_cut_already() -> None:
    fleet = holding(fleet_of("a", "b", "c", gpus=8), {"b/5": "mig-1g10gb-6"})
    offers = CURATOR.curate(fleet)
    assert {offer.gpu.split("/")[0] for offer in offers} == {"b"}
    assert of_key(offers, SMALL) == ["b/5/1g.10gb@4", "b/5/1g.10gb@5"]
    assert "b/5" not in gpus_of(offers, FULL)


def test_a_burst_finds_an_offer_for_every_claim_and_cuts_as_few_gpus_as_it_can() -> None:
    offers = CURATOR.curate(fleet_of("a", "b", gpus=8), [Demand(SMALL, 21)])
    assert len(of_key(offers, SMALL)) == 21
    assert gpus_of(offers, SMALL) == {"a/0", "a/1", "a/2"}


def test_pending_claims_of_different_kinds_find_offers_that_take_nothing_from_each_other() -> None:
    fleet, asked = fleet_of("a", "b"), {FULL: 2, partition("3g.40gb"): 2, SMALL: 7}
    offers = CURATOR.curate(fleet, [Demand(kind, count) for kind, count in asked.items()])
    for_pending = [offer for offer in offers if offer.spot.kind in asked]
    assert Counter(offer.spot.kind for offer in for_pending) == asked
    for offer in for_pending:
        assert offer in {device.offer for device in possible(fleet.gpus[offer.gpu])}
        fleet = take(fleet, offer)


PARTS = [Demand(partition("1g.10gb+me"), 2, frozenset({"a/0"})), Demand(SMALL, 4), Demand(partition("1g.20gb"), 2)]
OF_THREE_SIZES = frozenset(map(partition, ("1g.10gb", "2g.20gb", "4g.40gb")))


@pytest.mark.parametrize(
    ("gpus", "waiting", "asked", "published"),
    [
        ({"a": 2, "b": 1, "c": 1}, [Demand(FULL, 2), Demand(partition("3g.40gb"), 1)], AskedKinds(), ()),
        ({"a": 2}, PARTS, AskedKinds(), ()),
        (
            {"a": 1},
            (),
            AskedKinds(OF_THREE_SIZES, frozenset({OF_THREE_SIZES})),
            [offer("a/0", "1g.10gb", 3), offer("a/0", "1g.10gb", 6)],
        ),
    ],
    ids=["a whole GPU next to one that is cut", "partitions of several sizes", "small offers beside large ones"],
)
def test_a_decision_needs_no_second_one_that_takes_its_offers_back(
    gpus: dict[str, int], waiting: list[Demand], asked: AskedKinds, published: list[Offer]
) -> None:
    fleet, planner = Fleet.of(gpu for name in gpus for gpu in node(name, gpus[name])), CountersPlanner(CURATOR.ranking)
    offers = planner.curate(fleet, waiting, published, asked=asked)
    assert planner.curate(fleet, waiting, offers, asked=asked) == offers, "while nodes are about to publish them"
    protected = [offer for offer in offers if offer.spot.kind in {demand.kind for demand in waiting}]
    assert planner.curate(fleet, waiting, offers, protected, asked) == offers, "once they are published"


def test_as_a_burst_grows_larger_kinds_leave_the_offers_that_smaller_claims_wait_for() -> None:
    fleet, seven = fleet_of("a", "b"), Demand(SMALL, 7)
    before = [offer for offer in CURATOR.curate(fleet, [seven]) if offer.spot.kind == SMALL]
    offers = CURATOR.curate(fleet, [seven, Demand(partition("3g.40gb"), 2), Demand(FULL, 2)], before)
    assert [offer for offer in offers if offer.spot.kind == SMALL] == before
    for offer in before:
        fleet = take(fleet, offer)
    for offer in offers:
        if offer.spot.kind in {partition("3g.40gb"), FULL}:
            fleet = take(fleet, offer)


def test_offers_that_nodes_are_about_to_publish_are_not_chosen_anew() -> None:
    there = Situation([*node_of("a"), *node_of("b")])
    queue = there.wants(request(selector=profile("1g.10gb"))).queue
    best, *_ = (offer for offer in CURATOR.plan(queue, UnheldDevices(), ()).offers if offer.spot.kind == SMALL)
    for uuid in there.queue.feasibility.fleet.gpus:
        announced = Offer(uuid, best.spot)
        assert announced in CURATOR.plan(queue, UnheldDevices(), [announced]).offers


def test_where_offers_for_different_kinds_do_not_fit_together_each_kind_has_its_own() -> None:
    offers = CURATOR.curate(fleet_of("a", gpus=1), [Demand(FULL, 1), Demand(SMALL, 7)])
    assert (len(of_key(offers, FULL)), len(of_key(offers, SMALL))) == (1, 7)


def test_demand_beyond_what_fits_gets_what_fits() -> None:
    offers = CURATOR.curate(fleet_of("a"), [Demand(partition("3g.40gb"), 100)])
    assert len(of_key(offers, partition("3g.40gb"))) == 4


def test_claims_that_only_some_gpus_serve_find_offers_there_on_top_of_everyone_elses() -> None:
    fleet = fleet_of("a", "b", gpus=4)
    narrow, wide = frozenset({"b/3"}), frozenset({"b/2", "b/3"})
    offers = CURATOR.curate(fleet, [Demand(SMALL, 2, narrow), Demand(SMALL, 3, wide), Demand(SMALL, 1)])
    small = [offer for offer in offers if offer.spot.kind == SMALL]
    assert sum(offer.gpu in narrow for offer in small) >= 2
    assert sum(offer.gpu in wide for offer in small) >= 5
    assert len(small) == 6


def test_demand_for_what_the_fleet_lacks_is_left_aside() -> None:
    fleet = fleet_of("a")
    waiting = [Demand(partition("1g.5gb"), 3), Demand(SHARE), Demand(SMALL, 9, frozenset({"gone/0"}))]
    offers = CURATOR.curate(fleet, waiting)
    assert set(CURATOR.curate(fleet)) <= set(offers)
    assert len(of_key(offers, SMALL)) == 9


CLIQUES = tuple(frozenset(f"{name}/{number}" for number in range(4)) for name in "abc")


def test_gpus_asked_for_together_are_offered_in_one_clique() -> None:
    fleet = holding(fleet_of("a", "b", "c", gpus=4), {"a/1": "mig-1g10gb-6", "c/1": "full"})
    offers = CURATOR.curate(fleet, [Demand(FULL, 4, together=CLIQUES)])
    assert of_key(offers, FULL) == [f"b/{number}/full" for number in range(4)]


def test_two_claims_for_whole_cliques_get_two_cliques() -> None:
    fleet = fleet_of("a", "b", "c", gpus=4)
    offers = CURATOR.curate(fleet, [Demand(FULL, 4, together=CLIQUES)] * 2)
    assert gpus_of(offers, FULL) == CLIQUES[0] | CLIQUES[1]


def test_a_clique_that_is_offered_already_is_not_exchanged_for_another() -> None:
    fleet = fleet_of("a", "b", "c", gpus=4)
    published = [Offer(uuid, Spot(FULL)) for uuid in sorted(CLIQUES[2])]
    offers = CURATOR.curate(fleet, [Demand(FULL, 4, together=CLIQUES)], published)
    assert gpus_of(offers, FULL) == CLIQUES[2]


def test_together_where_nothing_has_room_asks_for_nothing() -> None:
    fleet = holding(fleet_of("a", gpus=4), {"a/1": "full"})
    assert CURATOR.curate(fleet, [Demand(FULL, 4, together=CLIQUES)]) == CURATOR.curate(fleet)


def test_partitions_of_one_gpu_are_asked_for_together_too() -> None:
    fleet = holding(fleet_of("a"), {"a/0": "mig-3g40gb-4 mig-1g10gb-3 mig-1g10gb-2"})
    singles = tuple(frozenset({uuid}) for uuid in fleet.gpus)
    offers = CURATOR.curate(fleet, [Demand(SMALL, 3, together=singles)])
    assert sum(offer.gpu == "a/1" for offer in offers if offer.spot.kind == SMALL) >= 3


def test_an_offer_that_is_only_a_little_worse_stays() -> None:
    fleet = holding(fleet_of("a", "b", "c"), {"a/0": "mig-1g10gb-6"})
    little = offer("a/0", "3g.40gb", 0)
    assert little in CURATOR.curate(fleet, asked=asked("3g.40gb"))
    patient = CountersPlanner(CURATOR.ranking, offers=1, stickiness=100.0)
    worse = offer("c/1", "1g.10gb", 0)
    assert worse in patient.curate(fleet, published=[worse])


def test_an_offer_that_is_clearly_worse_is_exchanged() -> None:
    fleet = holding(fleet_of("a", "b"), {"a/0": "mig-1g10gb-6"})
    worse = offer("b/1", "1g.10gb", 0)
    offers = CURATOR.curate(fleet, published=[worse])
    assert worse not in offers
    better = min(terms_of(fleet, each).growth for each in offers if each.spot.kind == SMALL)
    assert terms_of(fleet, worse).growth > better + CURATOR.stickiness


def test_an_offer_that_somebody_got_is_gone_and_another_takes_its_place() -> None:
    fleet = fleet_of("a", "b")
    before = CURATOR.curate(fleet)
    got = next(offer for offer in before if offer.spot.kind == SMALL)
    after = CURATOR.curate(take(fleet, got), published=before)
    assert got not in after
    assert len(of_key(after, SMALL)) == 2


def test_what_a_burst_left_over_is_taken_back_as_surplus() -> None:
    fleet = fleet_of("a", "b")
    before = CURATOR.curate(fleet, [Demand(SMALL, 9)])
    after = CURATOR.curate(fleet, published=before)
    assert set(after) < set(before)
    assert len(before) - len(after) == 7


def test_a_protected_offer_is_kept_beside_the_better_ones() -> None:
    fleet = holding(fleet_of("a", "b"), {"a/0": "mig-1g10gb-6"})
    worse = offer("b/1", "1g.10gb", 0)
    assert worse in CURATOR.curate(fleet, published=[worse], protected=[worse])


def test_shares_are_offered_on_the_gpu_that_is_shared_already() -> None:
    fleet = holding(fleet_of("a", "b", shares=4), {"b/1": "share-2"})
    assert of_key(CURATOR.curate(fleet), SHARE) == ["b/1/share-0", "b/1/share-1"]


def divided(fleet: Fleet, *uuids: str) -> Fleet:
    """``fleet`` with these GPUs divided into six shares."""
    return Fleet.of({**fleet.gpus, **{uuid: replace(fleet.gpus[uuid], shares=6) for uuid in uuids}}.values())


@pytest.mark.parametrize("product", ["NVIDIA H100 80GB HBM3", "NVIDIA L40S"])
def test_full_gpus_that_have_shares_are_offered_after_all_others(product: str) -> None:
    free = Fleet.of(entry for name in "ab" for entry in node(name, 4, product))
    fleet, last = divided(free, "a/0", "b/3"), {"a/0", "b/3"}
    offers: Iterable[Offer] = ()
    for taken in range(8):
        offers = CURATOR.curate(fleet, published=list(offers))
        offered = gpus_of(offers, FULL)
        assert len(offered & last) == max(0, min(2, 8 - taken) - (6 - min(taken, 6))), taken
        fleet = take(fleet, Offer(min(offered - last or offered), Spot(FULL)))


def test_a_full_gpu_that_has_shares_is_taken_back_once_another_is_free() -> None:
    shared = Offer("a/0", Spot(FULL))
    busy = divided(holding(fleet_of("a"), {"a/1": "full"}), "a/0")
    assert shared in CURATOR.curate(busy)
    once = CountersPlanner(CURATOR.ranking, offers=1)
    assert gpus_of(once.curate(divided(fleet_of("a"), "a/0"), published=[shared]), FULL) == {"a/1"}


def test_full_gpus_together_are_offered_where_none_of_them_has_shares() -> None:
    fleet = divided(holding(fleet_of("a", "b", gpus=4), {"a/1": "full", "a/2": "full"}), "a/0")
    cliques = [frozenset(f"{name}/{number}" for number in range(4)) for name in "ab"]
    offers = CURATOR.curate(fleet, [Demand(FULL, 2, together=tuple(cliques))])
    assert gpus_of(offers, FULL) == {"b/0", "b/1"}


def test_the_first_partition_leaves_the_gpus_that_have_shares_alone() -> None:
    offers = CURATOR.curate(divided(fleet_of("a", gpus=8), "a/0", "a/3"), [Demand(SMALL, 7)])
    assert gpus_of(offers, SMALL) == {"a/1"}


@pytest.mark.parametrize(
    ("change", "offered"),
    [
        pytest.param({"fault": "fell off the bus"}, set(), id="faulty"),
        pytest.param({"uses": frozenset({DeviceKind.FULL})}, {"gpu"}, id="dedicated to training"),
        pytest.param({"shares": 2, "shares_only": True}, {"share"}, id="shares only"),
        pytest.param({"foreign": 0b11111110}, {"mig"}, id="one slice left by others"),
    ],
)
def test_a_gpu_offers_what_it_may(change: dict[str, object], offered: set[str]) -> None:
    [entry] = node("a", 1)
    fleet = Fleet.of([replace(entry, **change)])  # type: ignore[arg-type]
    assert {str(offer.spot.kind.type) for offer in CURATOR.curate(fleet)} == offered


def test_an_offer_says_which_requests_it_costs_how_much() -> None:
    fleet = holding(fleet_of("a", gpus=1), {"a/0": "mig-1g10gb-6"})
    assert offer("a/0", "1g.10gb", 4) in CURATOR.curate(fleet)
    terms = terms_of(fleet, offer("a/0", "1g.10gb", 4))
    clique = CURATOR.ranking.clique((CURATOR.ranking.gpu(fleet.gpus["a/0"].state),))
    best = clique.best(SMALL)
    assert best is not None
    assert best.terms == terms
    assert terms.free == terms.clique_free == 7
    measure, state = CURATOR.ranking.measure, fleet.gpus["a/0"].state
    had, left = measure.unusable(state), measure.unusable(state.take(best.spot))
    grown = {name: left[name] - had[name] for name in had} | {"clique": -1}
    assert grown["4g.40gb"] == -1
    assert grown["2g.20gb"] == 1
    weights = measure.classes(state)
    assert sum(weights[name] * grown[name] for name in grown) == pytest.approx(terms.growth)
