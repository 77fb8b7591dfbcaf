"""Following the controller's plan: nothing goes that was not withdrawn, nothing is added that was not asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import msgspec
import pytest

from driver.kube.types import GpuNodePlan, PlanMetadata
from driver.model.gpu_events_and_conditions import DeviceCondition
from driver.model.gpu_settings import GpuSharing
from driver.model.plan import (
    COUNTERS_FIELD,
    MODE_SPREAD_SECONDS,
    OfferMode,
    PlanMode,
    PlanSpec,
    PublishHeld,
    Summary,
)
from driver.model.reported_gpus import decode_inventory
from driver.slices.build import CLOSED, Content, PublishedGpu
from driver.slices.slice_names import DEVICES_PER_GPU, Pool
from kubelet_plugin.changes import ChangeNotifier, NodeChange
from kubelet_plugin.plan.follower import PlanFollower
from kubelet_plugin.plan.mode import FIRST_PLAN_TIMEOUT_SECONDS, ModeTiming
from kubelet_plugin.plan.plan_file import PlanFile
from kubelet_plugin.plan.plan_status import PlanReport
from tests.support.following import GivenFields, GivenInstructions, GivenSlices
from tests.support.node import NodeUnderTest, start_node
from tests.support.published import build_slices

SMALL, OTHER, FULL = "gpu-0-mig-1g10gb-6", "gpu-0-mig-1g10gb-5", "gpu-0"


@dataclass
class Controller:
    """What the node hears, as the test wants it."""

    plan_now: GpuNodePlan | None = None
    is_alive: bool = False

    def plan(self) -> GpuNodePlan | None:
        return self.plan_now

    def alive(self) -> bool:
        return self.is_alive


@dataclass
class Followed:
    """A node, its controller, and a clock that stands still."""

    node: NodeUnderTest
    controller: Controller = field(default_factory=Controller)
    now: float = 1000.0
    in_slices: set[str] = field(default_factory=set)
    changes: int = 0
    dropped: tuple[str, ...] = ()
    has_counters: bool = True
    complete: bool | None = False
    has_controller: bool = False

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """A new process."""
        inventory, fields, changes = self.node.node.inventory, GivenFields(lambda: self.dropped), ChangeNotifier()
        instructions = GivenInstructions(
            self.controller.plan, self.controller.alive, lambda: self.complete, lambda: self.has_controller
        )
        changes.subscribe(NodeChange.MODE, self.count)
        timing = ModeTiming(lambda: self.now, lambda: 0.5)
        store = PlanFile(self.node.root / "state")
        self.follower = PlanFollower(instructions, inventory, fields, store, changes, timing=timing)
        self.status = PlanReport(self.follower).status

    def count(self) -> None:
        self.changes += 1

    def publish(self) -> list[PublishedGpu]:
        return self.follower.published(GivenSlices(lambda: self.in_slices, lambda _: self.has_counters))

    def published(self, gpu: int = 0) -> set[str]:
        entries = self.publish()
        self.in_slices = {device.name for entry in entries for device in (*entry.held, *entry.offers)}
        return {device.name for device in (*entries[gpu].held, *entries[gpu].offers)}

    def offers(self, *names: str) -> tuple[str, ...]:
        inventory = self.node.node.inventory
        return tuple(
            str(device.offer) for gpu in inventory.gpus for device in inventory.devices_on(gpu) if device.name in names
        )

    def told(self, spec: PlanSpec) -> None:
        """A plan comes from a controller that lives."""
        answered = msgspec.structs.replace(spec, epoch=spec.epoch or self.status().epoch)
        self.controller.plan_now = GpuNodePlan(PlanMetadata("node-a", generation=7), answered)
        self.controller.is_alive = True


@pytest.fixture
def followed(node: NodeUnderTest) -> Followed:
    return Followed(node)


def test_without_a_controller_everything_that_fits_is_offered(followed: Followed) -> None:
    assert followed.published() == followed.node.offered(0)
    assert followed.follower.mode_choice.mode is PlanMode.STANDALONE


class TestMonitorDevices:
    """Published while the plan says that somebody needs them; always on complete nodes, and without a controller."""

    def names(self, followed: Followed) -> list[str]:
        followed.publish()
        return [monitor.name for monitor in followed.follower.monitors() or ()]

    def test_without_a_controller_they_are_always_published(self, followed: Followed) -> None:
        assert self.names(followed) == [f"gpu-{number}-monitor" for number in range(8)]

    def test_a_plugin_that_starts_leaves_them_as_they_are_until_it_has_received_its_plan(
        self, followed: Followed
    ) -> None:
        followed.told(PlanSpec())
        assert self.names(followed) == []
        followed.controller.plan_now = None
        followed.start()
        followed.publish()
        assert followed.follower.monitors() is None

    def test_a_plan_asks_for_them(self, followed: Followed) -> None:
        followed.told(PlanSpec())
        assert self.names(followed) == []
        followed.told(PlanSpec(monitors=True))
        assert len(self.names(followed)) == 8

    def test_a_complete_node_always_publishes_them(self, followed: Followed) -> None:
        followed.complete = True
        followed.told(PlanSpec())
        assert len(self.names(followed)) == 8

    def test_gpus_that_do_not_answer_or_that_another_driver_owns_are_left_out(self, followed: Followed) -> None:
        inventory = followed.node.node.inventory
        gone, owned, *others = inventory.gpus
        inventory.update([owned, *others], {gone.uuid: "lost"})
        inventory.set_reserved({owned.uuid: "the device plugin owns it"})
        assert self.names(followed) == [f"gpu-{number}-monitor" for number in range(2, 8)]

    def test_unhealthy_and_held_gpus_are_monitored(self, followed: Followed) -> None:
        inventory = followed.node.node.inventory
        inventory.set_conditions(inventory.gpus[0].uuid, (DeviceCondition("xid-79", "it fell off the bus"),))
        followed.node.preparer.prepare(followed.node.api.allocate("train", "gpu-1"))
        assert len(self.names(followed)) == 8


def test_a_first_plan_takes_nothing_away(followed: Followed) -> None:
    everything = followed.published()
    followed.told(PlanSpec(offers=followed.offers(SMALL)))
    assert followed.published() == everything
    assert followed.follower.mode_choice.mode is PlanMode.PLANNED


def test_what_was_withdrawn_goes_and_the_rest_stays(followed: Followed) -> None:
    everything = followed.published()
    followed.told(PlanSpec(offers=followed.offers(SMALL), withdrawn=(OTHER, FULL)))
    assert followed.published() == everything - {OTHER, FULL}


def test_only_what_was_asked_for_comes_back(followed: Followed) -> None:
    everything = followed.published()
    followed.told(PlanSpec(withdrawn=tuple(everything)))
    assert followed.published() == set()
    followed.told(PlanSpec(offers=followed.offers(SMALL)))
    assert followed.published() == {SMALL}


def test_a_device_that_is_withdrawn_and_offered_at_once_is_offered(followed: Followed) -> None:
    everything = followed.published()
    followed.told(PlanSpec(offers=followed.offers(SMALL), withdrawn=tuple(everything)))
    assert followed.published() == {SMALL}


def test_what_the_plan_names_as_held_stays(followed: Followed) -> None:
    followed.told(PlanSpec(withdrawn=tuple(followed.published() - {SMALL})))
    followed.published()
    followed.told(PlanSpec(held=(f"{SMALL} default/infer",), withdrawn=(SMALL,)))
    assert followed.published() == {SMALL}
    followed.controller.is_alive = False
    followed.now += 1000
    assert SMALL in followed.published()


def test_what_overlaps_an_allocated_device_goes_once_that_is_prepared(followed: Followed) -> None:
    everything = followed.published()
    claim = followed.node.api.allocate("infer", SMALL)
    followed.told(PlanSpec(held=(f"{SMALL} default/infer",)))
    # Were the claim deallocated by now, somebody might have been given what overlaps it.
    assert followed.published() == everything
    followed.node.preparer.prepare(claim)
    assert FULL not in followed.published()


def test_nothing_new_is_offered_that_overlaps_an_allocated_device(followed: Followed) -> None:
    followed.told(PlanSpec(withdrawn=tuple(followed.published() - {SMALL})))
    followed.published()
    held = (f"{SMALL} default/infer",)
    followed.told(PlanSpec(held=held, offers=followed.offers(FULL, OTHER)))
    assert followed.published() == {SMALL, OTHER}


def test_alone_too_what_overlaps_an_allocated_device_stays_until_that_is_prepared(followed: Followed) -> None:
    everything = followed.published()
    followed.told(PlanSpec(epoch="another", held=(f"{SMALL} default/infer",)))
    assert followed.published() == everything


def test_a_prepared_device_is_published_whatever_the_plan_says(followed: Followed) -> None:
    everything = followed.published()
    followed.told(PlanSpec(withdrawn=tuple(everything)))
    followed.node.preparer.prepare(followed.node.api.allocate("infer", SMALL))
    assert followed.published() == {SMALL}


def test_a_device_that_its_claim_gave_back_stays_until_it_is_withdrawn(followed: Followed) -> None:
    followed.told(PlanSpec(withdrawn=tuple(followed.published())))
    assert followed.published() == set()
    claim = followed.node.api.allocate("infer", SMALL)
    followed.node.preparer.prepare(claim)
    followed.told(PlanSpec(held=(f"{SMALL} default/infer",)))
    assert followed.published() == {SMALL}
    followed.node.preparer.unprepare(claim)
    followed.told(PlanSpec())
    assert followed.published() == {SMALL}
    followed.told(PlanSpec(withdrawn=(SMALL,)))
    assert followed.published() == set()


def test_a_plan_for_another_epoch_adds_nothing_and_takes_nothing(followed: Followed) -> None:
    followed.told(PlanSpec(withdrawn=tuple(followed.published() - {SMALL})))
    assert followed.published() == {SMALL}
    followed.told(PlanSpec(epoch="another", offers=followed.offers(OTHER), withdrawn=(SMALL,)))
    assert followed.published() == {SMALL}


class TestALostController:
    """The node goes on as planned for a while, then stands alone."""

    @pytest.fixture
    def planned(self, followed: Followed) -> Followed:
        followed.told(PlanSpec(offers=followed.offers(SMALL), withdrawn=tuple(followed.published())))
        assert followed.published() == {SMALL}
        followed.controller.is_alive = False
        followed.published()
        return followed

    def test_nodes_stand_alone_apart_from_each_other(self, planned: Followed) -> None:
        planned.now += MODE_SPREAD_SECONDS * 0.5 - 1
        assert planned.published() == {SMALL}
        planned.now += 2
        assert planned.published() == planned.node.offered(0)

    def test_one_that_comes_back_in_time_changes_nothing(self, planned: Followed) -> None:
        planned.controller.is_alive = True
        planned.published()
        planned.now += MODE_SPREAD_SECONDS
        assert planned.published() == {SMALL}

    def test_the_old_plan_is_not_followed_when_it_comes_back_later(self, planned: Followed) -> None:
        planned.now += MODE_SPREAD_SECONDS
        everything = planned.published()
        planned.controller.is_alive = True
        assert planned.published() == everything
        assert planned.follower.mode_choice.mode is PlanMode.STANDALONE

    def test_a_restart_of_the_plugin_goes_on_as_planned_until_its_patience_ends(self, planned: Followed) -> None:
        planned.start()
        assert planned.published() == {SMALL}
        planned.now += FIRST_PLAN_TIMEOUT_SECONDS + MODE_SPREAD_SECONDS
        assert planned.published() == planned.node.offered(0)

    def test_a_restart_takes_nothing_away_that_was_published(self, planned: Followed) -> None:
        planned.in_slices = {SMALL, OTHER}
        planned.told(PlanSpec(offers=planned.offers(SMALL)))
        planned.start()
        assert planned.published() == {SMALL, OTHER}

    def test_unreadable_memory_means_alone(self, planned: Followed) -> None:
        (planned.node.root / "state" / "plan.json").write_text("{")
        planned.start()
        assert planned.follower.mode_choice.mode is PlanMode.STANDALONE


def test_a_plan_that_is_deleted_means_alone_after_a_while(followed: Followed) -> None:
    followed.told(PlanSpec(withdrawn=tuple(followed.published())))
    assert followed.published() == set()
    followed.controller.plan_now = None
    assert followed.published() == set()
    followed.now += MODE_SPREAD_SECONDS
    assert followed.published() == followed.node.offered(0)


def test_the_status_tells_the_controller_all_about_the_gpus(followed: Followed) -> None:
    status = followed.status()
    assert [state.gpu for state in decode_inventory(status.inventory)] == list(followed.node.node.inventory.gpus)
    assert re.fullmatch("gpu-0 GPU-[-0-9a-f]+: NVIDIA H100 80GB HBM3, MIG disabled", status.gpus[0])
    assert msgspec.json.decode(msgspec.json.encode(status), type=type(status)) == status


class TestANewNode:
    """Nothing was ever published of it, and it holds nothing."""

    @pytest.fixture
    def new(self, followed: Followed) -> Followed:
        followed.has_controller = True
        return followed

    def test_it_offers_nothing_before_its_first_plan_and_then_what_that_says(self, new: Followed) -> None:
        assert new.published() == set()
        assert new.follower.mode_choice.is_waiting
        new.told(PlanSpec(offers=new.offers(SMALL)))
        new.controller.is_alive = False  # no renewal was seen yet
        assert new.published() == {SMALL}
        assert not new.follower.mode_choice.is_waiting
        new.now += MODE_SPREAD_SECONDS / 4
        new.controller.is_alive = True
        assert new.published() == {SMALL}

    def test_it_is_standalone_if_no_plan_comes(self, new: Followed) -> None:
        assert new.published() == set()
        new.now += FIRST_PLAN_TIMEOUT_SECONDS
        changes = new.changes
        new.follower.update_mode()
        assert new.changes == changes + 1
        assert new.published() == new.node.offered(0)
        assert new.follower.mode_choice.mode is PlanMode.STANDALONE

    def test_it_is_standalone_as_soon_as_it_knows_that_there_is_no_controller(self, new: Followed) -> None:
        assert new.published() == set()
        assert new.follower.mode_choice.unplanned_epoch() is None
        new.has_controller = False
        assert new.published() == new.node.offered(0)
        assert new.follower.mode_choice.unplanned_epoch() is not None

    def test_a_node_with_held_devices_or_slices_is_not_new(self, new: Followed) -> None:
        new.in_slices = {OTHER}
        assert new.published() == new.node.offered(0)

    def test_a_node_that_holds_a_device_is_not_new(self, new: Followed) -> None:
        new.node.preparer.prepare(new.node.api.allocate("infer", SMALL))
        assert FULL not in new.published()
        assert OTHER in new.published()


class TestCompletePublication:
    """Every device that the GPUs can be, whatever is held and whatever the plan says."""

    @pytest.fixture
    def complete(self, followed: Followed) -> Followed:
        followed.complete = True
        return followed

    def test_slices_are_the_same_before_and_after_an_allocation(self, complete: Followed) -> None:
        idle = slices_of(complete)
        assert complete.status().mode is PlanMode.COMPLETE
        claim = complete.node.api.allocate("infer", SMALL)
        complete.node.preparer.prepare(claim)
        complete.told(PlanSpec(held=(f"{SMALL} default/infer",), withdrawn=(FULL, OTHER)))
        complete.node.scanner.scan(complete.node.node.inventory)
        assert slices_of(complete) == idle
        complete.node.preparer.unprepare(claim)
        assert slices_of(complete) == idle

    def test_a_fault_still_shows(self, complete: Followed) -> None:
        gpu = complete.node.node.inventory.gpus[0]
        complete.node.node.inventory.set_conditions(gpu.uuid, (DeviceCondition("xid-48", "double bit error"),))
        devices = [device for content in slices_of(complete).values() for device in content.get("devices", ())]
        assert {device["name"] for device in devices if "taints" in device} == complete.published()

    def test_a_node_that_followed_a_plan_publishes_the_rest_and_returns_without_a_gap(self, followed: Followed) -> None:
        everything = followed.published()
        followed.told(PlanSpec(offers=followed.offers(SMALL), withdrawn=tuple(everything)))
        assert followed.published() == {SMALL}
        epoch = followed.status().epoch
        followed.complete = True
        assert followed.published() == everything
        assert followed.follower.mode_choice.unplanned_epoch() not in {None, epoch}
        followed.complete = False
        assert followed.published() == everything
        followed.told(PlanSpec(offers=followed.offers(SMALL), withdrawn=(FULL,)))
        assert followed.published() == everything - {FULL}

    def test_a_restart_goes_on_before_the_label_is_known(self, complete: Followed) -> None:
        everything = complete.published()
        complete.node.preparer.prepare(complete.node.api.allocate("infer", SMALL))
        complete.complete = None
        complete.start()
        assert complete.published() == everything

    def test_without_counters_at_the_api_server_it_has_no_effect(self, complete: Followed) -> None:
        complete.dropped = (COUNTERS_FIELD,)
        assert complete.published() == {FULL}
        assert complete.follower.mode_choice.mode is PlanMode.STANDALONE


def slices_of(followed: Followed) -> dict[str, Content]:
    return build_slices(Pool("node-a", "gpu.tessera.dev"), followed.publish())


def in_slices(followed: Followed) -> set[str]:
    return {device["name"] for content in slices_of(followed).values() for device in content.get("devices", ())}


def counter_sets(followed: Followed) -> set[str]:
    return {each["name"] for content in slices_of(followed).values() for each in content.get("sharedCounters", ())}


def closed(followed: Followed) -> set[str]:
    """Devices that are published and that nobody new is given."""
    devices = (device for content in slices_of(followed).values() for device in content.get("devices", ()))
    return {device["name"] for device in devices if CLOSED in device.get("taints", ())}


def test_what_is_published_and_not_offered_is_closed_to_new_claims(followed: Followed) -> None:
    everything = {device for gpu in range(8) for device in followed.published(gpu)}
    assert closed(followed) == set()
    followed.told(PlanSpec(offers=followed.offers(SMALL)))
    assert closed(followed) == everything - {SMALL}
    followed.told(PlanSpec(offers=followed.offers(SMALL), withdrawn=tuple(everything - {OTHER})))
    assert closed(followed) == {OTHER}
    followed.told(PlanSpec(offers=followed.offers(SMALL, OTHER)))
    assert closed(followed) == set()


def test_a_listed_device_is_published_and_closed_even_beside_what_overlaps_it(followed: Followed) -> None:
    followed.told(PlanSpec(withdrawn=tuple(device for gpu in range(8) for device in followed.published(gpu))))
    assert in_slices(followed) == set()
    followed.node.preparer.prepare(followed.node.api.allocate("infer", SMALL))
    [full] = [offer for offer in followed.offers(FULL) if offer.endswith("/full")][:1]
    followed.told(PlanSpec(held=(f"{SMALL} default/infer",), listed=(full,)))
    assert in_slices(followed) == {SMALL, FULL}
    assert closed(followed) == {SMALL, FULL}
    followed.told(PlanSpec(held=(f"{SMALL} default/infer",)))
    assert in_slices(followed) == {SMALL}


def test_a_listed_device_that_is_offered_stays_when_a_claim_gets_what_overlaps_it(followed: Followed) -> None:
    [full] = [offer for offer in followed.offers(FULL) if offer.endswith("/full")][:1]
    others = tuple({device for gpu in range(8) for device in followed.published(gpu)} - {FULL})
    followed.told(PlanSpec(offers=(full,), listed=(full,), withdrawn=others))
    assert (in_slices(followed), closed(followed)) == ({FULL}, set())
    followed.node.preparer.prepare(followed.node.api.allocate("infer", SMALL))
    assert in_slices(followed) == {SMALL, FULL}


def test_what_a_claim_leaves_is_not_given_away_again_where_it_is(followed: Followed) -> None:
    others = tuple({device for gpu in range(8) for device in followed.published(gpu)} - {SMALL})
    followed.told(PlanSpec(offers=followed.offers(SMALL), withdrawn=others))
    assert closed(followed) == set()
    claim = followed.node.api.allocate("infer", SMALL)
    followed.node.preparer.prepare(claim)
    followed.told(PlanSpec(held=(f"{SMALL} default/infer",), withdrawn=others))
    assert closed(followed) == {SMALL}
    followed.node.preparer.unprepare(claim)
    assert closed(followed) == {SMALL}


def test_what_was_published_before_is_known_though_the_slices_are_lost(followed: Followed) -> None:
    """A kubelet that starts, or misses the plugin for long, deletes them; somebody may have been given any of it."""
    others = tuple(device for gpu in range(8) for device in followed.published(gpu) if device not in (SMALL, OTHER))
    followed.told(PlanSpec(offers=followed.offers(SMALL), withdrawn=others))
    assert followed.published() == {SMALL, OTHER}
    followed.in_slices = set()
    followed.start()
    assert followed.published() == {SMALL, OTHER}


def test_a_change_of_mode_that_publishing_finds_is_told(followed: Followed) -> None:
    followed.told(PlanSpec(offers=followed.offers(SMALL)))
    followed.published()
    followed.controller.is_alive = False
    followed.published()
    before = followed.changes
    followed.now += MODE_SPREAD_SECONDS
    followed.published()
    assert followed.follower.mode_choice.mode is PlanMode.STANDALONE
    assert followed.changes == before + 1


def test_what_is_published_never_goes_to_make_room(node: NodeUnderTest) -> None:
    """Of a GPU with shares not all devices can be published at once."""
    shared = Followed(start_node(node.root / "shared", sharing=GpuSharing(lambda gpu: 10 if gpu.index == 0 else 0)))
    holders = [shared.node.api.allocate(f"user-{number}", f"gpu-0-share-{number}") for number in range(7)]
    for holder in holders:
        shared.node.preparer.prepare(holder)
    beside = shared.published()
    assert len(beside) == 10
    for holder in holders:
        shared.node.preparer.unprepare(holder)
    assert beside < shared.published()
    assert len(shared.published()) == DEVICES_PER_GPU


def test_alone_nothing_is_closed(followed: Followed) -> None:
    followed.node.preparer.prepare(followed.node.api.allocate("infer", SMALL))
    followed.told(PlanSpec(epoch="another", offers=followed.offers(OTHER)))
    assert followed.follower.mode_choice.mode is PlanMode.STANDALONE
    assert closed(followed) == set()


def test_offers_that_can_not_be_made_are_refused_with_a_reason(followed: Followed) -> None:
    everything = followed.published()
    unknown = "GPU-gone/full"
    followed.told(PlanSpec(offers=(*followed.offers(SMALL, FULL), unknown), withdrawn=tuple(everything)))
    followed.node.preparer.prepare(followed.node.api.allocate("infer", SMALL))
    followed.published()
    refused = dict(entry.split(": ") for entry in followed.status().refused)
    assert refused.keys() == {unknown, *followed.offers(SMALL, FULL)}
    for offer in followed.offers(SMALL, FULL):  # the plan knows nothing of the claim: it may be deleted by force
        text = rf"claim .*infer \(.*\) still has {SMALL} on this node until its kubelet releases it"
        assert re.fullmatch(text, refused[offer])
    assert "no such device" in refused[unknown]
    followed.told(PlanSpec(offers=followed.offers(SMALL), held=(f"{SMALL} default/infer",)))
    assert followed.status().refused == ()


HELD = "gpu-0-mig-1g10gb-0"


def plan_beside_offers(
    followed: Followed,
    *offered: str,
    held: tuple[str, ...] = (HELD,),
    withdrawn: tuple[str, ...] = (),
    listed: tuple[str, ...] = (),
) -> None:
    """A plan comes that lets the node leave out what is held while it offers nothing."""
    named, offers = tuple(f"{device} default/infer" for device in held), followed.offers(*offered)
    beside_offers = PublishHeld.BESIDE_OFFERS
    followed.told(PlanSpec("", named, offers, withdrawn, beside_offers, listed=followed.offers(*listed)))


class TestAGpuThatOffersNothing:
    """The plan says that held devices are published only beside offers."""

    @pytest.fixture
    def beside(self, followed: Followed) -> Followed:
        """HELD is allocated and prepared, SMALL is offered beside it."""
        everything = tuple(device for gpu in range(8) for device in followed.published(gpu))
        claim = followed.node.api.allocate("infer", HELD)
        followed.node.preparer.prepare(claim)
        plan_beside_offers(followed, SMALL, withdrawn=everything)
        assert in_slices(followed) == {HELD, SMALL}
        return followed

    def test_it_leaves_the_slices_with_its_counters_once_its_last_offer_is_allocated(self, beside: Followed) -> None:
        assert counter_sets(beside) == {f"gpu-{number}" for number in range(8)}
        plan_beside_offers(beside, held=(HELD, SMALL))
        assert in_slices(beside) == set()
        assert counter_sets(beside) == set()
        assert beside.status().summary == Summary(gpus=8, held=2, offered=0)

    def test_it_stays_while_its_last_offer_is_not_withdrawn(self, beside: Followed) -> None:
        plan_beside_offers(beside)
        assert in_slices(beside) == {HELD, SMALL}
        plan_beside_offers(beside, withdrawn=(SMALL,))
        assert in_slices(beside) == set()

    def test_it_comes_back_with_everything_that_may_be_held(self, beside: Followed) -> None:
        plan_beside_offers(beside, held=(HELD, SMALL))
        assert in_slices(beside) == set()
        # Nobody has SMALL any more, as far as the controller knows; a late allocation of it may still be written.
        plan_beside_offers(beside)
        assert in_slices(beside) == set()
        plan_beside_offers(beside, OTHER)
        assert in_slices(beside) == {HELD, SMALL, OTHER}
        assert closed(beside) == {HELD, SMALL}

    @pytest.mark.parametrize("wiped", [False, True])
    def test_a_restart_knows_what_was_unpublished(self, beside: Followed, *, wiped: bool) -> None:
        plan_beside_offers(beside, held=(HELD, SMALL))
        there = in_slices(beside)
        beside.in_slices = set() if wiped else there
        beside.start()
        beside.controller.plan_now = None  # not received yet
        assert in_slices(beside) == set()
        plan_beside_offers(beside, OTHER)
        assert in_slices(beside) == {HELD, SMALL, OTHER}

    def test_a_plan_that_lacks_a_prepared_device_does_not_bring_it_back(self, beside: Followed) -> None:
        plan_beside_offers(beside, held=(HELD, SMALL))
        assert in_slices(beside) == set()
        plan_beside_offers(beside, OTHER, held=(SMALL,))
        assert in_slices(beside) == set()
        [refused] = beside.status().refused
        assert refused.endswith(f"the plan lacks a device of its GPU that a claim still has: {HELD}")
        plan_beside_offers(beside, OTHER, held=(HELD, SMALL))
        assert in_slices(beside) == {HELD, SMALL, OTHER}

    def test_it_is_published_whatever_is_offered_if_the_plan_says_always(self, beside: Followed) -> None:
        plan_beside_offers(beside, held=(HELD, SMALL))
        assert in_slices(beside) == set()
        beside.told(PlanSpec(held=(f"{HELD} default/infer", f"{SMALL} default/infer")))
        assert in_slices(beside) == {HELD, SMALL}

    def test_it_is_published_by_a_standalone_node(self, beside: Followed) -> None:
        plan_beside_offers(beside, held=(HELD, SMALL))
        assert in_slices(beside) == set()
        beside.controller.is_alive = False
        in_slices(beside)
        beside.now += MODE_SPREAD_SECONDS
        assert in_slices(beside) >= {HELD, SMALL, OTHER}

    def test_it_is_published_while_a_held_device_is_unhealthy(self, beside: Followed) -> None:
        gpu = beside.node.node.inventory.gpus[0]
        plan_beside_offers(beside, held=(HELD, SMALL))
        assert in_slices(beside) == set()
        beside.node.node.inventory.set_conditions(gpu.uuid, (DeviceCondition("xid-94", "contained error"),))
        assert in_slices(beside) == {HELD, SMALL}
        beside.node.node.inventory.set_conditions(gpu.uuid, ())
        assert in_slices(beside) == set()


class TestANodeThatOffersSomethingElsewhere:
    """The plan says that held devices are published only beside offers: of the node, not of their GPU."""

    ELSEWHERE, LAST = "gpu-5-mig-1g10gb-0", "gpu-5"

    @pytest.fixture
    def unpublished(self, followed: Followed) -> Followed:
        """HELD is held and nothing is offered."""
        everything = tuple(in_slices(followed))
        followed.node.preparer.prepare(followed.node.api.allocate("infer", HELD))
        plan_beside_offers(followed, withdrawn=everything)
        assert in_slices(followed) == set()
        assert counter_sets(followed) == set()
        return followed

    def test_it_publishes_everything_that_is_held(self, unpublished: Followed) -> None:
        plan_beside_offers(unpublished, self.ELSEWHERE)
        assert in_slices(unpublished) == {HELD, self.ELSEWHERE}
        assert closed(unpublished) == {HELD}
        assert counter_sets(unpublished) == {f"gpu-{number}" for number in range(8)}

    def test_it_publishes_it_until_the_last_offer_is_gone(self, unpublished: Followed) -> None:
        plan_beside_offers(unpublished, self.ELSEWHERE)
        assert in_slices(unpublished) == {HELD, self.ELSEWHERE}
        plan_beside_offers(unpublished, held=(HELD, self.ELSEWHERE))
        assert in_slices(unpublished) == set()

    def test_a_listed_device_brings_nothing_back_because_nobody_gets_it(self, unpublished: Followed) -> None:
        plan_beside_offers(unpublished, listed=(self.LAST,))
        assert in_slices(unpublished) == {self.LAST}

    def test_an_offer_that_waits_for_a_newer_plan_brings_nothing_back(self, unpublished: Followed) -> None:
        plan_beside_offers(unpublished, SMALL, held=())
        assert in_slices(unpublished) == set()
        plan_beside_offers(unpublished, SMALL, self.ELSEWHERE, held=())
        assert in_slices(unpublished) == {self.ELSEWHERE}

    def test_what_is_held_is_written_before_what_is_offered(self, unpublished: Followed) -> None:
        plan_beside_offers(unpublished, "gpu-0-mig-1g10gb-4", "gpu-2-mig-1g10gb-0")
        pool = Pool("node-a", "gpu.tessera.dev")
        order = list(build_slices(pool, unpublished.publish()))
        assert order == [
            pool.counter_slice(0),
            *(pool.device_slice(number) for number in (4, 6)),
            *(pool.device_slice(number) for number in (0, 2)),
        ]

    def test_its_next_process_knows_the_gpus_and_shares_that_are_held(self, node: NodeUnderTest) -> None:
        shared = Followed(start_node(node.root / "shared", sharing=GpuSharing(lambda gpu: 4 if gpu.index else 0)))
        shared.publish()
        shared.told(PlanSpec(held=("gpu-0 default/train", "gpu-3-share-2 default/infer")))
        shared.publish()
        memory, gpus = PlanFile(shared.node.root / "state").now, shared.node.node.inventory.gpus
        assert memory.held_gpus == {gpus[0].uuid: 0, gpus[3].uuid: 3}
        assert memory.held_shares == {gpus[3].uuid: {2: 4}}


class TestOfferModes:
    """Offers of one GPU overlap and are counted, or are disjoint."""

    HALF, OTHER_HALF = "gpu-0-mig-3g40gb-0", "gpu-0-mig-3g40gb-4"

    def plan(self, followed: Followed, *offered: str, withdrawn: tuple[str, ...] = ()) -> None:
        followed.told(PlanSpec("", (), followed.offers(*offered), withdrawn, offer_mode=OfferMode.DISJOINT))

    def modes(self, followed: Followed) -> tuple[OfferMode, tuple[str, ...], int]:
        """The reported mode, the fields that are dropped, and the number of devices left out."""
        status = followed.status()
        return status.offer_mode, status.dropped, len(status.left_out)

    def test_a_node_changes_to_disjoint_offers_when_nothing_overlaps_any_more(self, followed: Followed) -> None:
        everything = tuple(in_slices(followed))
        self.plan(followed, FULL)
        assert in_slices(followed) == {*everything}
        assert self.modes(followed) == (OfferMode.COUNTERS, (), 0)
        assert counter_sets(followed) == {f"gpu-{number}" for number in range(8)}
        self.plan(followed, self.HALF, SMALL, withdrawn=everything)
        assert in_slices(followed) == {self.HALF, SMALL}
        assert self.modes(followed) == (OfferMode.DISJOINT, (), 0)
        assert counter_sets(followed) == set()

    def test_a_node_changes_back_at_once(self, followed: Followed) -> None:
        everything = tuple(followed.published())
        self.plan(followed, SMALL, withdrawn=everything)
        assert followed.published() == {SMALL}
        followed.told(PlanSpec(offers=followed.offers(SMALL, FULL)))
        assert followed.published() == {SMALL, FULL}
        assert self.modes(followed)[0] is OfferMode.COUNTERS

    def test_counters_that_are_dropped_make_offers_disjoint_whatever_the_plan_says(self, followed: Followed) -> None:
        followed.dropped = (COUNTERS_FIELD,)
        followed.told(PlanSpec(offers=followed.offers(SMALL, FULL)))
        assert followed.published() == {FULL}
        assert self.modes(followed) == (OfferMode.DISJOINT, (COUNTERS_FIELD,), 0)

    def test_a_standalone_node_keeps_the_mode_of_its_last_plan_over_a_restart(self, followed: Followed) -> None:
        everything = tuple(in_slices(followed))
        self.plan(followed, SMALL, withdrawn=everything)
        in_slices(followed)
        followed.controller.plan_now, followed.controller.is_alive = None, False
        followed.in_slices = set()
        followed.start()
        followed.now += FIRST_PLAN_TIMEOUT_SECONDS + MODE_SPREAD_SECONDS
        assert followed.published() == {SMALL}
        assert followed.published(1) == {"gpu-1"}
        assert followed.follower.mode_choice.mode is PlanMode.STANDALONE

    def test_a_downgraded_api_server_keeps_the_counters_of_slices_that_have_them(self, followed: Followed) -> None:
        before = in_slices(followed)
        followed.dropped = (COUNTERS_FIELD,)
        self.plan(followed)
        assert in_slices(followed) == before
        assert self.modes(followed)[0] is OfferMode.COUNTERS

    def test_devices_whose_counters_would_be_lost_are_left_out_and_reported_until_they_are_withdrawn(
        self, followed: Followed
    ) -> None:
        before = tuple(in_slices(followed))
        followed.dropped, followed.has_counters = (COUNTERS_FIELD,), False
        followed.start()
        self.plan(followed, self.HALF)
        assert in_slices(followed) == set()
        assert set(followed.status().left_out) == set(before)
        self.plan(followed, self.HALF, self.OTHER_HALF, withdrawn=before)
        assert in_slices(followed) == {self.HALF, self.OTHER_HALF}
        assert self.modes(followed) == (OfferMode.DISJOINT, (COUNTERS_FIELD,), 0)

    def test_an_offer_that_overlaps_a_published_device_is_refused_with_the_reason(self, followed: Followed) -> None:
        everything = tuple(in_slices(followed))
        self.plan(followed, SMALL, withdrawn=everything)
        followed.published()
        self.plan(followed, FULL)
        assert followed.published() == {SMALL}
        [refused] = followed.status().refused
        assert "does not fit beside the published devices" in refused
