"""What is published without being offered, so that tools that count published devices find enough of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from controller.cluster.fleet import Fleet, FleetGpu
from controller.curation.curator import Curator
from controller.curation.listed_devices import ListedDevices
from driver.model.plan import Offer
from driver.placement.state import FULL, OfferKind
from tests.support.fleets import SMALL, holding, node

CURATOR = Curator()


def fleet_of(*names: str, gpus: int = 8) -> Fleet:
    return Fleet.of(entry for name in names for entry in node(name, gpus))


def kinds(offers: frozenset[Offer] | tuple[Offer, ...]) -> Mapping[str, int]:
    return Counter(str(OfferKind(offer.type, offer.profile)) for offer in offers)


def listed(
    fleet: Fleet,
    offers: tuple[Offer, ...] = (),
    minimum: Mapping[OfferKind, int] | None = None,
    *,
    held_published: bool = True,
    nodes: tuple[str, ...] = ("a", "b"),
) -> frozenset[Offer]:
    def is_published(entry: FleetGpu, name: str) -> bool:
        return held_published

    return ListedDevices(minimum, 2).update(fleet, offers, is_published, nodes)


def test_on_an_idle_cluster_as_many_full_gpus_are_published_as_the_largest_node_has() -> None:
    fleet = fleet_of("a", "b")
    offers = CURATOR.curate(fleet)
    found = listed(fleet, offers)
    assert kinds(found) == {"full": 6}
    assert not found & {*offers}


def test_of_a_fleet_that_is_held_whole_two_of_each_kind_are_listed_and_no_full_gpu() -> None:
    fleet = fleet_of("a", "b")
    full = holding(fleet, dict.fromkeys(fleet.gpus, "full"))
    profiles = {profile.name for entry in fleet for profile in entry.gpu.profiles}
    assert kinds(listed(full)) == dict.fromkeys(profiles, 2)


def test_held_devices_count_only_where_they_are_published() -> None:
    fleet = fleet_of("a")
    held = holding(fleet, dict.fromkeys(list(fleet.gpus)[:4], "full"))
    assert kinds(listed(held, minimum={FULL: 6})) == {"full": 2}
    assert kinds(listed(held, minimum={FULL: 6}, held_published=False)) == {"full": 4}


def test_held_partitions_do_not_count_because_they_leave_the_slices_with_their_claim() -> None:
    fleet = fleet_of("a")
    held = holding(fleet, dict.fromkeys(list(fleet.gpus)[:1], "mig-1g10gb-0 mig-1g10gb-1"))
    assert kinds(listed(held, minimum={SMALL: 2})) == {"1g.10gb": 2}


def test_nothing_is_listed_on_nodes_that_follow_no_plan_or_without_a_minimum() -> None:
    fleet = fleet_of("a", "b")
    assert {offer.gpu.split("/")[0] for offer in listed(fleet, nodes=("b",))} == {"b"}
    assert listed(fleet, nodes=()) == frozenset()
    assert listed(fleet, minimum={}) == frozenset()


def test_a_listed_device_stays_until_it_is_offered_or_allocated() -> None:
    fleet, lists = fleet_of("a"), ListedDevices({SMALL: 3}, 2)
    first = sorted(lists.update(fleet, (), lambda *_: True, ["a"]), key=str)
    assert len(first) == 3
    offered = first[0]
    again = lists.update(fleet, (offered,), lambda *_: True, ["a"])
    assert again == {*first[1:]}
    name = fleet.gpus[first[1].gpu].name(first[1])
    assert name is not None
    held = holding(fleet, {first[1].gpu: name.removeprefix("gpu-0-")})
    now = lists.update(held, (offered,), lambda *_: True, ["a"])
    assert first[2] in now
    assert first[1] not in now
    assert len(now) == 2
    assert len(lists.update(held, (), lambda *_: False, ["a"])) == 3
