"""What claims have, as the API server stored it: is any memory given out twice, is anything held ever touched?"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import msgspec

from controller.cluster.claim_index import PoolDevice
from driver.errors import ApiError
from driver.kube.client import KubeClient, load_configuration
from driver.kube.get_and_list import RESOURCE_GROUP
from driver.kube.types import Claim, GpuNodePlan, Key, ObjectMeta
from driver.kube.watch_cache import Change, WatchCache
from driver.model.device import Device, devices_of, number_gpus
from driver.model.plan import PATH
from driver.model.shared_memory import GIB, SharedMemory, SharingStrategy, gib_of
from driver.placement.occupancy import overlap
from driver.simulator.description import load_description
from tests.harness.cluster import Cluster
from tests.support.plugin import SLICES
from tests.support.published import DRIVER, discover
from tests.support.running import eventually

T = TypeVar("T")


@dataclass(frozen=True)
class Held:
    """What one claim has, and since when: monotonic, as this process heard of it, and the version of the claim.

    ``gib``: how much of each device, if others may have a part of it.
    """

    uid: str
    devices: tuple[PoolDevice, ...]
    gib: tuple[int, ...]
    at: float = field(compare=False)
    version: int = field(compare=False)


class SliceDevice(msgspec.Struct, frozen=True):
    name: str
    counters: tuple[dict[str, Any], ...] = msgspec.field(default=(), name="consumesCounters")


class CounterSet(msgspec.Struct, frozen=True):
    name: str


class SliceSpec(msgspec.Struct, frozen=True):
    pool: dict[str, Any]
    devices: tuple[SliceDevice, ...] | None = ()
    sets: tuple[CounterSet, ...] = msgspec.field(default=(), name="sharedCounters")


class Slice(msgspec.Struct, frozen=True):
    metadata: ObjectMeta
    spec: SliceSpec


@dataclass(frozen=True)
class Published:
    """One slice, as it was written at ``version``. ``counters`` are what each of its devices consumes."""

    pool: str
    counters: Mapping[PoolDevice, tuple[dict[str, Any], ...]]
    sets: frozenset[str]
    version: int = field(compare=False)


@cache
def devices_by_name(hardware: str, shares: int = 0) -> Mapping[str, Device]:
    """Everything a node of that hardware could ever offer, each GPU perhaps as so many shares, or by memory."""
    with TemporaryDirectory() as folder:
        gpus = discover(load_description(hardware), Path(folder))
    numbers = number_gpus(gpus, {})
    shared = SharedMemory(SharingStrategy.TIME_SLICING, GIB)
    return {d.name: d for gpu in gpus for d in devices_of(gpu, numbers[gpu.uuid], shares, shared=shared)}


class Allocations:
    """Watches while ``stop`` is not set. All nodes have the same hardware, and offer so many shares of each GPU.

    ``overlaps`` are allocations of memory that another claim had, in the order in which the API server stored them.
    ``touched`` are devices that changed their counters or were withdrawn by a plan while a claim had them, or that a
    slice lacked which had another device of their GPU that no claim had; and devices whose counter set no slice had.

    This is looked at for each write of a slice or claim that a watch brings. Watches of claims and slices are not in
    step, but versions of both are of one etcd: a slice breaks a promise to a claim if it is newer than the allocation,
    and the claim has the device still, whichever of them came first. So an alarm is true. Missed are claims that ended
    before they were read again, and slices that were written again before the claim arrived.

    ``most`` is how many GiB claims have had of each shared device at one time.
    ``unpublished`` and ``republished`` count how often a GPU with held devices left its slice, and came back.
    ``on_change`` is told the name of each claim that got or lost devices, and what it has now.
    """

    def __init__(
        self,
        cluster: Cluster,
        hardware: str,
        on_change: Callable[[str, Held | None], None] = lambda name, held: None,
        shares: int = 0,
    ) -> None:
        self._client = KubeClient(load_configuration(cluster.kubeconfig), "test-allocations")
        self._devices = devices_by_name(hardware, shares)
        self._on_change = on_change
        self._claims = WatchCache(self._client, f"{RESOURCE_GROUP}/resourceclaims", Claim, _held, self._claims_changed)
        self._slices = WatchCache(self._client, SLICES, Slice, _published, self._slices_changed)
        self._plans = WatchCache(self._client, PATH, GpuNodePlan, lambda found: found, self._plans_changed)
        self.times: list[float] = []
        """Of every allocation (monotonic)."""
        self.late = 0
        """Devices that were no longer in the slices when they were given out."""
        self.overlaps: list[str] = []
        self.touched: list[str] = []
        self.most: Counter[PoolDevice] = Counter()
        self.unpublished = self.republished = 0
        self._changing = threading.Lock()
        self._since: dict[Key, Held] = {}
        """What claims have, with the version in which they got it."""
        self._written: dict[Key, Published] = {}

    def start(self, stop: threading.Event) -> None:
        for watched in (self._claims, self._slices, self._plans):
            threading.Thread(target=watched.run, args=(stop,), daemon=True).start()
        eventually(lambda: self._claims.synced and self._slices.synced and self._plans.synced, "all was listed")

    def of(self, claim: str) -> tuple[PoolDevice, ...]:
        """The devices of the claim ``default/<claim>``; none before it has any."""
        found = self._claims.get(Key("default", claim))
        return found.devices if found else ()

    def held(self) -> dict[str, tuple[PoolDevice, ...]]:
        return {key.name: found.devices for key, found in self._claims.snapshot().items()}

    def published(self) -> set[PoolDevice]:
        return {device for found in self._slices.snapshot().values() for device in found.counters}

    def _claims_changed(self, changes: Sequence[Change[Held]]) -> None:
        for change in changes:
            if change.new:
                self.times.append(change.new.at)
                self.late += len(set(change.new.devices) - self.published())
                self._look_for_overlaps(change.key, change.new)
            self._on_change(change.key.name, change.new)
        held: Counter[PoolDevice] = Counter()
        for claim in self._claims.snapshot().values():
            for device, gib in zip(claim.devices, claim.gib, strict=True):
                held[device] += gib
        self.most |= held
        with self._changing:
            _keep(self._since, changes)
            self._look_for_absent({device.pool for change in changes if change.new for device in change.new.devices})

    def _look_for_overlaps(self, key: Key, new: Held) -> None:
        for other, theirs in self._claims.snapshot().items():
            if other == key:
                continue
            for mine, have in product(new.devices, theirs.devices):
                if mine.pool == have.pool and overlap(self._devices[mine.device], self._devices[have.device]):
                    self.overlaps.append(f"{time.strftime('%H:%M:%S')} {key.name} got {mine}; {other.name} has {have}")

    def missing(self) -> set[PoolDevice]:
        """Held devices that are not in the slices although something else of their GPU is offered there."""
        held = {device for devices in self.held().values() for device in devices}
        published = self.published()
        offering = {_gpu_of(device) for device in published - held}
        return {device for device in held - published if _gpu_of(device) in offering}

    def _slices_changed(self, changes: Sequence[Change[Published]]) -> None:
        with self._changing:
            _keep(self._written, changes)
            held = {device: (key, claim) for key, claim in self._since.items() for device in claim.devices}
            for change in changes:
                old, new = (found.counters if found else {} for found in (change.old, change.new))
                self._count({*map(_gpu_of, old.keys() & held)}, {*map(_gpu_of, new.keys() & held)})
                for device in old.keys() & new.keys() & held.keys():
                    if old[device] != new[device] and self._still(*held[device]):
                        self._touch(f"{device} of {held[device][0].name} changed: {new[device]}")
            pools = {found.pool for change in changes for found in (change.old, change.new) if found}
            self._look_for_absent(pools)
            self._look_for_missing_sets(pools)

    def _look_for_absent(self, pools: set[str]) -> None:
        for found in (each for each in self._written.values() if each.pool in pools):
            before = {key: claim for key, claim in self._since.items() if claim.version < found.version}
            held = {device for claim in before.values() for device in claim.devices}
            offering = {_gpu_of(device) for device in found.counters.keys() - held}
            for key, claim in before.items() if offering else ():
                for device in set(claim.devices) - found.counters.keys():
                    if _gpu_of(device) in offering and self._still(key, claim):
                        self._touch(f"{device} of {key.name} is not in its slice of version {found.version}")

    def _look_for_missing_sets(self, pools: set[str]) -> None:
        for pool in pools:
            slices = [found for found in self._written.values() if found.pool == pool]
            sets = {name for found in slices for name in found.sets}
            for found in slices:
                for device, counters in found.counters.items():
                    if absent := {used["counterSet"] for used in counters} - sets:
                        self._touch(f"{device} refers to counter sets that are in no slice: {absent}")

    def _touch(self, what: str) -> None:
        self.touched.append(f"{time.strftime('%H:%M:%S')} {what}")

    def _count(self, before: set[tuple[str, str]], after: set[tuple[str, str]]) -> None:
        self.unpublished += len(before - after)
        self.republished += len(after - before)

    def _plans_changed(self, changes: Sequence[Change[GpuNodePlan]]) -> None:
        for change in changes:
            pool = f"{change.key.name}-{DRIVER}"
            before, now = (set(plan.spec.withdrawn) if plan else set() for plan in (change.old, change.new))
            withdrawn = {PoolDevice(pool, device) for device in now - before}
            for name, held in self._claims.snapshot().items():
                if withdrawn & set(held.devices) and self._still(name, held):
                    self._touch(f"a plan withdraws what {name.name} has")

    def _still(self, key: Key, held: Held) -> bool:
        """Whether the claim has it now: after its slice was changed, and so when it was."""
        try:
            found = self._client.get(f"{RESOURCE_GROUP}/namespaces/{key.namespace}/resourceclaims/{key.name}")
        except ApiError:
            return False
        now = _held(msgspec.json.decode(found, type=Claim))
        return now is not None and (now.uid, now.devices) == (held.uid, held.devices)


def _keep(kept: dict[Key, T], changes: Sequence[Change[T]]) -> None:
    for change in changes:
        if change.new is None:
            kept.pop(change.key, None)
        else:
            kept[change.key] = change.new


def _published(found: Slice) -> Published:
    pool = found.spec.pool["name"]
    counters = {PoolDevice(pool, device.name): device.counters for device in found.spec.devices or ()}
    return Published(pool, counters, frozenset(each.name for each in found.spec.sets), found.metadata.version)


def _gpu_of(device: PoolDevice) -> tuple[str, str]:
    """The pool, and the number of the GPU in it."""
    return device.pool, device.device.split("-")[1]


def _held(claim: Claim) -> Held | None:
    if claim.status.allocation is None:
        return None
    results = [result for result in claim.status.allocation.devices.results if result.driver == DRIVER]
    devices = tuple(PoolDevice(result.pool, result.device) for result in results)
    gib = tuple(gib_of(result.consumed_capacity, 0) or 0 for result in results)
    return Held(claim.metadata.uid, devices, gib, time.monotonic(), claim.metadata.version)
