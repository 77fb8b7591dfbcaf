"""What is published without being offered, so that tools that count published devices find enough of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from controller.cluster.fleet import Fleet
from controller.curation.listed_devices import ListedDevices
from driver.model.offer import FULL, Offer, OfferKind
from tests.support.fleets import SMALL, holding, node


def fleet_of(*names: str, gpus: int = 8) -> Fleet:
    return Fleet.of(entry for name in names for entry in node(name, gpus))


def kinds(offers: frozenset[Offer] | tuple[Offer, ...]) -> Mapping[str, int]:
    return Counter(str(offer.spot.kind) for offer in offers)


def listed(
    fleet: Fleet, minimum: Mapping[OfferKind, int] | None = None, nodes: tuple[str, ...] = ("a", "b")
) -> frozenset[Offer]:
    return ListedDevices(minimum, 2).update(fleet, nodes)


def test_as_many_full_gpus_are_listed_as_the_largest_node_has_and_two_of_each_other_kind() -> None:
    fleet = fleet_of("a", "b")
    profiles = {profile.name for entry in fleet for profile in entry.gpu.profiles}
    assert kinds(listed(fleet)) == {"full": 8, **dict.fromkeys(profiles, 2)}


def test_what_is_listed_stays_the_same_whatever_claims_hold() -> None:
    fleet, lists = fleet_of("a", "b"), ListedDevices(None, 2)
    first = lists.update(fleet, ["a", "b"])
    for held in ("full", "mig-1g10gb-0 mig-1g10gb-1", "mig-3g40gb-0"):
        assert lists.update(holding(fleet, dict.fromkeys(fleet.gpus, held)), ["a", "b"]) == first


def test_devices_of_one_kind_are_on_several_nodes_where_there_are_several() -> None:
    fleet = fleet_of("a", "b")
    found = listed(fleet, {FULL: 8, SMALL: 2})
    nodes = Counter((offer.gpu.split("/")[0], offer.spot.kind.profile) for offer in found)
    assert nodes == {("a", None): 4, ("b", None): 4, ("a", "1g.10gb"): 1, ("b", "1g.10gb"): 1}


def test_one_gpu_gives_several_devices_of_a_kind() -> None:
    assert kinds(listed(fleet_of("a", gpus=1), {SMALL: 3})) == {"1g.10gb": 3}


def test_nothing_is_listed_on_nodes_that_follow_no_plan_or_without_a_minimum() -> None:
    fleet = fleet_of("a", "b")
    assert {offer.gpu.split("/")[0] for offer in listed(fleet, nodes=("b",))} == {"b"}
    assert listed(fleet, nodes=()) == frozenset()
    assert listed(fleet, minimum={}) == frozenset()


def test_devices_of_a_node_that_leaves_are_replaced_and_the_others_stay() -> None:
    fleet, lists = fleet_of("a", "b"), ListedDevices({SMALL: 4}, 2)
    first = lists.update(fleet, ["a", "b"])
    now = lists.update(fleet, ["b"])
    assert len(now) == 4
    assert now >= {offer for offer in first if offer.gpu.startswith("b/")}
