"""Disjoint offers: which are chosen for pending claims and for those to come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.cluster.fleet import Fleet
from controller.curation.disjoint_planner import DisjointPlanner
from controller.curation.planner import PlannedOffers
from controller.demand.device_search import Budget
from driver.model.device import Device
from driver.model.offer import DeviceKind, Offer, OfferKind, Spot
from driver.placement.occupancy import GpuState
from driver.placement.ranking import Ranking
from tests.support.fleets import device_of
from tests.support.queues import FULL, SHARE, Situation, first_available, node_of, profile, request, selected_by


def curated(there: Situation, published: Iterable[Offer] = (), offers: int = 2) -> PlannedOffers:
    return DisjointPlanner(Ranking(), offers).curate(there.queue, [*published], {})


def devices(there: Situation, offers: Iterable[Offer]) -> list[Device]:
    """The devices of the offers, which together must fit on their GPUs beside what is held."""
    found = [device_of(Fleet.of(there.gpus), offer) for offer in offers]
    for entry in there.gpus:
        taken = [*entry.held]
        for device in (each for each in found if each.gpu == entry.gpu):
            assert GpuState.of(entry.gpu, taken, entry.foreign).fits(device)
            taken.append(device)
    return found


def planned(there: Situation, **options: object) -> dict[str, list[str]]:
    """By claim, the planned devices as ``<GPU's UUID> <name>``."""
    found = curated(there, **options)  # type: ignore[arg-type]
    devices(there, found.offers)
    return {
        key.removeprefix("default/"): [f"{each.gpu.uuid} {each.name}" for each in devices(there, offers)]
        for key, offers in (found.by_claim or {}).items()
    }


def kinds(there: Situation) -> Counter[str]:
    return Counter(
        device.profile.name if device.profile else device.kind for device in devices(there, curated(there).offers)
    )


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (1, {"gpu": 1}),
        (2, {"gpu": 2}),
        (3, {"gpu": 2, "1g.10gb": 2, "1g.20gb": 1, "2g.20gb": 1}),
    ],
)
def test_so_many_full_gpus_stay_whole_and_one_is_divided_for_all_other_kinds(
    gpus: int, expected: dict[str, int]
) -> None:
    there = Situation(node_of("a", gpus=gpus))
    for name in ("1g.20gb", "2g.20gb", "7g.80gb"):
        there.template(name, request(selector=profile(name)))
    assert kinds(there) == expected


def test_only_the_smallest_profile_is_offered_if_no_claim_asks_for_a_larger_one() -> None:
    assert kinds(Situation(node_of("a", gpus=3))) == {"gpu": 2, "1g.10gb": 2}


def test_a_claim_that_matches_several_profiles_is_planned_on_the_smallest() -> None:
    there = Situation(node_of("a", gpus=2)).wants(request(selector=selected_by('type == "mig"')))
    [[device]] = planned(there).values()
    assert "mig-1g10gb-" in device


def test_what_is_divided_already_is_offered_before_another_gpu_is() -> None:
    there = Situation([*node_of("a", "mig-1g10gb-0", gpus=1), *node_of("b", gpus=3)])
    divided = {device.gpu.uuid for device in devices(there, curated(there, offers=1).offers) if device.profile}
    assert "a/0" in divided


def test_a_pending_claim_is_planned_where_it_causes_the_least_fragmentation() -> None:
    there = Situation([*node_of("a", "mig-1g10gb-0", gpus=1), *node_of("b", gpus=1)])
    [[device]] = planned(there.wants(request(selector=profile("1g.10gb")))).values()
    assert device.startswith("a/0 ")


def test_a_published_offer_that_serves_a_claim_is_what_it_is_planned_on() -> None:
    there = Situation(node_of("a", gpus=4))
    there.template("two", request(selector=profile("2g.20gb")))
    before = [offer for offer in curated(there).offers if offer.spot.kind.profile == "2g.20gb"]
    found = curated(there.wants(request(selector=profile("2g.20gb"))), before)
    [offer] = (found.by_claim or {})["default/claim"]
    assert offer in before


