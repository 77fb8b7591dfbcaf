"""Devices without counters never overlap, whatever plans say, claims hold, and API servers keep."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from driver.kube.types import GpuNodePlan, PlanMetadata
from driver.model.device import Device, devices_of, merged
from driver.model.gpu_events_and_conditions import DeviceCondition
from driver.model.gpu_settings import GpuSharing, parse_shared
from driver.model.offer import Offer, Spot
from driver.model.plan import COUNTERS_FIELD, TAINTS_FIELD, OfferMode, PlanMode, PlanSpec, PublishHeld
from driver.model.shared_memory import SharingStrategy
from driver.placement.occupancy import GpuState
from driver.slices.build import PublishedGpu, SliceBuilder, slice_object
from driver.slices.publisher import changes
from driver.slices.slice_names import Pool
from kubelet_plugin.changes import ChangeNotifier
from kubelet_plugin.inventory.inventory import ClaimReference, Inventory
from kubelet_plugin.plan.follower import PlanFollower
from kubelet_plugin.plan.mode import ModeTiming
from kubelet_plugin.plan.plan_file import PlanMemory
from kubelet_plugin.plan.plan_status import PlanReport
from tests.support.following import GivenFields, GivenInstructions, GivenSlices, GivenStore
from tests.support.gpus import gpu_of

POOL = Pool("n1", "gpu.tessera.dev")
GPUS = [gpu_of(minor=0), gpu_of(minor=1)]
SHARES = {"GPU-0": 0, "GPU-1": 3}
SHARING = GpuSharing(lambda gpu: SHARES[gpu.uuid], strategy_of=parse_shared("all=time-slicing").of)
ON_GPU = {
    gpu.uuid: devices_of(gpu, gpu.minor, SHARES[gpu.uuid], shared=SHARING.memory_of(gpu, SharingStrategy.TIME_SLICING))
    for gpu in GPUS
}
DEVICES = {device.name: device for devices in ON_GPU.values() for device in devices}
NAMES = st.lists(st.sampled_from(sorted(DEVICES)), max_size=6)
SHARED = ["gpu-0-shared", "gpu-1-shared"]
LARGE = st.lists(
    st.sampled_from(["gpu-0", "gpu-0-mig-3g40gb-0", "gpu-0-mig-3g40gb-4", "gpu-1", "gpu-1-share-0", *SHARED])
)
ALL = 100


def fit_together(devices: list[Device]) -> bool:
    return all(
        GpuState.of(device.gpu, [each for each in devices[:at] if each.gpu is device.gpu]).fits(device)
        for at, device in enumerate(devices)
    )


class Node(RuleBasedStateMachine):
    """One node, and an API server that may be replaced by one with other feature gates at any time."""

    @initialize(mode=st.sampled_from(PlanMode), dropped=st.booleans())
    def start(self, mode: PlanMode, dropped: bool) -> None:
        self.slices: dict[str, Any] = {}
        self.dropped: tuple[str, ...] = (COUNTERS_FIELD, TAINTS_FIELD) if dropped else ()
        self.claims: dict[str, Device] = {}
        self.memory = PlanMemory("epoch", mode)
        self.plan: GpuNodePlan | None = None
        self.alive, self.now = True, 0.0
        self.inventory = Inventory(GPUS, {"GPU-0": 0, "GPU-1": 1}, SHARING)
        self.start_node()

    def start_node(self) -> None:
        instructions = GivenInstructions(lambda: self.plan, lambda: self.alive)
        fields = GivenFields(lambda: self.dropped)
        store, timing = GivenStore(self.memory, self.remember), ModeTiming(lambda: self.now, lambda: 0.5)
        self.follower = PlanFollower(instructions, self.inventory, fields, store, ChangeNotifier(), timing=timing)
        self.report = PlanReport(self.follower)
        self.builder = SliceBuilder(POOL)

    def offered(self) -> frozenset[Offer]:
        """What the plan offers that the node follows."""
        is_followed = self.memory.mode is PlanMode.PLANNED and self.follower.mode_choice.plan_of_epoch() is not None
        return self.plan.spec.offered if self.plan is not None and is_followed else frozenset()

    @property
    def prepared(self) -> dict[str, Device]:
        """The devices of claims, a shared one with the memory of all its claims."""
        return {device.name: device for device in merged(self.claims.values())}

    def remember(self, memory: PlanMemory) -> None:
        self.memory = memory

    def stored_devices(self) -> list[dict[str, Any]]:
        return [device for spec in self.slices.values() for device in spec.get("devices", ())]

    def has_counters(self, entry: PublishedGpu) -> bool:
        spec = self.slices.get(POOL.device_slice(entry.number, divided=entry.divided), {})
        return any(COUNTERS_FIELD in device for device in spec.get("devices", ()))

    def write(self, name: str, spec: dict[str, Any]) -> None:
        """As an API server stores it."""
        old, new = self.slices.get(name, {}), deepcopy(spec)
        for field in self.dropped:
            in_use = any(field in device for device in old.get("devices", ()))
            if field == COUNTERS_FIELD and not in_use and "sharedCounters" not in old:
                new.pop("sharedCounters", None)
            for device in () if in_use else new.get("devices", ()):
                device.pop(field, None)
        self.slices[name] = new
        self.check_slices()

    def check_slices(self) -> None:
        for devices in ON_GPU.values():
            names = {device.name for device in devices}
            here = [each for each in self.stored_devices() if each["name"] in names]
            uncounted = [DEVICES[each["name"]] for each in here if COUNTERS_FIELD not in each]
            assert fit_together(uncounted), [device.name for device in uncounted]
            assert len(uncounted) in (0, len(here)), [each["name"] for each in here]

    @rule(writes=st.sampled_from([ALL, ALL, 1, 2]))
    def publish(self, writes: int) -> None:
        """``writes``: so many at most, then something else happens first."""
        before = self.follower.publication.names | {*self.memory.published}
        slices = GivenSlices(lambda: [device["name"] for device in self.stored_devices()], self.has_counters)
        found = self.follower.published(slices)
        after = {device.name for entry in found for device in (*entry.held, *entry.offers)}
        spec = self.plan.spec if self.plan is not None else PlanSpec()
        for name in before - after - set(spec.withdrawn):
            on_gpu = [each for each in self.prepared.values() if each.gpu is DEVICES[name].gpu]
            assert not GpuState.of(DEVICES[name].gpu, on_gpu).fits(DEVICES[name]), name
        if COUNTERS_FIELD in self.dropped or self.memory.offer_mode is OfferMode.DISJOINT:
            for entry in found:
                self.check_new_offers(entry, before)
        desired = self.builder.build(found)
        items = {
            name: {"metadata": {"resourceVersion": "", "name": name}, "spec": spec}
            for name, spec in self.slices.items()
        }
        todo = changes(desired, items, {}, POOL)
        for name, content in todo.write[:writes]:
            self.write(name, slice_object(name, content, POOL, todo.generation, todo.count, None)["spec"])
        if writes == ALL:
            self.check_published(found)

    def check_new_offers(self, entry: PublishedGpu, before: frozenset[str]) -> None:
        published = [*entry.held, *entry.offers]
        for device in entry.offers:
            others = [each for each in published if each is not device]
            assert device.name in before or GpuState.of(entry.gpu, others).fits(device), device.name

    def check_published(self, found: list[PublishedGpu]) -> None:
        there = {each["name"] for each in self.stored_devices()}
        left_out = set(self.report.status().left_out)
        assert not left_out & there
        for entry in found:
            published = [device for device in entry.offers if device.name in there]
            held = [device for device in self.prepared.values() if device.gpu is entry.gpu]
            assert entry.counted or entry.unpublished or fit_together([*held, *published])
            open_to_more = [device for device in held if device.shared is not None and device.offer in self.offered()]
            # An API server without counters gets nothing of a GPU on which a plan names what overlaps a claim's device.
            lacks_counters = entry.counted and entry.unpublished and COUNTERS_FIELD in self.dropped
            if published or (open_to_more and not lacks_counters):
                assert {device.name for device in held} <= there

    @rule(
        offers=st.one_of(NAMES, LARGE),
        held=st.lists(st.sampled_from(sorted(DEVICES)), max_size=2),
        withdrawn=st.one_of(NAMES, st.just(sorted(DEVICES))),
        disjoint=st.booleans(),
        publish_held=st.sampled_from(PublishHeld),
        knows=st.booleans(),
    )
    def a_plan_comes(
        self,
        offers: list[str],
        held: list[str],
        withdrawn: list[str],
        disjoint: bool,
        publish_held: PublishHeld,
        knows: bool,
    ) -> None:
        """Of a controller, or of an operator who paused it. It never withdraws what it knows to be held."""
        names = {*held, *(device.name for device in self.prepared.values() if knows)}
        spec = PlanSpec(
            self.memory.epoch,
            tuple(f"{name} default/claim" for name in sorted(names)),
            tuple(str(DEVICES[name].offer) for name in offers),
            tuple(withdrawn),
            publish_held,
            OfferMode.DISJOINT if disjoint else OfferMode.COUNTERS,
        )
        self.plan = GpuNodePlan(PlanMetadata("n1"), spec)
        self.publish(ALL)

    @rule()
    def the_controller_withdraws_every_free_device(self) -> None:
        self.a_plan_comes([], [], sorted(DEVICES), True, PublishHeld.ALWAYS, True)
        if self.memory.mode is PlanMode.PLANNED:
            status = self.report.status()
            assert (status.offer_mode, status.left_out) == (OfferMode.DISJOINT, ())
            assert {each["name"] for each in self.stored_devices()} == self.prepared.keys()

    @rule(at=st.integers(0, 99))
    def a_published_device_is_prepared(self, at: int) -> None:
        devices = self.stored_devices()
        if devices:
            self.prepare(devices[at % len(devices)]["name"])

    @rule(name=st.sampled_from([*sorted(DEVICES), *SHARED]), gib=st.sampled_from([1, 30, 60]))
    def prepare(self, name: str, gib: int = 1) -> None:
        """Also what is not published: a late allocation."""
        device, claim = DEVICES[name], name
        if device.shared is not None:
            device, claim = replace(device, spot=Spot(device.spot.kind, gib)), f"{name}-{gib}"
        on_gpu = [each for each in self.claims.values() if each.gpu is device.gpu]
        if claim not in self.claims and GpuState.of(device.gpu, on_gpu).fits(device):
            self.claims[claim] = device
            self.inventory.hold(ClaimReference("default", claim, claim), [device])

    @rule(at=st.integers(0, 9))
    def a_claim_ends(self, at: int) -> None:
        if self.claims:
            claim = sorted(self.claims)[at % len(self.claims)]
            del self.claims[claim]
            self.inventory.release(claim)

    @rule(fields=st.sampled_from([(), (COUNTERS_FIELD,), (TAINTS_FIELD,), (COUNTERS_FIELD, TAINTS_FIELD)]))
    def the_api_server_is_replaced(self, fields: tuple[str, ...]) -> None:
        self.dropped = fields

    @rule()
    def the_kubelet_deletes_the_slices(self) -> None:
        self.slices = {}

    @rule()
    def the_node_plugin_starts_anew(self) -> None:
        self.start_node()

    @rule(cordoned=st.booleans())
    def a_gpu_is_cordoned(self, cordoned: bool) -> None:
        conditions = (DeviceCondition("cordoned", "maintenance", cordon=True),) if cordoned else ()
        self.inventory.set_conditions("GPU-0", conditions)

    @rule(alive=st.booleans(), seconds=st.sampled_from([1.0, 100.0]))
    def time_passes(self, alive: bool, seconds: float) -> None:
        self.alive = alive
        self.follower.update_mode()
        self.now += seconds
        self.follower.update_mode()
        if self.plan is not None and alive:
            spec = msgspec.structs.replace(self.plan.spec, epoch=self.memory.epoch)
            self.plan = GpuNodePlan(PlanMetadata("n1"), spec)


TestNode = Node.TestCase
TestNode.settings = settings(stateful_step_count=40, max_examples=3 * settings().max_examples)
