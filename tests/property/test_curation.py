"""Whatever is held and whoever waits: offers are possible, enough, and stay where nothing changed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from controller.cluster.fleet import Fleet, FleetGpu
from controller.cluster.kind_sizes import sizes_of
from controller.curation.counters_planner import CountersPlanner
from controller.demand.demand import Demand
from controller.demand.requirements import AskedKinds
from driver.model.offer import FULL, SHARE, DeviceKind, Offer, OfferKind
from driver.placement.ranking import Ranking
from tests.support.fleets import device_of, node, partition, possible, take
from tests.support.gpus import H100

RANKING = Ranking()
A100, A30, L40S = "NVIDIA A100-SXM4-80GB", "NVIDIA A30", "NVIDIA L40S"
KEYS = [FULL, SHARE, *map(partition, ("1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"))]


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    """Up to four nodes of up to three GPUs of any sort, with anything held on them."""
    gpus: list[FleetGpu] = []
    for number in range(draw(st.integers(1, 4))):
        gpus += node(f"n{number}", draw(st.integers(1, 3)), draw(st.sampled_from([H100, H100, A100, A30, L40S])))
    return Fleet.of(draw(_in_some_state(entry)) for entry in gpus)


@st.composite
def _in_some_state(draw: st.DrawFn, entry: FleetGpu) -> FleetGpu:
    uses = draw(st.sampled_from([frozenset(DeviceKind)] * 3 + [frozenset({DeviceKind.PARTITION})]))
    fault, shares = draw(st.sampled_from([None] * 7 + ["off the bus"])), draw(st.sampled_from([0, 0, 3]))
    entry = replace(entry, uses=uses, fault=fault, shares=shares)
    for _ in range(draw(st.integers(0, 4))):
        if possible(entry):
            entry = replace(entry, held=(*entry.held, draw(st.sampled_from(possible(entry)))))
    return entry


def every_offer(fleet: Fleet) -> list[Offer]:
    return [device.offer for entry in fleet for device in possible(entry)]


def some_offers(fleet: Fleet) -> st.SearchStrategy[set[Offer]]:
    every = every_offer(fleet)
    return st.sets(st.sampled_from(every), max_size=8) if every else st.just(set())


@st.composite
def demands(draw: st.DrawFn, fleet: Fleet) -> Demand:
    eligible = draw(st.one_of(st.none(), st.frozensets(st.sampled_from(sorted(fleet.gpus)), min_size=1)))
    return Demand(draw(st.sampled_from(KEYS)), draw(st.integers(1, 5)), eligible)


def cliques_of(fleet: Fleet) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(entry.gpu.uuid for entry in group) for group in fleet.cliques.values())


def curate(
    fleet: Fleet,
    waiting: Collection[Demand] = (),
    published: Collection[Offer] = (),
    protected: Collection[Offer] = (),
    stickiness: float = 0.5,
) -> tuple[Offer, ...]:
    """The offers if claims ask for devices of every kind."""
    asked = AskedKinds(frozenset(KEYS))
    return CountersPlanner(RANKING, 2, stickiness).curate(fleet, waiting, published, protected, asked)


def among(offers: Collection[Offer], key: OfferKind, eligible: frozenset[str] | None = None) -> list[Offer]:
    return [o for o in offers if o.spot.kind == key and (eligible is None or o.gpu in eligible)]


def fits(fleet: Fleet, key: OfferKind, count: int, eligible: frozenset[str] | None = None) -> int:
    """How many of ``key``, at most ``count``, can be held at once on these GPUs, one after another."""
    found = 0
    for uuid in fleet.gpus if eligible is None else eligible & fleet.gpus.keys():
        while found < count:
            left = among([device.offer for device in possible(fleet.gpus[uuid])], key)
            if not left:
                break
            fleet, found = take(fleet, left[0]), found + 1
    return found


@given(st.data())
def test_there_are_enough_offers_and_all_are_possible(data: st.DataObject) -> None:
    fleet = data.draw(fleets())
    waiting = data.draw(st.lists(demands(fleet), max_size=3))
    published, protected = data.draw(some_offers(fleet)), data.draw(some_offers(fleet))
    offers = curate(fleet, waiting, published, published & protected)
    assert set(offers) <= set(every_offer(fleet))
    for key in KEYS:
        of_key = [demand for demand in waiting if demand.kind == key]
        wanted = max(0 if key == partition("7g.80gb") else 2, sum(demand.count for demand in of_key))
        assert len(among(offers, key)) >= fits(fleet, key, wanted)
        for demand in of_key:
            served = len(among(offers, key, demand.eligible))
            assert served >= fits(fleet, key, demand.count, demand.eligible)


@given(st.data())
def test_a_claim_finds_no_larger_offer_left_where_the_smaller_ones_that_it_accepts_are_taken(
    data: st.DataObject,
) -> None:
    fleet = data.draw(fleets())
    sizes = sizes_of(fleet)
    assume(len(sizes) > 1)
    choice = data.draw(st.frozensets(st.sampled_from(sorted(sizes)), min_size=2))
    planner, asked = CountersPlanner(RANKING), AskedKinds(frozenset(KEYS), frozenset({choice}))
    waiting = data.draw(st.lists(demands(fleet), max_size=3))
    offers = planner.curate(fleet, waiting, data.draw(some_offers(fleet)), asked=asked)
    for offer in offers:
        smaller = [
            other
            for other in among_all(every_offer(fleet), choice, offer.gpu)
            if offer.spot.kind in choice
            and sizes[other.spot.kind].memory_bytes < sizes[offer.spot.kind].memory_bytes
            and offer not in {device.offer for device in possible(take(fleet, other).gpus[offer.gpu])}
        ]
        assert not smaller or not set(offers).isdisjoint(smaller), offer
    assert planner.curate(fleet, waiting, offers, asked=asked) == offers


def among_all(offers: Collection[Offer], kinds: Collection[OfferKind], gpu: str) -> list[Offer]:
    return [offer for offer in offers if offer.gpu == gpu and offer.spot.kind in kinds]


@given(st.data())
def test_the_offers_of_a_key_can_all_be_taken_at_once(data: st.DataObject) -> None:
    fleet = data.draw(fleets())
    offers = curate(fleet, data.draw(st.lists(demands(fleet), max_size=2)), data.draw(some_offers(fleet)))
    for key in KEYS:
        left = fleet
        for offer in among(offers, key):
            left = take(left, offer)


@given(st.data())
def test_what_is_published_stays_while_nothing_changes(data: st.DataObject) -> None:
    fleet, stickiness = data.draw(fleets()), data.draw(st.sampled_from([0.0, 0.1, 0.5]))
    waiting = data.draw(st.lists(demands(fleet), max_size=3))
    published = data.draw(some_offers(fleet))
    protected = data.draw(some_offers(fleet)) & published
    first = curate(fleet, waiting, published, protected, stickiness)
    assert curate(fleet, waiting, first, protected, stickiness) == first


@given(st.data())
def test_the_set_that_serves_devices_together_is_settled_soon(data: st.DataObject) -> None:
    fleet = data.draw(fleets())
    waiting = [
        replace(demand, eligible=None, together=cliques_of(fleet))
        for demand in data.draw(st.lists(demands(fleet), min_size=1, max_size=3))
    ]
    offers = curate(fleet, waiting, data.draw(some_offers(fleet)))
    for _ in range(2):
        offers = curate(fleet, waiting, offers)
    assert curate(fleet, waiting, offers) == offers


@given(st.data())
def test_the_result_depends_on_no_order(data: st.DataObject) -> None:
    fleet = data.draw(fleets())
    waiting = data.draw(st.lists(demands(fleet), max_size=3))
    published = sorted(data.draw(some_offers(fleet)), key=str)
    first = curate(fleet, waiting, published)
    mixed = Fleet.of(fleet.gpus[uuid] for uuid in data.draw(st.permutations(sorted(fleet.gpus))))
    again = curate(mixed, list(reversed(waiting)), data.draw(st.permutations(published)))
    assert again == first


@given(st.data())
def test_taking_a_device_takes_back_only_what_it_must(data: st.DataObject) -> None:
    fleet = data.draw(fleets())
    before = curate(fleet)
    if not before:
        return
    after = take(fleet, data.draw(st.sampled_from(sorted(before, key=str))))
    possible = set(every_offer(after))
    changed = curate(after, published=before)
    for offer in set(before) & possible - set(changed):
        key = offer.spot.kind
        assert set(among(changed, key)) - set(before), "it was exchanged for another"
    patient = curate(after, published=before, stickiness=float("inf"))
    assert {offer for offer in before if offer in possible} <= set(patient)


@given(st.data())
def test_a_protected_offer_stays_while_it_is_possible(data: st.DataObject) -> None:
    fleet = data.draw(fleets())
    published = data.draw(some_offers(fleet))
    protected = data.draw(some_offers(fleet)) & published
    assert protected <= set(curate(fleet, (), published, protected, stickiness=0.0))


@given(st.data())
def test_a_claim_for_everything_gets_every_possible_placement_where_it_may_run(data: st.DataObject) -> None:
    fleet = data.draw(fleets())
    demand = replace(data.draw(demands(fleet)), all_devices=True)
    offers = curate(fleet, [demand])
    assert set(among(every_offer(fleet), demand.kind, demand.eligible)) <= set(offers)


@given(st.data())
def test_devices_asked_for_together_are_offered_in_one_set_if_any_has_room(data: st.DataObject) -> None:
    fleet = data.draw(fleets())
    key, count = data.draw(st.sampled_from(KEYS)), data.draw(st.integers(1, 4))
    cliques = cliques_of(fleet)
    offers = curate(fleet, [Demand(key, count, together=cliques)], data.draw(some_offers(fleet)))
    room = [fits(fleet, key, count, clique) for clique in cliques]
    assert max(len(among(offers, key, clique)) for clique in cliques) >= (count if max(room) == count else 0)


@given(st.data())
def test_every_offer_stands_for_one_device(data: st.DataObject) -> None:
    fleet = data.draw(fleets())
    for offer in curate(fleet):
        assert device_of(fleet, offer).offer == offer


@given(st.data())
def test_a_full_gpu_that_has_shares_is_offered_only_beside_every_other_full_gpu(data: st.DataObject) -> None:
    fleet, count = Fleet.of(entry.unheld for entry in data.draw(fleets())), data.draw(st.integers(0, 4))
    waiting = [Demand(FULL, count)] if count else []
    offered = {offer.gpu for offer in among(curate(fleet, waiting, data.draw(some_offers(fleet))), FULL)}
    free = {entry.gpu.uuid: entry for entry in fleet if any(d.kind is DeviceKind.FULL for d in possible(entry))}
    divided = {uuid for uuid, entry in free.items() if entry.shares and DeviceKind.SHARE in entry.uses}
    assert not offered & divided or free.keys() - divided <= offered
