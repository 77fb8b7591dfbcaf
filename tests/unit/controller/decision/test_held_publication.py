"""How nodes publish: the offer mode of the cluster, and held devices of nodes without offers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from controller.cluster.claim_index import PoolDevice
from controller.cluster.node_views import NodeView
from controller.cluster.unheld_devices import UnheldDevices
from controller.curation.offer_mode import decide_offer_mode
from controller.decision.withdraw_and_admit import first_offers
from controller.decision.write_and_evict import HeldPublication
from driver.kube.types import GpuNodePlan, PlanMetadata
from driver.model.offer import Offer
from driver.model.plan import COUNTERS_FIELD, Held, OfferMode, PlanSpec, PublishHeld
from tests.support.node_views import changes, fleet_of
from tests.unit.controller.cluster.test_fleet_builder import view
from tests.unit.controller.decision.test_plan_writer import OTHER, POOL, SMALL, index_of, offer


@pytest.mark.parametrize(
    ("setting", "minor", "dropped", "expected"),
    [
        ("auto", 37, (), "Counters: the scheduler subtracts counters"),
        ("auto", 38, (), "Counters: the scheduler subtracts counters"),
        ("auto", 36, (), "Disjoint: Kubernetes 1.36: its scheduler is slow with counters"),
        ("auto", None, (), "Counters: the scheduler subtracts counters"),
        ("auto", 37, (COUNTERS_FIELD,), "Disjoint: the API server does not keep consumesCounters of devices"),
        ("auto", 37, ("taints",), "Counters: the scheduler subtracts counters"),
        ("disjoint", 37, (), "Disjoint: --offer-mode disjoint"),
        ("counters", 36, (), "Counters: --offer-mode counters"),
        ("counters", 36, (COUNTERS_FIELD,), "Disjoint: the API server does not keep consumesCounters of devices"),
    ],
)
def test_offers_are_disjoint_where_api_server_or_scheduler_are_not_up_to_counters(
    setting: str, minor: int | None, dropped: tuple[str, ...], expected: str
) -> None:
    node = view()
    node = view(status=msgspec.structs.replace(node.status, dropped=dropped))
    mode, reason = decide_offer_mode(setting, minor, [node])
    assert f"{mode.value}: {reason}" == expected
    assert isinstance(mode, OfferMode)


def test_an_offer_waits_for_published_devices_that_overlap_it_until_they_are_withdrawn() -> None:
    full, others = "gpu-0", ("gpu-0-mig-1g10gb-6", "gpu-0-mig-1g10gb-5")
    index = index_of(view(published=dict.fromkeys((*others, "gpu-1"), 1)))
    devices = {PoolDevice(POOL, name) for name in others}
    assert index.obstacles({offer(full)}, ()) == {offer(full): devices}
    assert index.obstacles({offer(full)}, {PoolDevice(POOL, others[0])}) == {offer(full): {PoolDevice(POOL, others[1])}}
    assert index.obstacles({offer(full)}, devices) == {}
    assert index.obstacles({offer(others[0])}, ()) == {}


class TestHeldPublication:
    """Which nodes publish their held devices without offering anything, and when they change."""

    NODES = tuple(f"n{number}" for number in range(100))

    @pytest.fixture(autouse=True)
    def clock(self) -> None:
        self.now = 0.0
        self.turn = iter(number / 100 for number in range(1, 10_000))

    def publication(self) -> HeldPublication:
        return HeldPublication(lambda: self.now, lambda: next(self.turn) % 1)

    def beside(self, modes: Mapping[str, PublishHeld]) -> int:
        return sum(mode is PublishHeld.BESIDE_OFFERS for mode in modes.values())

    def plans(self, mode: PublishHeld) -> dict[str, GpuNodePlan]:
        return {name: GpuNodePlan(PlanMetadata(name), PlanSpec(publish_held=mode)) for name in self.NODES}

    @pytest.mark.parametrize(
        ("gpus", "most", "expected"), [(500, 500, 0), (501, 500, 100), (1, 0, 100), (9999, None, 0)]
    )
    def test_new_nodes_begin_with_what_the_size_of_the_cluster_asks_for(
        self, gpus: int, most: int | None, expected: int
    ) -> None:
        assert self.beside(self.publication().decide(gpus, most, {}, self.NODES, ())) == expected

    def test_a_cluster_that_grows_changes_node_by_node_within_a_minute(self) -> None:
        found, plans = self.publication(), self.plans(PublishHeld.ALWAYS)
        changed = []
        for second in range(0, 61, 10):
            self.now = float(second)
            changed.append(self.beside(found.decide(800, 500, plans, self.NODES, ())))
        assert changed[0] <= 1
        assert changed[-1] == 100
        assert max(after - before for before, after in pairwise(changed)) <= 20
        assert found.next_s is None

    def test_a_cluster_that_shrinks_a_little_stays_as_it_is(self) -> None:
        plans = self.plans(PublishHeld.BESIDE_OFFERS)
        found = self.publication()
        assert self.beside(found.decide(450, 500, plans, self.NODES, ())) == 100
        assert found.next_s is None
        found.decide(400, 500, plans, self.NODES, ())
        self.now = 60.0
        assert self.beside(found.decide(400, 500, plans, self.NODES, ())) == 0

    def test_nodes_that_a_claim_matches_whole_publish_at_once_and_go_back_later(self) -> None:
        plans, found = self.plans(PublishHeld.BESIDE_OFFERS), self.publication()
        found.decide(800, 500, plans, self.NODES, ())
        modes = found.decide(800, 500, plans, self.NODES, {"n3"})
        assert [name for name, mode in modes.items() if mode is PublishHeld.ALWAYS] == ["n3"]
        self.now = 60.0
        assert found.decide(800, 500, plans, self.NODES, {"n3"})["n3"] is PublishHeld.ALWAYS
        assert found.decide(800, 500, plans, self.NODES, ())["n3"] is PublishHeld.ALWAYS
        self.now = 120.0
        assert self.beside(found.decide(800, 500, plans, self.NODES, ())) == 100


A_HELD = {"gpu-0-mig-1g10gb-4": Held("gpu-0-mig-1g10gb-4", "team/train")}


def test_only_first_offers_of_a_node_and_of_gpus_that_slices_lack_may_meet_held_devices_that_are_unpublished() -> None:
    def found(publish_held: PublishHeld, *offered: str, seen: NodeView) -> set[Offer]:
        fleet, devices = fleet_of(seen), UnheldDevices()
        devices.update([seen], changes([seen]), fleet)
        plan = GpuNodePlan(PlanMetadata("n1"), PlanSpec(offers=tuple(map(str, offered)), publish_held=publish_held))
        return set(first_offers([offer(SMALL)], fleet, devices, {"n1": plan}))

    beside = PublishHeld.BESIDE_OFFERS
    assert found(beside, seen=view()) == {offer(SMALL)}
    assert found(beside, str(offer(OTHER)), seen=view()) == set()
    assert found(beside, str(offer(OTHER)), seen=replace(view(), held=A_HELD)) == {offer(SMALL)}
    assert (
        found(beside, str(offer(OTHER)), seen=replace(view(), held=A_HELD, published=dict.fromkeys(A_HELD, 1))) == set()
    )
    assert found(PublishHeld.ALWAYS, seen=view()) == set()
    assert first_offers([offer(SMALL)], fleet_of(view()), UnheldDevices(), {}) == {}
