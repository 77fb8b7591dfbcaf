"""Whatever happens, a GPU is in the slices with everything that claims hold of it while anything of it is offered.

A state machine of one node with one GPU. The node's rules, the slices and the order of their writes, the controller's
views and plans are the product's own. Simulated are the API server, the fence, the choice of offers (any that fit), and
schedulers that decide from old slices and write their decisions late. Not simulated: a controller that is killed
between lifting the fence of a device and writing the plan that offers it, and a scheduler so late that it decides from
slices older than the withdrawal of a device that is offered again.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from controller.cluster.cache import _published
from controller.cluster.claim_index import ClaimIndex, PoolDevice
from controller.cluster.fleet_builder import FleetBuilder
from controller.cluster.node_views import NodeView, NodeViews
from controller.cluster.unheld_devices import UnheldDevices
from controller.decision.withdraw_and_admit import first_offers
from controller.decision.write_and_evict import Asked, HeldPublication, PlanSpecs
from driver.kube.slice_types import ResourceSlice
from driver.kube.types import (
    Allocation,
    Claim,
    ClaimSpec,
    ClaimStatus,
    DeviceAllocation,
    GpuNodePlan,
    Metadata,
    Node,
    PlanMetadata,
    Result,
)
from driver.model.device import Device, devices_of, is_shared
from driver.model.gpu_settings import GpuSharing
from driver.model.offer import DeviceKind, Spot
from driver.model.plan import OfferMode, PlanMode, PlanSpec, PlanStatus
from driver.model.shared_memory import SharingStrategy
from driver.placement.occupancy import GpuState, overlap
from driver.slices.build import CLOSED, SliceBuilder, slice_object
from driver.slices.dropped_fields import KeptFields
from driver.slices.publisher import changes
from driver.slices.slice_names import Pool
from kubelet_plugin.changes import ChangeNotifier
from kubelet_plugin.inventory.inventory import ClaimReference, Inventory
from kubelet_plugin.plan.follower import PlanFollower
from kubelet_plugin.plan.mode import ModeTiming
from kubelet_plugin.plan.plan_file import PlanMemory
from kubelet_plugin.plan.plan_status import PlanReport
from tests.support.fleets import possible
from tests.support.following import GivenInstructions, GivenSlices, GivenStore
from tests.support.gpus import gpu_of
from tests.support.node_views import changes as changes_of

POOL = Pool("n1", "gpu.tessera.dev")
GPU = gpu_of()
SHARING = GpuSharing(lambda _: 0, strategy_of=lambda _: SharingStrategy.TIME_SLICING)
SHARED = SHARING.memory_of(GPU, SharingStrategy.TIME_SLICING)
PART, PARTS = 30, 2
"""GiB that each claim has of the shared device, and how many claims can have them."""

DEVICES = {
    device.name: device
    for device in devices_of(GPU, 0, 0, shared=SHARED)
    if device.profile is None or (device.profile.name in {"1g.10gb", "3g.40gb"} and device.mask & 0b11)
}
NAMES = st.sampled_from(sorted(DEVICES))
ALL = 99
CLAIMS = [f"claim-{number}" for number in range(3)]

Slices = Mapping[str, dict[str, Any]]


def allocated(name: str) -> Device:
    """The device as a claim has it: a part of a shared one."""
    device = DEVICES[name]
    return replace(device, spot=Spot(device.spot.kind, PART)) if is_shared(name) else device


def most_claims(name: str) -> int:
    """How many claims can have a device."""
    return PARTS if is_shared(name) else 1


@dataclass(frozen=True)
class Stored:
    """One state of the API server."""

    claims: Mapping[str, str]
    """The device of each allocated claim."""
    slices: Slices


@dataclass
class Decision:
    """An allocation that a scheduler has chosen and not written yet."""

    claim: str
    device: str


@dataclass
class Scheduler:
    """Decides from slices as they were at ``seen``, and from all claims; ``assumed`` are its decisions under way.

    Its slices may be old, but not older than the last prepared claim that it saw ending.
    """

    seen: int = 0
    assumed: list[Decision] = field(default_factory=list)


class OneNode(RuleBasedStateMachine):
    """With one scheduler: nothing is allocated twice either."""

    schedulers_count = 1

    @initialize(most_gpus=st.sampled_from([0, 0, 100]))
    def start(self, most_gpus: int) -> None:
        self.history = [Stored({}, {})]
        self.plan = GpuNodePlan(PlanMetadata("n1"), status=PlanStatus())
        self.fenced: set[PoolDevice] = set()
        self.prepared: dict[str, Device] = {}
        self.prepared_at = 0
        self.memory: PlanMemory | None = PlanMemory("epoch", PlanMode.PLANNED)
        self.most_gpus = most_gpus
        self.schedulers = [Scheduler() for _ in range(self.schedulers_count)]
        self.alive, self.now, self.seen_plan = True, 0.0, self.plan
        self.start_node()
        self.start_controller()

    # The API server

    @property
    def stored(self) -> Stored:
        return self.history[-1]

    def store(self, **fields: Any) -> None:
        """Store something, and check what must be true of every state."""
        self.history.append(replace(self.stored, **fields))
        self.check_invariant()

    def check_invariant(self) -> None:
        held = {DEVICES[name] for name in self.stored.claims.values()}
        twice = {device.name for device in held for other in held if device is not other and overlap(device, other)}
        counts = sorted(self.stored.claims.values())
        if self.schedulers_count == 1:
            assert not twice
            assert all(counts.count(name) <= most_claims(name) for name in counts), counts
        sets = {each["name"] for spec in self.stored.slices.values() for each in spec.get("sharedCounters", ())}
        for spec in self.stored.slices.values():
            devices = {each["name"]: each for each in spec.get("devices", ())}
            for each in devices.values():
                assert {used["counterSet"] for used in each["consumesCounters"]} <= sets
            free = devices.keys() - {device.name for device in held}
            # Two schedulers may give the same memory away: the node prepares one of the claims.
            here = {device.name for device in held if free} - twice
            assert here <= devices.keys(), f"{sorted(free)} are in the slices, {sorted(here - devices.keys())} are held"

    # The node

    def start_node(self) -> None:
        self.inventory = Inventory([GPU], {GPU.uuid: 0}, SHARING)
        for claim, device in self.prepared.items():
            self.inventory.hold(ClaimReference("default", claim, claim), [device])
        instructions, fields = GivenInstructions(self.heard_plan, lambda: self.alive), KeptFields()
        store, timing = GivenStore(self.memory, self.remember), ModeTiming(lambda: self.now, lambda: 0.5)
        self.follower = PlanFollower(instructions, self.inventory, fields, store, ChangeNotifier(), timing=timing)
        self.report = PlanReport(self.follower)
        self.builder = SliceBuilder(POOL)

    def heard_plan(self) -> GpuNodePlan | None:
        return self.seen_plan if self.seen_plan.spec.epoch else None

    def published_names(self) -> list[str]:
        return [device["name"] for spec in self.stored.slices.values() for device in spec.get("devices", ())]

    def remember(self, memory: PlanMemory) -> None:
        self.memory = memory

    @rule(hears=st.booleans(), writes=st.integers(1, 4))
    def the_node_publishes(self, hears: bool, writes: int = ALL) -> None:
        """Write so many slices at most; then something else happens first. ``hears``: its current plan."""
        if hears:
            self.seen_plan = self.plan
        desired = self.builder.build(self.follower.published(GivenSlices(self.published_names)))
        items = {
            name: {"metadata": {"resourceVersion": "", "name": name}, "spec": spec}
            for name, spec in self.stored.slices.items()
        }
        todo = changes(desired, items, {}, POOL)
        for name, content in todo.write[:writes]:
            written = slice_object(name, content, POOL, todo.generation, todo.count, None)["spec"]
            self.store(slices={**self.stored.slices, name: deepcopy(written)})
        self.plan = msgspec.structs.replace(self.plan, status=self.report.status())

    @rule(data=st.data())
    def something_goes_wrong(self, data: st.DataObject) -> None:
        """A process is killed, or the kubelet deletes the slices, or the node gets no heartbeat for long."""
        happens = data.draw(st.sampled_from((self.start_node, self.start_controller, self.wipe, self.lose_heartbeat)))
        happens()

    def wipe(self) -> None:
        self.store(slices={})

    def lose_heartbeat(self) -> None:
        self.alive = False
        self.the_node_publishes(hears=False)
        self.now += 100.0
        self.the_node_publishes(hears=False)
        self.alive = True

    @rule(claim=st.sampled_from(CLAIMS))
    def the_node_prepares(self, claim: str) -> None:
        name = self.stored.claims.get(claim)
        if name and claim not in self.prepared and self.inventory.conflict(claim, allocated(name)) is None:
            self.prepared[claim] = allocated(name)
            self.inventory.hold(ClaimReference("default", claim, claim), [allocated(name)])
            self.the_node_publishes(hears=False)
            self.prepared_at = len(self.history) - 1

    @rule(claim=st.sampled_from(CLAIMS))
    def a_claim_ends(self, claim: str) -> None:
        """Unprepared first, as the kubelet does."""
        if self.prepared.pop(claim, None):
            for scheduler in self.schedulers:
                scheduler.seen = max(scheduler.seen, self.prepared_at)
        self.inventory.release(claim)
        self.store(claims={name: device for name, device in self.stored.claims.items() if name != claim})

    # Schedulers

    @rule(at=st.integers(0, 1), steps=st.integers(1, 6))
    def a_scheduler_sees_newer_slices(self, at: int, steps: int) -> None:
        scheduler = self.schedulers[at % len(self.schedulers)]
        scheduler.seen = min(scheduler.seen + steps, len(self.history) - 1)

    @rule(at=st.integers(0, 1), claim=st.sampled_from(CLAIMS), pick=st.integers(0, 30), tolerates=st.booleans())
    def a_scheduler_decides(self, at: int, claim: str, pick: int, tolerates: bool) -> None:
        scheduler = self.schedulers[at % len(self.schedulers)]
        if claim in self.stored.claims or any(each.claim == claim for each in scheduler.assumed):
            return
        taken = [*self.stored.claims.values(), *(each.device for each in scheduler.assumed)]
        published = {
            each["name"]: each
            for spec in self.history[scheduler.seen].slices.values()
            for each in spec.get("devices", ())
        }
        # Counters are subtracted only for devices in the slices; a device in use needs none any more.
        used = GpuState.of(GPU, [DEVICES[name] for name in published.keys() & {*taken}])
        free = [
            name
            for name, each in sorted(published.items())
            if name in DEVICES
            and taken.count(name) < most_claims(name)
            and (name in taken or used.fits(DEVICES[name]))
            and (tolerates or CLOSED not in each.get("taints", ()))
        ]
        if free:
            scheduler.assumed.append(Decision(claim, free[pick % len(free)]))

    @rule(at=st.integers(0, 1))
    def a_decision_is_written(self, at: int) -> None:
        """The oldest one; the fence may refuse it, and nobody else may have allocated the claim meanwhile."""
        scheduler = self.schedulers[at % len(self.schedulers)]
        if scheduler.assumed:
            made = scheduler.assumed.pop(0)
            if PoolDevice(POOL.name, made.device) not in self.fenced and made.claim not in self.stored.claims:
                self.store(claims={**self.stored.claims, made.claim: made.device})

    # The controller

    def start_controller(self) -> None:
        """A new leader: its caches are listed, and devices that the plan offers are no longer fenced."""
        self.claims_at = self.slices_at = len(self.history) - 1
        self.to_check: set[PoolDevice] = set()
        self.lifted: set[PoolDevice] = set()
        self.withdrawable: set[PoolDevice] = set()
        self.held_publication = HeldPublication(lambda: self.now, lambda: 0.0)
        offered = self.plan.spec.offered
        self.fenced -= {PoolDevice(POOL.name, name) for name, device in DEVICES.items() if device.offer in offered}
        self.pending: tuple[GpuNodePlan, PlanSpec] | None = None

    @rule(claims=st.integers(0, 4), slices=st.integers(0, 4))
    def the_controller_sees_newer_objects(self, claims: int, slices: int) -> None:
        newest = len(self.history) - 1
        self.claims_at = min(self.claims_at + claims, newest)
        self.slices_at = min(self.slices_at + slices, newest)

    def lift(self, devices: set[PoolDevice]) -> None:
        """Lift the fence. By then every scheduler has seen the slices without the devices that were withdrawn."""
        for scheduler in self.schedulers if devices & self.fenced else ():
            scheduler.seen = len(self.history) - 1
            names = {PoolDevice(POOL.name, each.device): each for each in scheduler.assumed}
            scheduler.assumed = [each for device, each in names.items() if device not in devices & self.fenced]
        self.fenced -= devices

    def catch_up(self) -> None:
        self.claims_at = len(self.history) - 1

    def index(self) -> ClaimIndex:
        """The controller's claims."""
        index = ClaimIndex(POOL.driver)
        for name, device in self.history[self.claims_at].claims.items():
            consumed: dict[str, str | int] | None = {"memory": f"{PART}Gi"} if is_shared(device) else None
            share_id = name if is_shared(device) else None
            results = (Result("gpu", POOL.driver, POOL.name, device, share_id=share_id, consumed_capacity=consumed),)
            status = ClaimStatus(Allocation(DeviceAllocation(results)))
            claim = Claim(Metadata(name=name, namespace="default", uid=name), ClaimSpec(), status)
            index.put(claim.metadata.key, claim)
        return index

    def view(self) -> NodeView:
        views = NodeViews(POOL.driver)
        node = Node(Metadata(name="n1", uid="n1"))
        objects = (
            {"metadata": {"name": name, "resourceVersion": ""}, "spec": spec}
            for name, spec in self.history[self.slices_at].slices.items()
        )
        slices = [_published(msgspec.convert(item, ResourceSlice)) for item in objects]
        views.update("n1", node, self.plan, slices, self.index().held(POOL.name), node_changed=True)
        return views.all()[0]

    @rule(wanted=st.lists(NAMES, max_size=4))
    def the_controller_decides(self, wanted: list[str]) -> None:
        view = self.view()
        of_view = changes_of([view])
        fleet, devices = FleetBuilder().build([view], of_view), UnheldDevices()
        devices.update([view], of_view, fleet)
        plans = {"n1": self.plan} if self.plan.spec.epoch else {}
        shared = [device for entry in fleet for device in entry.held if device.kind is DeviceKind.SHARED]
        fitting = {device.name: device.offer for device in (*shared, *(d for e in fleet for d in possible(e)))}
        offers = devices.offerable([fitting[name] for name in wanted if name in fitting], plans)
        excess = {device for offer, device in devices.managed.items() if offer not in offers}
        self.withdrawable = {each for each in self.withdrawable & excess & self.fenced if devices.is_published(each)}
        self.lifted = devices.of({*offers, *(devices.free.keys() - devices.managed.keys())})
        self.to_check = (self.to_check & excess) - self.lifted
        self.excess = excess
        modes = self.held_publication.decide(len(fleet.gpus), self.most_gpus, plans, ["n1"], ())
        if again := first_offers(offers, fleet, devices, plans):
            self.catch_up()
            if self.index().held(POOL.name) != view.held:
                offers -= again.keys()
        asked = Asked(OfferMode.COUNTERS, frozenset(offers), frozenset(), frozenset(self.withdrawable))
        specs = PlanSpecs().update([view], of_view, fleet, asked, modes)
        self.pending = (self.plan, specs["n1"])

    @rule()
    def the_plan_is_written(self) -> None:
        """Unless it changed since it was read."""
        if self.pending is None:
            return
        read, spec = self.pending
        self.pending = None
        self.lift(self.lifted)
        if read.spec is self.plan.spec:
            metadata = msgspec.structs.replace(self.plan.metadata, generation=self.plan.metadata.generation + 1)
            self.plan = msgspec.structs.replace(self.plan, metadata=metadata, spec=spec)

    @rule(wanted=st.lists(NAMES, max_size=3), withdraws=st.booleans())
    def all_follow_a_new_decision(self, wanted: list[str], withdraws: bool) -> None:
        """Without this, few examples come to where a GPU is unpublished."""
        for again in (False, True) if withdraws else (False,):
            if again:
                self.the_controller_fences_what_is_not_wanted()
                self.the_controller_checks_what_it_has_fenced()
            self.the_controller_sees_newer_objects(len(self.history), len(self.history))
            self.the_controller_decides(wanted)
            self.the_plan_is_written()
            self.the_node_publishes(hears=True)

    @rule(claim=st.sampled_from(CLAIMS), pick=st.integers(0, 30))
    def a_claim_is_allocated_from_current_slices(self, claim: str, pick: int) -> None:
        self.a_scheduler_sees_newer_slices(0, len(self.history))
        self.a_scheduler_decides(0, claim, pick, tolerates=False)
        self.a_decision_is_written(0)

    @rule(claim=st.sampled_from(CLAIMS), pick=st.integers(0, 9), wanted=st.lists(NAMES, max_size=2), late=st.booleans())
    def a_claim_comes_and_goes(self, claim: str, pick: int, wanted: list[str], late: bool) -> None:
        """``late``: it ends before the controller hears of it."""
        self.a_claim_is_allocated_from_current_slices(claim, pick)
        if not late:
            self.all_follow_a_new_decision(wanted, withdraws=False)
        self.a_claim_ends(claim)

    @rule(
        at=st.integers(0, 1),
        claim=st.sampled_from(CLAIMS),
        pick=st.integers(0, 9),
        wanted=st.lists(NAMES, max_size=2),
        withdraws=st.booleans(),
    )
    def a_decision_is_late(self, at: int, claim: str, pick: int, wanted: list[str], withdraws: bool) -> None:
        self.a_scheduler_decides(at, claim, pick, tolerates=True)
        self.all_follow_a_new_decision(wanted, withdraws)
        self.a_decision_is_written(at)

    @rule()
    def the_controller_fences_what_is_not_wanted(self) -> None:
        self.to_check = set(getattr(self, "excess", ()))
        self.fenced |= self.to_check

    @rule()
    def the_controller_checks_what_it_has_fenced(self) -> None:
        self.catch_up()
        held = {PoolDevice(POOL.name, name) for name in self.index().held(POOL.name)}
        self.fenced -= self.to_check & held
        self.withdrawable |= self.to_check - held
        self.to_check = set()


class TwoSchedulers(OneNode):
    """An old leader still writes what it has decided before, while another one decides."""

    schedulers_count = 2


TestOneScheduler, TestTwoSchedulers = OneNode.TestCase, TwoSchedulers.TestCase
LONG = settings(stateful_step_count=60, max_examples=5 * settings().max_examples)
TestOneScheduler.settings = TestTwoSchedulers.settings = LONG