def test_offers_for_claims_to_come_stay_as_they_are() -> None:
    there = Situation(node_of("a", gpus=8))
    first = curated(there)
    assert curated(there, first.offers) == first


@pytest.mark.parametrize(
    ("priorities", "ages", "served"),
    [
        pytest.param((0, 0), ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"), "a", id="the oldest"),
        pytest.param((0, 0), ("2026-01-02T00:00:00Z", "2026-01-01T00:00:00Z"), "b", id="the oldest, named later"),
        pytest.param((0, 9), ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"), "b", id="the highest priority"),
    ],
)
def test_where_there_is_room_for_one_it_is_for(priorities: tuple[int, int], ages: tuple[str, str], served: str) -> None:
    there = Situation(node_of("n", gpus=1))
    for name, priority, created in zip("ab", priorities, ages, strict=True):
        there.wants(request(selector=FULL), name=name, priority=priority, metadata={"creationTimestamp": created})
    assert planned(there) == {served: ["n/0 gpu-0"]}


def test_a_claim_for_which_there_is_no_room_keeps_no_other_from_the_free_memory() -> None:
    there = Situation(node_of("n", "mig-1g10gb-0", gpus=1))
    there.wants(request(selector=FULL), name="large", priority=9).wants(request(selector=profile("3g.40gb")), name="b")
    assert planned(there).keys() == {"b"}


def test_the_claims_of_one_pod_are_planned_on_one_node_or_not_at_all() -> None:
    def pod(*nodes: str) -> dict[str, list[str]]:
        there = Situation([each for node in nodes for each in node_of(node, gpus=1)])
        there.claim("one", request(selector=profile("4g.40gb")))
        there.claim("two", request(selector=profile("4g.40gb")))
        there.pod("pod", "one", "two")
        return planned(there)

    assert pod("a", "b") == {}
    there = Situation([*node_of("a", gpus=1), *node_of("b", gpus=2)])
    there.claim("one", request(selector=profile("4g.40gb")))
    there.claim("two", request(selector=profile("4g.40gb")))
    there.pod("pod", "one", "two")
    assert {each.split("/")[0] for each in planned(there)["one"]} == {"b"}


CLIQUE = "gpu.tessera.dev/nvlinkClique"
PARENT = "gpu.tessera.dev/parentUUID"


@pytest.mark.parametrize(
    ("requests", "constraints", "names"),
    [
        pytest.param([request(selector=FULL, count=3)], (), {"gpu-0", "gpu-1", "gpu-2"}, id="several GPUs"),
        pytest.param([request(selector=FULL, allocationMode="All")], (), {"gpu-0", "gpu-1", "gpu-2"}, id="all GPUs"),
        pytest.param(
            [request(selector=profile("1g.10gb"), count=2)],
            [{"matchAttribute": PARENT}],
            {"gpu-0-mig-1g10gb-0", "gpu-0-mig-1g10gb-1"},
            id="two partitions of one GPU",
        ),
        pytest.param(
            [request(selector=selected_by('profile == "1g.10gb"', "placementStart == 3"))],
            (),
            {"gpu-0-mig-1g10gb-3"},
            id="one placement",
        ),
        pytest.param(
            [first_available(("share", SHARE), ("small", profile("2g.20gb")))],
            (),
            {"gpu-0-mig-2g20gb-4"},
            id="an alternative",
        ),
        pytest.param(
            [request(selector=FULL, name="one"), request(selector=profile("3g.40gb"), name="other")],
            (),
            {"gpu-0", "gpu-1-mig-3g40gb-0"},
            id="devices of two kinds",
        ),
    ],
)
def test_a_claim_may_ask_for(requests: list[dict[str, object]], constraints: object, names: set[str]) -> None:
    there = Situation(node_of("a", gpus=3)).wants(*requests, constraints=constraints)
    assert {name.split()[1] for name in planned(there)["claim"]} == names


PROFILES = ("1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")
HELD = ("", "mig-1g10gb-6", "mig-3g40gb-4", "full", "mig-1g10gb-0 mig-2g20gb-2")


@given(
    st.lists(st.sampled_from(HELD), min_size=1, max_size=4),
    st.lists(st.tuples(st.sampled_from((*PROFILES, "full")), st.integers(1, 3)), max_size=6),
    st.integers(1, 3),
)
def test_whatever_is_held_and_wanted_no_two_offers_overlap_and_planned_claims_have_all_their_devices(
    held: list[str], wanted: list[tuple[str, int]], offers: int
) -> None:
    there = Situation([gpu for at, names in enumerate(held) for gpu in node_of(f"n{at}", *names.split(), gpus=1)])
    for at, (kind, count) in enumerate(wanted):
        there.wants(request(selector=FULL if kind == "full" else profile(kind), count=count), name=f"c{at}")
    first = curated(there, offers=offers)
    devices(there, first.offers)
    again = curated(there, first.offers, offers=offers)
    devices(there, again.offers)
    for found in (first, again):
        for key, chosen in (found.by_claim or {}).items():
            assert len(chosen) == wanted[int(key.removeprefix("default/c"))][1]
            assert set(chosen) <= set(found.offers)
        assert len({offer for each in (found.by_claim or {}).values() for offer in each}) == sum(
            map(len, (found.by_claim or {}).values())
        )


def test_a_gang_is_planned_for_all_of_its_pods_or_for_none() -> None:
    there = Situation(node_of("a", gpus=3)).gang("training", *[request(selector=FULL)] * 3)
    assert planned(there).keys() == {"training-0", "training-1", "training-2"}
    there = Situation(node_of("a", gpus=2)).gang("training", *[request(selector=FULL)] * 3)
    assert planned(there) == {}


def test_what_a_gang_without_room_leaves_is_planned_for_the_next_pods() -> None:
    there = Situation(node_of("a", gpus=3)).gang("a-large", *[request(selector=FULL)] * 4)
    there.gang("b-small", *[request(selector=FULL)] * 2).wants(request(selector=FULL), name="c-alone")
    assert planned(there).keys() == {"b-small-0", "b-small-1", "c-alone"}


def test_of_two_gangs_that_have_room_only_alone_one_is_planned() -> None:
    there = Situation([*node_of("a", gpus=2), *node_of("b", gpus=2)])
    there.gang("first", *[request(selector=FULL)] * 3).gang("second", *[request(selector=FULL)] * 3)
    assert planned(there).keys() == {f"first-{number}" for number in range(3)}


def test_a_gang_for_which_only_some_pods_have_room_is_planned_if_it_needs_no_more() -> None:
    there = Situation(node_of("a", gpus=2)).gang("training", *[request(selector=FULL)] * 3, min_count=2)
    assert len(planned(there)) == 2


def test_an_incomplete_gang_keeps_nobody_from_free_memory() -> None:
    there = Situation(node_of("a", gpus=1)).gang("training", request(selector=FULL), min_count=2)
    assert planned(there.wants(request(selector=FULL), name="z-alone")).keys() == {"z-alone"}


def test_published_offers_that_a_gang_would_have_used_serve_the_next_pod() -> None:
    there = Situation(node_of("a", gpus=2)).gang("large", *[request(selector=FULL)] * 3)
    there.wants(request(selector=FULL), name="z-alone")
    standing = Offer("a/1", Spot(OfferKind(DeviceKind.FULL)))
    assert planned(there, published=[standing]) == {"z-alone": ["a/1 gpu-1"]}


def test_a_tenant_that_has_spent_its_search_keeps_no_other_tenant_from_being_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budgets = iter([Budget(0), Budget()])
    monkeypatch.setattr("controller.curation.disjoint_planner.Budget", lambda: next(budgets))
    there = Situation(node_of("a", gpus=2))
    there.device_class("full", FULL)
    for namespace in ("greedy", "patient"):
        there.claim("claim", request("full", count=2), metadata={"namespace": namespace})
        there.pod("pod", "claim", metadata={"namespace": namespace})
    assert [*(curated(there).by_claim or {})] == ["patient/claim"]
