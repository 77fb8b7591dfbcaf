"""A random life of a node: claims come and go, the plugin dies at any step, admins meddle; memory is given once."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from driver.errors import HardwareError, RecoverableError
from driver.model.device import Device
from driver.model.gpu import Partition
from driver.model.gpu_settings import GpuSharing, parse_shared, time_slice_in_force
from driver.model.shared_memory import MemoryLimit
from driver.placement.occupancy import GpuState, overlap
from driver.step_observer import Moment
from kubelet_plugin.claims.allocation import pods_of
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.step_names import NodeStep
from tests.support.claims import opaque, result
from tests.support.invariants import limits_in_force, limits_of
from tests.support.memory_limits import description_with_limits, make_cgroup
from tests.support.node import NodeUnderTest, start_node

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where a write that has to reach the disk costs nothing."""

CLAIMS = st.sampled_from(["a", "b", "c", "d"])
STEPS = st.sampled_from(list(NodeStep))
MOMENTS = st.sampled_from(["before", "after"])
PODS = st.sampled_from([("a1",), ("a1",), ("b2",), ("a1", "b2")])
"""Claims of one pod are held to their sum, and a claim may be that of several pods."""

WHOLE = 79
"""GiB of the shared device."""

PARTS = st.sampled_from([1, 6, 20, 40, WHOLE])
DEVICES = [
    "gpu-0",
    *(f"gpu-0-mig-1g10gb-{start}" for start in range(7)),
    *(f"gpu-0-mig-2g20gb-{start}" for start in (0, 2, 4)),
    "gpu-0-mig-1g10gbme-3",
    "gpu-0-mig-3g40gb-0",
    "gpu-0-mig-3g40gb-4",
    "gpu-0-mig-4g40gb-0",
    "gpu-0-mig-7g80gb-0",
    *(f"gpu-0-share-{index}" for index in range(4)),
]
SHARING = GpuSharing(lambda _: 4, strategy_of=parse_shared("all=time-slicing").of)


def part(gib: int, share: str, request: str) -> dict[str, Any]:
    return result("gpu-0-shared", request, shareID=share, consumedCapacity={"memory": f"{gib}Gi"})


def share_config(interval: str) -> dict[str, Any]:
    sharing = {"strategy": "TimeSlicing", "timeSlicing": {"interval": interval}}
    return opaque({"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "ShareConfig", "sharing": sharing})


class Crash(BaseException):
    """As sudden as SIGKILL: no handler of ours catches it."""


class NodeLife(RuleBasedStateMachine):
    """One H100. ``foreign`` are the partitions an admin made by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="tessera-model-", dir=MEMORY))
        self.trouble: tuple[NodeStep, Moment, type[BaseException]] | None = None
        self.node: NodeUnderTest = start_node(
            self.root, observer=self.observe, gpus=description_with_limits("h100-1"), sharing=SHARING
        )
        for [pod] in (("a1",), ("b2",)):
            make_cgroup(self.node.simulated, f"kubepods/pod{pod}")
        self.claims: dict[str, ClaimReference] = {}
        self.prepared: set[str] = set()
        self.foreign: list[Partition] = []

    def observe(self, step: NodeStep, moment: Moment) -> None:
        if self.trouble is not None and (step, moment) == self.trouble[:2]:
            raised, self.trouble = self.trouble[2], None
            raise raised("simulated")

    @rule(
        name=CLAIMS,
        devices=st.lists(st.sampled_from(DEVICES), min_size=1, max_size=2, unique=True),
        interval=st.sampled_from([None, None, None, "Short", "Long"]),
    )
    def allocate(self, name: str, devices: list[str], interval: str | None) -> None:
        """A claim is allocated, or anew; nobody asks whether it fits."""
        self.prepared.discard(name)
        results = [result(device, f"r{index}") for index, device in enumerate(devices)]
        config = [share_config(interval)] if interval else []
        self.claims[name] = self.node.api.allocate(name, *results, config=config)

    @rule(name=CLAIMS, parts=st.lists(PARTS, min_size=1, max_size=2), pods=PODS)
    def allocate_memory(self, name: str, parts: list[int], pods: tuple[str, ...]) -> None:
        """The same of a shared device; or only other pods use the claim now."""
        self.prepared.discard(name)
        results = [part(gib, f"{name}-{index}-{gib}", f"r{index}") for index, gib in enumerate(parts)]
        self.claims[name] = self.node.api.allocate(name, *results, pods=pods)

    @rule(name=CLAIMS)
    def prepare(self, name: str) -> None:
        if name not in self.claims:
            return
        try:
            answer = self.node.preparer.prepare(self.claims[name])
        except RecoverableError:
            return
        allocated = self.node.api.claims["default", name].status.allocation
        assert allocated is not None
        assert {device.device for device in answer} == {found.device for found in allocated.devices.results}
        self.prepared.add(name)

    @rule(name=CLAIMS)
    def unprepare(self, name: str) -> None:
        if name not in self.claims:
            return
        self.prepared.discard(name)
        try:
            self.node.preparer.unprepare(self.claims[name])
        except RecoverableError:
            return
        assert f"{self.claims[name].uid}.json" not in self.node.records()

    @rule(shares=st.sampled_from([2, 3, 4]))
    def restart(self, shares: int = 4) -> None:
        """A new process, maybe with another number of shares in its settings."""
        self.trouble = None
        self.node = self.node.restart(self.observe, replace(SHARING, shares_of=lambda _: shares))

    @rule(name=CLAIMS, preparing=st.booleans(), step=STEPS, moment=MOMENTS)
    def crash(self, name: str, preparing: bool, step: NodeStep, moment: Moment) -> None:
        """The plugin is killed at some step, if it comes to that step, and started again."""
        self.trouble = (step, moment, Crash)
        before, concerned = limits_in_force(self.node.simulated), self.pods_of(name)
        with suppress(Crash):
            (self.prepare if preparing else self.unprepare)(name)
        after = limits_in_force(self.node.simulated)
        others = {key for key in before.keys() | after.keys() if key[1] not in concerned}
        assert {key: before.get(key) for key in others} == {key: after.get(key) for key in others}
        self.restart()

    def pods_of(self, name: str) -> set[str]:
        """Those that the claim is for now, and was for when it was prepared."""
        if name not in self.claims:
            return set()
        record = self.node.node.checkpoint.get(self.claims[name].uid)
        return {*pods_of(self.node.api.claims["default", name]), *(record.pods if record else ())}

    @rule(name=CLAIMS, preparing=st.booleans(), step=STEPS, moment=MOMENTS)
    def fail(self, name: str, preparing: bool, step: NodeStep, moment: Moment) -> None:
        """A step fails, if it comes to that step."""
        self.trouble = (step, moment, HardwareError)
        (self.prepare if preparing else self.unprepare)(name)
        self.trouble = None

    @rule(choice=st.integers(0, 30))
    def meddle(self, choice: int) -> None:
        """An admin cuts a partition by hand where there is room."""
        host, gpu = self.node.host, self.node.node.inventory.gpus[0]
        placements = [(profile, place) for profile in gpu.profiles for place in profile.placements]
        profile, place = placements[choice % len(placements)]
        if self.node.held() or self.foreign:
            return
        try:
            host.set_mig_mode(gpu, enabled=True)
            self.foreign.append(host.create_gpu_instance(gpu, profile, place))
        except HardwareError:
            return

    @rule()
    def tidy(self) -> None:
        """The admin removes them again."""
        host, gpu = self.node.host, self.node.node.inventory.gpus[0]
        for partition in self.foreign:
            host.destroy_gpu_instance(gpu, partition)
        self.foreign.clear()

    @invariant()
    def held_devices_are_disjoint(self) -> None:
        held = self.devices()
        for index, device in enumerate(held):
            assert GpuState.of(device.gpu, held[:index]).fits(device)
        assert len({device.name for device in held}) == len(held)

    @invariant()
    def pods_are_limited_to_what_their_claims_have(self) -> None:
        records = self.node.node.checkpoint.records()
        if all(record.phase == "prepared" and not record.releasing for record in records):  # else something is owed
            assert limits_in_force(self.node.simulated) == limits_of(records)
            shared = [device for record in records for device in record.devices if device.gib]
            assert all(device.limit is MemoryLimit.CGROUP for device in shared)

    @invariant()
    def offers_never_overlap_what_is_held(self) -> None:
        for entry in self.node.node.inventory.published():
            for held in entry.held:
                assert not [offer.name for offer in entry.offers if overlap(offer, held)]

    @invariant()
    def the_time_slice_is_what_the_claims_ask_for(self) -> None:
        records = self.node.node.checkpoint.records()
        if all(record.phase == "prepared" for record in records):  # else something is owed
            wishes = [device.time_slice for record in records for device in record.devices]
            assert self.node.simulated.gpu_state(0).time_slice == time_slice_in_force(wishes).number

    @invariant()
    def every_partition_is_held_or_an_admins(self) -> None:
        held = {(device.profile.id, device.placement) for device in self.devices() if device.profile is not None}
        for partition in self.node.partitions():
            if partition not in self.foreign:
                assert (partition.profile_id, partition.placement) in held
        assert set(self.foreign) <= set(self.node.partitions())

    @invariant()
    def what_is_held_is_recorded(self) -> None:
        recorded = {d.device for record in self.node.node.checkpoint.records() for d in record.devices}
        assert {device.name for device in self.devices()} == recorded

    @invariant()
    def a_claim_that_was_answered_has_its_spec_and_its_record(self) -> None:
        specs = self.node.cdi_specs()
        for name in self.prepared:
            uid = self.claims[name].uid
            record = self.node.node.checkpoint.get(uid)
            assert record is not None
            assert record.phase == "prepared"
            assert f"gpu.tessera.dev-claim_{uid}.json" in specs

    def devices(self) -> list[Device]:
        return [device for entry in self.node.node.inventory.published() for device in entry.held]

    def teardown(self) -> None:
        """Whatever happened: when every claim is unprepared nothing is left but what the admin made."""
        self.trouble = None
        for claim in self.claims.values():
            self.node.preparer.unprepare(claim)
        assert self.node.records() == []
        assert self.node.cdi_specs() == {}
        assert self.node.held() == set()
        assert self.node.partitions() == self.foreign
        assert limits_in_force(self.node.simulated) == {}
        shutil.rmtree(self.root)


TestNodeLife = NodeLife.TestCase
TestNodeLife.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
